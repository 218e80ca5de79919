"""What came out of a folder of images: lines for the terminal, and report.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.data.prepare.work import SKIPPED
from shardwise.errors import count

SUFFIXES = (".jpg", ".jpeg", ".png")
_BAR = 40  # characters of the longest bar
_SHOWN = 20  # skipped images, and classes at each end


def summary(report: dict[str, Any]) -> list[str]:
    lines = [
        f"{split}: {found['images']:,} images of {count(sum(n > 0 for n in found['classes'].values()), 'class')}, "
        f"{found['bytes']:,} bytes in {count(found['shards'], 'shard')}"
        for split, found in report["splits"].items()
    ]
    pixels = report["pixels"]
    lines.append(f"pixels of an image: {pixels['least']:,} at least, {pixels['median']:,} in the median, "
                 f"{pixels['most']:,} at most")  # fmt: skip
    if report["skipped"]:
        lines.append(f"left out: {count(report['skipped'], 'image')}, listed in {SKIPPED}")
    if report["other_files"]:
        lines.append(f"not looked at: {count(report['other_files'], 'file')} of other kinds than {', '.join(SUFFIXES)}")
    return lines


def page(report: dict[str, Any], folder: Path) -> list[str]:
    lines = ["# Tar shards of images", "", *(f"{line}  " for line in summary(report)), ""]
    lines += ["## Images of each class, in train", "", "```", *_bars(report["splits"]["train"]["classes"]), "```", ""]
    rows = [json.loads(line) for line in (folder / SKIPPED).read_text().splitlines()]
    lines += ["## What was left out", "", *([] if rows else ["nothing"])]
    lines += [f"- `{row['path']}` {row['rule']}" for row in rows[:_SHOWN]]
    return lines + (["- …"] if len(rows) > _SHOWN else [])


def _bars(classes: dict[str, int]) -> list[str]:
    """The largest classes, as lines of text."""
    most, width = max(classes.values()), max(map(len, classes))
    largest = sorted(classes.items(), key=lambda item: -item[1])
    lines = [f"{name:<{width}}  {'█' * max(round(n * _BAR / most), n > 0):<{_BAR}}  {n:,}" for name, n in largest]
    return lines if len(lines) <= 2 * _SHOWN else [*lines[:_SHOWN], "…", *lines[-_SHOWN:]]
