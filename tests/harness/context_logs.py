"""A module that logs in its steps, on parts of sequences of which some have no valid target, beside whole sequences."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.language_modeling.module import LanguageModel
from shardwise.data.document_stream import IGNORE
from tests.harness.cells import fit
from tests.harness.context import Case, plan_of


class Logs(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._log_all("train", batch, loss)
        self.log("own/epoch", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        total, tokens = self._loss(batch)
        self._log_all("validation", batch, total / tokens)
        self.log("own/validation/synced", total / tokens, sync_dist=True, batch_size=len(batch["tokens"]))

    def on_validation_epoch_end(self) -> None:
        """The recipe logs what it has not measured here."""

    def _log_all(self, stage: str, batch: Any, loss: Tensor) -> None:
        size = len(batch["tokens"])
        self.log(f"own/{stage}/mean", loss, batch_size=size)
        self.log(f"own/{stage}/sum", (batch["targets"] != IGNORE).sum().float(), reduce_fx="sum")
        self.log(f"own/{stage}/max", batch["tokens"].max().float(), reduce_fx="max")
        self.log(f"own/{stage}/min", loss.detach() * 0 + 3.0 + batch["tokens"].min(), reduce_fx="min")
        self.log(f"own/{stage}/samples", float(size), batch_size=size)
        if self.trainer.is_global_zero:
            self.log(f"own/{stage}/first", 1.0, rank_zero_only=True)


class LogsBehind(Logs):
    """Logs in a hook, too, which a pipeline refuses, and runs the model there on a text as long as a rank's part."""

    def on_validation_epoch_end(self) -> None:
        text = torch.arange(8, device=self.device).unsqueeze(0)
        self.log("own/text", self.model(text).square().sum())
        self.log("own/weights", sum(p.detach().square().sum() for p in self.parameters()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("own/behind", outputs["loss"])


def run_logs(folder: Path, ranks: int, data_ranks: int, module: str, case: Case) -> dict[str, list[float]]:
    """In each rank: what rank 0 has logged."""
    plan = plan_of(case, folder, ranks, f"module._target_={__name__}.{module}", "checkpoint=none", "model.n_kv_heads=2",
                   "global_batch_size=4", f"micro_batch_size={2 // data_ranks}")  # fmt: skip
    found = fit(plan)["validation"]
    if os.environ["RANK"] != "0":
        return {}
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    own = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0] if name.startswith("own/")}
    return own | {f"last {name}": [value] for name, value in found.items() if name.startswith("own/")}
