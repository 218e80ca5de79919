"""metrics.csv: a row a step, written and read."""

from __future__ import annotations

import csv
import io
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from shardwise.run_dir.files import METRICS, partial_path, put_in_place, stage_file


def metrics_path(run_dir: str | Path) -> Path:
    return Path(run_dir) / METRICS


class CsvLogger(Logger):
    """Rows in `<run>/metrics.csv`, each written when it is logged, so that a killed run loses none.

    Lightning's own deletes the file of the run it continues. What its users read of it is here too.
    """

    rows_are_steps = True  # a number that belongs to no step of the run goes to other loggers alone

    def __init__(self, run_dir: str | Path, stage: str = "fit") -> None:
        super().__init__()
        self.path = Path(run_dir) / stage_file(METRICS, stage)
        self._fields: list[str] = []
        self._known: tuple[int, set[str]] = -1, set()  # the step that the run goes on from, and what is logged of it
        self._is_awaited: Callable[[int], bool] = lambda step: False
        self._last: dict[str, str] = {}  # the last row, and where it begins
        self._at = 0
        self._held: dict[int, dict[str, Any]] = {}  # what callbacks log for such a step: it goes into that row

    def wait_for_rows(self, is_awaited: Callable[[int], bool]) -> None:
        """`is_awaited(step)`: whether the step's own row has yet to come."""
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
            self._held.setdefault(step, {}).update(metrics)
        else:
            self._append(metrics, step)

    @rank_zero_only
    def log_row(self, metrics: Mapping[str, float], step: int) -> None:
        """The step's own row, with what has been logged for the step before."""
        self._append({**self._held.pop(step, {}), **metrics}, step)

    @rank_zero_only
    def release(self) -> None:
        """Write what waits for rows that do not come: the run has ended."""
        for step in sorted(self._held):
            self._append(self._held.pop(step), step)

    def _append(self, metrics: Mapping[str, float], step: int) -> None:
        known = self._known[1] if step == self._known[0] else set()
        row: dict[str, Any] = {**{key: value for key, value in metrics.items() if key not in known}, "step": step}
        if row.keys() <= {"step", "epoch"}:
            return
        if not self._fields and self.path.exists():
            with self.path.open(newline="") as file:
                self._fields = list(csv.DictReader(file).fieldnames or ())
        fields = self._fields or ["step"]
        if new := [key for key in row if key not in self._fields]:
            self._write(fields + [key for key in new if key != "step"], read_metrics(self.path))  # empty in older rows
        joins = str(step) == self._last.get("step") and not (row.keys() & self._last.keys()) - {"step", "epoch"}
        if joins:  # what follows upon a step, a validation say, goes into its row
            row = {**row, **self._last}
        self._put(row, joins)

    def _put(self, row: dict[str, Any], over_the_last: bool) -> None:
        """In one write, which a kill cannot cut in two; a row that takes another's place is longer than that."""
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._fields).writerow(row)
        with self.path.open("r+", newline="") as file:
            self._at = file.seek(self._at) if over_the_last else file.seek(0, os.SEEK_END)
            file.write(text.getvalue())
        self._last = {key: str(value) for key, value in row.items() if value != ""}

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Forget what came after `step`: a run that goes on from its checkpoint comes there again. What it logs of
        `step` itself once more, a validation behind the checkpoint say, is there already."""
        kept = [row for row in read_metrics(self.path) if int(row["step"]) <= step]
        logged = {key for row in kept if int(row["step"]) == step for key, value in row.items() if value}
        self._known = step, logged - {"step", "epoch"}
        if kept:
            self._write(list(kept[0]), kept)
        else:
            self.path.unlink(missing_ok=True)

    @rank_zero_only
    def rename(self, names: dict[str, str]) -> None:
        """Columns, of old name to new."""
        rows = read_metrics(self.path)
        if rows:
            self._write(
                [names.get(key, key) for key in rows[0]],
                [{names.get(key, key): value for key, value in row.items()} for row in rows],
            )

    def _write(self, fields: list[str], rows: list[dict[str, str]]) -> None:
        self._fields = fields
        with partial_path(self.path).open("w", newline="") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows[:-1])
            self._at = file.tell()
            writer.writerows(rows[-1:])
        self._last = {key: value for key, value in rows[-1].items() if value} if rows else {}
        put_in_place(self.path)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """config.yaml and plan.json are written by the launcher."""

    log_hparams = log_hyperparams


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Rows of a metrics.csv; an empty list when there is none. A last row that a kill cut short is left out."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        whole = [line for line in file if line.endswith("\n")]
    return list(csv.DictReader(whole))
