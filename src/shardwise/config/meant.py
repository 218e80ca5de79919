"""Says which word a user meant who typed one that cannot be read, so that it works in a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection


def as_text(key: str, value: str) -> str:
    """The remedy for a value that Hydra's grammar cannot read: the word with its value as quoted text."""
    if value[:1] in ("'", '"') and value.count(value[0]) == 1:
        return (
            f"its quote is not closed, perhaps since the shell took a space for its end; quote all of it: "
            f"\"{key}='{value[1:]} …'\""
        )
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    word = f"{key}='{escaped}'"
    shown = shlex.quote(word) if any(sign in word for sign in ('"', "$", "`", "!", "\\\\")) else f'"{word}"'
    return f"if it is meant as text, quote it: {shown}"


def without_dashes(argv: list[str], unknown: str, known: Collection[str]) -> list[str]:
    """The overrides that the `unknown` flags in `argv` were meant as: `--max-steps 10` → `max_steps=10`.

    `known`: the keys and groups of a run.
    """
    meant = []
    for flag, behind in zip(argv, [*argv[1:], ""], strict=True):
        key, equals, value = flag.lstrip("-").partition("=")
        key = own if (own := key.replace("-", "_")).partition(".")[0] in known else key
        if flag.startswith("--") and f" {flag} " in f" {unknown} " and (equals or key.partition(".")[0] in known):
            is_value = behind and not behind.startswith("--") and "=" not in behind
            meant.append(f"{key}={value if equals else behind if is_value else '…'}")
    return meant
