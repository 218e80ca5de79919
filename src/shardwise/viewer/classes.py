"""The part of a report about the classes that a classifier tells apart."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from shardwise.run_dir.files import CLASSES
from shardwise.viewer.background import picture
from shardwise.viewer.page import paragraph, table
from shardwise.viewer.record import RunRecord, read_json

_MOST_CLASSES = 200  # in a table
_COLUMNS = ("classes", "images", "right", "predicted")


def classes(run: RunRecord) -> str:
    """For each stage that was evaluated: accuracy of every class, and the picture of what was taken for what."""
    return "".join(_stage(path) for path in sorted(run.path.glob(CLASSES))[:4] if path.is_file())


def _stage(path: Path) -> str:
    rows = _rows(read_json(path))
    images = sum(row[1] for row in rows)
    if not images:
        return ""
    stage = path.stem.partition("_")[2]
    shares = [right / count for _, count, right, _ in rows if count]
    line = (
        f"accuracy {sum(row[2] for row in rows) / images:.2%}, balanced accuracy {sum(shares) / len(shares):.2%} (the "
        f"mean over the {len(shares):,} classes that have images), of {images:,} images"
    )
    per_class = [
        [str(name), count, "" if not count else f"{right / count:.1%}", "" if not said else f"{right / said:.1%}"]
        for name, count, right, said in rows[:_MOST_CLASSES]
    ]
    head = ["class", "images", "accuracy: its images that were recognised", "precision: of what was taken for it"]
    more = f"the first {_MOST_CLASSES} of {len(rows):,} classes" if len(rows) > _MOST_CLASSES else ""
    drawn = path.with_name(f"confusion_matrix_{stage}.png")
    return (
        f"<h3>{escape(stage)}</h3>\n"
        + paragraph(line)
        + table(per_class, head)
        + paragraph(more, "soft")
        + (picture(drawn) if drawn.is_file() else "")
    )


def _rows(found: Any) -> list[tuple[str, int, int, int]]:
    """The rows of a file, without those that are damaged."""
    columns = [found.get(key) for key in _COLUMNS] if isinstance(found, dict) else [None]
    if not all(isinstance(column, list) for column in columns):
        return []
    rows = zip(*columns, strict=False)
    return [row for row in rows if all(isinstance(value, int) and value >= 0 for value in row[1:])]
