"""A torchmetrics object counts each sample once where ranks share samples, wherever a module or callback keeps it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torchmetrics import Metric, SumMetric

from shardwise.plan import Plan
from tests.harness import context, hugging_face
from tests.harness.cells import fit
from tests.harness.processes import spawn

# The axis → words; the last model divides whole batches by itself
CASES = {
    "tensor": ["strategy.tensor_parallel_size=2"],
    "pipeline": ["strategy.pipeline_parallel_size=2", "micro_batch_size=4"],
    "context": ["strategy.context_parallel_size=2"],
    "context-hugging-face": ["strategy.context_parallel_size=2"],
}


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Counts(Callback):
    """Adds up tokens in metrics that are kept in various places."""

    def __init__(self) -> None:
        self.own = SumMetric()
        self.found: dict[str, float] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        module.registered, module.named, module.holder = SumMetric(), {"a": [SumMetric()]}, Holder(Holder(SumMetric()))
        self.metrics: dict[str, Metric] = {
            "registered": module.registered, "in containers": module.named["a"][0],
            "in objects": module.holder.held.held, "of the callback": self.own,
        }  # fmt: skip

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for metric in self.metrics.values():
            metric.update(next(iter(batch.values())))  # the tokens

    on_validation_batch_end = on_train_batch_end

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take("training")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take("validation", resets=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take("at the end")
        assert pickle.loads(pickle.dumps(self.own)) is not self.own, "as without these axes"

    def _take(self, when: str, resets: bool = True) -> None:
        for name, metric in self.metrics.items():
            metric._computed = None
            self.found[f"{when}, {name}"] = float(metric.compute())
            if resets:
                metric.reset()


def plan_of(folder: Path, ranks: int, case: str) -> Plan:
    words = ["checkpoint=none", *CASES[case]] if ranks > 1 else ["checkpoint=none"]
    if case == "context-hugging-face":
        return hugging_face.plan_of(hugging_face.Run(), folder, ranks, *words)
    sizes = ["model.n_kv_heads=2", "model.ffn_dim=44", f"micro_batch_size={context.BATCH}"]
    return context.plan_of(context.Case(1, "heads"), folder, ranks, *sizes, *words)


def run_counts(folder: Path, ranks: int, cases: list[str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for case in cases:
        counts = Counts()
        fit(plan_of(folder / case, ranks, case), counts)
        found[case] = counts.found
    return found


def test_each_sample_is_counted_once(tmp_path: Path) -> None:
    one = spawn(1, run_counts, tmp_path / "one", 1, list(CASES))[0]
    assert all(min(found.values()) > 0 for found in one.values())
    for rank in spawn(2, run_counts, tmp_path / "two", 2, list(CASES)):
        assert rank == one
