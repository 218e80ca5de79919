"""Hooks at the ends of epochs see the weights that training has reached, under strategies that hide them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping

from tests.harness.cells import cell_plan, fit
from tests.harness.processes import spawn
from tests.harness.selected import needed

ZERO3 = ["strategy=zero3", "strategy.persistence_threshold_elements=0", "strategy.max_reuse_distance_elements=0"]
CELLS = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "zero3, some gathered ahead": [*ZERO3, "strategy.prefetch_bucket_elements=2000"],
    "zero3, all gathered ahead": [
        *ZERO3,
        "strategy.prefetch_bucket_elements=100000",
        "strategy.max_live_elements=3000",
    ],
    "tensor": ["strategy=fsdp", "strategy.tensor_parallel_size=2"],
    "pipeline": ["strategy=fsdp", "strategy.pipeline_parallel_size=2"],
}
HOOKS = ("on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end")


class Looks(Callback):
    """The norm of every weight that this rank has."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, float]]] = []

    def note(self, hook: str, module: Any) -> None:
        norms = {name: float(p.detach().norm()) for name, p in module.named_parameters() if not p.is_meta}
        self.seen.append((hook, norms))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_validation_epoch_end", pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_validation_end", pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_train_epoch_end", pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_train_end", pl_module)


class LooksLast(Looks, EarlyStopping):
    """Of the callbacks that Lightning calls last at the end of an epoch."""

    def __init__(self) -> None:
        EarlyStopping.__init__(self, "validation/loss")
        self.seen = []


def run_all(folder: Path, names: set[str] | None) -> dict[str, list[Any]]:
    found = {}
    for number, (name, words) in enumerate(CELLS.items()):
        if name == "ddp" or names is None or name in names:
            plan = cell_plan(
                folder / f"run{number}", 2, "micro_batch_size=2", "global_batch_size=8", "max_steps=4", "schedule=none",
                "validate_every_n_steps=2", "optimizer.lr=1e-2", "model.n_kv_heads=2", "model.ffn_dim=42", *words,
            )  # fmt: skip
            looks = [Looks(), LooksLast()]
            fit(plan, *looks)
            found[name] = [look.seen for look in looks]
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    return spawn(2, run_all, tmp_path_factory.mktemp("looks"), needed(request, "name"))


@pytest.mark.parametrize("name", CELLS)
def test_a_hook_sees_the_weights_as_they_are(runs: Any, name: str) -> None:
    names = set()
    for rank in runs:
        for looks, plain in zip(rank[name], runs[0]["ddp"], strict=True):
            assert [hook for hook, _ in looks] == [hook for hook, _ in plain]
            assert {hook for hook, _ in looks} == set(HOOKS)
            for (hook, norms), (_, expected) in zip(looks, plain, strict=True):
                assert norms and norms == pytest.approx({n: expected[n] for n in norms}, rel=1e-4), hook
                names |= norms.keys()
    assert names == runs[0]["ddp"][0][0][1].keys()
