"""Writes metrics.csv, which has a row for each logged step."""

from __future__ import annotations

import csv
import io
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from shardwise.run_dir.files import METRICS, partial_path, put_in_place, stage_file
from shardwise.run_dir.rows import keep_unless_goes_on, read_rows


class CsvLogger(Logger):
    """Writes each row to `<run>/metrics.csv` when it is logged, so that a killed run loses none.

    Lightning's CSVLogger deletes the file of the run that it continues. The attributes that modules read from that one
    are here too.
    """

    rows_are_steps = True  # a number that belongs to no step of the run goes to the other loggers only

    def __init__(self, run_dir: str | Path, stage: str = "fit") -> None:
        super().__init__()
        self.path = Path(run_dir) / stage_file(METRICS, stage)
        self._fields: list[str] = []
        # The step that the run goes on from, and the names that are logged for it already
        self._known: tuple[int, set[str]] = -1, set()
        self._is_awaited: Callable[[int], bool] = lambda step: False
        self._last: dict[str, str] = {}  # the last row
        self._last_offset = 0  # where the last row begins in the file
        # step → what callbacks have logged before the step's own row, or what could not be written
        self._waiting: dict[int, dict[str, Any]] = {}
        self._is_torn = False  # whether the last row could not be written, or not all of it

    def wait_for_rows(self, is_awaited: Callable[[int], bool]) -> None:
        """Keep what is logged for a step until its own row comes. `is_awaited(step)`: whether it is to come."""
        self._is_awaited = is_awaited

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return self.path.parent.name

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    log_dir = root_dir = save_dir

    @property
    def experiment(self) -> CsvLogger:
        return self

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        step = 0 if step is None else step
        if self._is_awaited(step):
            self._waiting.setdefault(step, {}).update(metrics)
        else:
            self._append(metrics, step)

    @rank_zero_only
    def log_row(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the step's own row, together with what callbacks have logged for the step before."""
        self._append({**self._waiting.pop(step, {}), **metrics}, step)

    @rank_zero_only
    def release(self) -> None:
        """Write what still waits for a row: the run has ended, and the row does not come."""
        for step in sorted(self._waiting):
            self._append(self._waiting.pop(step), step)

    def _append(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a row. What cannot be written is kept for the next row, and said."""
        earlier = {number: self._waiting.pop(number) for number in sorted(self._waiting) if number < step}
        rows = [*earlier.items(), (step, dict(metrics))]
        while rows:
            try:
                self._append_row(rows[0][1], rows[0][0])
            except OSError as error:
                if not self._is_torn:
                    said = f"{self.path} could not be written: {error.strerror}; the row is kept until it can be"
                    print(said, file=sys.stderr, flush=True)
                self._is_torn = True
                break
            del rows[0]
        for number, row in rows:  # in their order: none before those that could not be written
            self._waiting[number] = {**self._waiting.get(number, {}), **row}

    def _append_row(self, metrics: Mapping[str, float], step: int) -> None:
        if self._is_torn and self.path.exists():
            # Without a row of which only a part was written, or all of it by the second try that closing a file makes
            torn = str(step), self._last.get("step")
            whole = [row for row in read_rows(self.path) if row["step"] not in torn]
            self._write(self._fields, [*whole, self._last] if self._last else whole)
        known = self._known[1] if step == self._known[0] else set()
        row: dict[str, Any] = {**{key: value for key, value in metrics.items() if key not in known}, "step": step}
        if row.keys() <= {"step", "epoch"}:
            return
        if not self._fields and self.path.exists():
            with self.path.open(newline="") as file:
                self._fields = list(csv.DictReader(file).fieldnames or ())
        fields = self._fields or ["step"]
        if new := [key for key in row if key not in self._fields]:
            self._write(fields + [key for key in new if key != "step"], read_rows(self.path))
        joins = str(step) == self._last.get("step") and not (row.keys() & self._last.keys()) - {"step", "epoch"}
        if joins:  # what comes after a step, such as a validation, goes into the step's row
            row = {**row, **self._last}
        self._put(row, joins)
        self._is_torn = False

    def _put(self, row: dict[str, Any], over_the_last: bool) -> None:
        """Write a row in one call, which a kill cannot cut in two. A row that replaces the last one is longer."""
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._fields).writerow(row)
        with self.path.open("r+", newline="") as file:
            self._last_offset = file.seek(self._last_offset) if over_the_last else file.seek(0, os.SEEK_END)
            file.write(text.getvalue())
        self._last = {key: str(value) for key, value in row.items() if value != ""}

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Remove the rows after `step`: a run that goes on from its checkpoint writes them again.

        What the run logs again for `step` itself, such as a validation after the checkpoint, is left out.
        """
        keep_unless_goes_on(self.path, step)
        kept = [row for row in read_rows(self.path) if int(row["step"]) <= step]
        logged = {key for row in kept if int(row["step"]) == step for key, value in row.items() if value}
        self._known = step, logged - {"step", "epoch"}
        if kept:
            self._write(list(kept[0]), kept)
        else:
            self.path.unlink(missing_ok=True)

    @rank_zero_only
    def rename(self, names: dict[str, str]) -> None:
        """Rename columns. `names`: old name → new name."""
        rows = read_rows(self.path)
        if rows:
            self._write(
                [names.get(key, key) for key in rows[0]],
                [{names.get(key, key): value for key, value in row.items()} for row in rows],
            )

    def _write(self, fields: list[str], rows: list[dict[str, str]]) -> None:
        with partial_path(self.path).open("w", newline="") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows[:-1])
            self._last_offset = file.tell()
            writer.writerows(rows[-1:])
        self._last = {key: value for key, value in rows[-1].items() if value} if rows else {}
        put_in_place(self.path)
        self._fields = fields

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Write nothing: the launcher writes config.yaml and plan.json."""

    log_hparams = log_hyperparams
