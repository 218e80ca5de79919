"""Reads the rows of metrics.csv and ranks.csv."""

from __future__ import annotations

import csv
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of such a file, each with its step; none where there is no file.

    A last row that a kill cut short is left out.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        whole = [line for line in file if line.endswith("\n")]
    return [row for row in csv.DictReader(whole) if row.get("step")]
