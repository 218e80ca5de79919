"""docs/lightning.md: what is here of each public name of Lightning."""

from __future__ import annotations

from functools import partial
from typing import get_args

from benchmarks.pages.markdown import table
from shardwise.config.coming_from_lightning import ROWS, Kind

ANSWERS = {"same": "the same", "word": "ours", "refused": "refused"}


def names_of(kind: str) -> list[str]:
    """The names of one kind; those with the same answer share a line."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for row in ROWS:
        if row.kind == kind:
            grouped.setdefault((row.answer, row.text, row.test), []).append(f"`{row.name}`")
    rows = []
    for (answer, text, test), names in grouped.items():
        said = ANSWERS[answer] + (f": {text}" if text else "")
        file, _, function = test.partition("::")
        rows.append([", ".join(names), said.replace("|", chr(92) + "|"), f"[{function}](../{file})"])
    return table(["Lightning", "here", "held by"], rows)


TABLES = {f"lightning_{kind.replace(' ', '_')}": partial(names_of, kind) for kind in get_args(Kind)}
