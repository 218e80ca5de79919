"""Validation and test by themselves, and samples of text, of the language model in every layout of two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from shardwise.run_dir.files import checkpoint_path
from shardwise.trainer import build_data, build_module, build_trainer
from tests.harness.cells import MaskedTokens, cell_plan, fit
from tests.harness.divided import SIZES
from tests.harness.pipelines import INTERLEAVED, SIZE

WORDS = [
    "recipe=language_modeling", "data._target_=tests.harness.divided_stages.Tested", "model.n_layers=4",
    *(f"model.{name}={size}" for name, size in SIZES.items()), "strategy=fsdp", "precision=fp64", "micro_batch_size=2",
    "global_batch_size=8", "max_steps=2",
]  # fmt: skip
SAMPLES = ["module.sample_tokens=20", "validate_every_n_steps=1"]
CONTEXT = ["strategy.context_parallel_size=2"]
LAYOUTS: dict[str, list[str]] = {
    "pipeline": SIZE,
    "interleaved": [*SIZE, *INTERLEAVED],
    "tensor": ["strategy.tensor_parallel_size=2"],
    "context by heads": [*CONTEXT, "strategy.context_parallel_method=heads"],
    "context by keys": [*CONTEXT, "strategy.context_parallel_method=keys"],
}


class Tested(MaskedTokens):
    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self.val_dataloader()


def run_stages(folder: Path, saved: Path, ranks: int, layouts: dict[str, list[str]]) -> dict[str, dict[str, float]]:
    """In each rank: what each stage measures with the weights of a checkpoint."""
    found: dict[str, dict[str, float]] = {}
    for number, (name, words) in enumerate(layouts.items()):
        for stage in ("validate", "test"):
            plan = cell_plan(folder / f"{number}-{stage}", ranks, *WORDS, *words, f"stage={stage}", f"resume={saved}")
            module = build_module(plan)
            evaluate: Any = getattr(build_trainer(plan, module), stage)
            evaluate(module, datamodule=build_data(plan), ckpt_path=plan.resume, weights_only=True, verbose=False)
            found.setdefault(name, {}).update({k: float(v) for k, v in module.trainer.callback_metrics.items()})
    return found


def run_samples(folder: Path, ranks: int, layouts: dict[str, list[str]]) -> dict[str, str]:
    """In each rank: the text that a run has written at its validations."""
    for name, words in layouts.items():
        fit(cell_plan(folder / name.replace(" ", "-"), ranks, *WORDS, *SAMPLES, *words))
    return {name: (folder / name.replace(" ", "-") / "samples.txt").read_text() for name in layouts}


def save(folder: Path) -> Path:
    """Train in one process, and save."""
    fit(cell_plan(folder, 1, *WORDS, "checkpoint.save_every_n_steps=2"))
    return checkpoint_path(folder, 2)
