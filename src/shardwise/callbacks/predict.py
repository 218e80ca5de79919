"""Writes `predictions.jsonl`: a row for every sample, in the order of the data set, while the predictions come.

In the end the same rows are a table as well, `predictions.csv`, if a prediction is one value or some that have names.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from tqdm import tqdm

from shardwise.data.evaluation import EvaluationLoader
from shardwise.lightning_internals.results import prediction_loaders
from shardwise.plan import Plan
from shardwise.run_dir.files import PREDICTIONS, PREDICTIONS_TABLE, partial_path, put_in_place
from shardwise.strategies.base import strategy_of

_SECONDS_BETWEEN_LINES = 10


class Predictions(Callback):
    """Rank 0 writes what all ranks predict; docs/loaders.md says how a row looks."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.path = Path(plan.run_dir) / PREDICTIONS
        self.rows = 0
        self._file: TextIO | None = None
        self._progress: _Progress | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._file = partial_path(self.path).open("w")
            self._progress = _Progress(self.plan, prediction_loaders(trainer))

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loaders = prediction_loaders(trainer)
        outputs = move_data_to_device(outputs, torch.device("cpu"))
        rows = [] if outputs is None else rows_of(outputs, batch, loaders[dataloader_idx], batch_idx)
        which = {"loader": dataloader_idx} if len(loaders) > 1 else {}
        text = "".join(json.dumps({**which, **row}, default=to_plain) + "\n" for row in rows)
        ranks: list[Any] = [text] * dist.get_world_size()
        if len(ranks) > 1:  # every rank has equally many batches
            gathered = ranks if trainer.is_global_zero else None
            dist.gather_object(text, gathered, group=strategy_of(trainer).file_group())
        if self._file is not None and self._progress is not None:
            self._file.writelines(ranks)
            self.rows += sum(text.count("\n") for text in ranks)
            self._progress.show(batch_idx, dataloader_idx, self.rows)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._file is not None and self._progress is not None:
            self._progress.close()
            self._file.close()
            put_in_place(self.path)
            write_table(self.path, self.path.with_name(PREDICTIONS_TABLE))


def write_table(rows: Path, path: Path) -> None:
    """Write the rows of predictions as CSV. Without rows, or where a prediction has parts in parts, there is none."""
    path.unlink(missing_ok=True)  # of an earlier prediction
    columns: dict[str, None] = {}
    for row in _flat_rows(rows):
        if any(isinstance(value, (list, dict)) for value in row.values()):
            return
        columns |= dict.fromkeys(row)
    if columns:
        with partial_path(path).open("w", newline="") as file:
            table = csv.DictWriter(file, columns)
            table.writeheader()
            table.writerows(_flat_rows(rows))
        put_in_place(path)


def _flat_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            prediction = row.pop("prediction")
            yield row | (prediction if isinstance(prediction, dict) else {"prediction": prediction})


class _Progress:
    """Shows a progress bar in a terminal, elsewhere a line every few seconds."""

    def __init__(self, plan: Plan, loaders: list[EvaluationLoader]) -> None:
        lengths = [None if loader.batches is None else len(loader) for loader in loaders]
        self.before = [sum(length or 0 for length in lengths[:number]) for number in range(len(lengths))]
        self.total = None if None in lengths else sum(length or 0 for length in lengths)
        self.bar = tqdm(total=self.total, unit="batch", dynamic_ncols=True) if plan.progress_bar else None
        self.printed_at = time.monotonic()

    def show(self, turn: int, loader: int, rows: int) -> None:
        done = self.before[loader] + turn + 1
        if self.bar is not None:
            self.bar.update(done - self.bar.n)
        elif time.monotonic() - self.printed_at > _SECONDS_BETWEEN_LINES:
            self.printed_at = time.monotonic()
            of = f" of {self.total}" if self.total is not None else ""
            print(f"predicted {done}{of} batches a rank, {rows} rows", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def rows_of(outputs: Any, batch: Any, loader: EvaluationLoader, turn: int) -> list[dict[str, Any]]:
    """A row for each sample of this rank's batch; or one row where the prediction has no part for each sample."""
    samples = loader.samples_of(turn)
    count = len(samples) if samples is not None else _samples_in(batch)
    parts = None if count is None else _parts(outputs, count)
    number: dict[str, Any] = {} if samples is not None else {"batch": loader.number_of(turn)}
    if parts is None:
        return [{**number, **({"samples": samples} if samples is not None else {}), "prediction": outputs}]
    ids = [{"sample": sample} for sample in samples] if samples is not None else [{"row": i} for i in range(len(parts))]
    return [{**number, **each, "prediction": part} for each, part in zip(ids, parts, strict=True)]


def _parts(value: Any, count: int) -> list[Any] | None:
    """Cut `value` along its first dimension into samples; None: it has no dimension of this length."""
    if isinstance(value, (Tensor, np.ndarray)):
        return list(value) if value.ndim and len(value) == count else None
    if isinstance(value, dict):
        columns = [_parts(item, count) for item in value.values()]
        if not columns or any(column is None for column in columns):
            return None
        return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(value, (list, tuple)):
        columns = [_parts(item, count) for item in value]
        if columns and all(column is not None for column in columns):
            return [list(row) for row in zip(*columns, strict=True)]
        return list(value) if len(value) == count else None
    return None


def _samples_in(batch: Any) -> int | None:
    """The length of the first tensor of a batch."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return len(batch) if batch.ndim else None
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for found in map(_samples_in, items) if found is not None), None)


def to_plain(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return str(value)
