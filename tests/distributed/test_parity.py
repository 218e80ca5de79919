"""`strategy=` changes memory and speed and nothing else: every strategy equals a plain loop over the global batch."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.optimizers import parameter_groups
from shardwise.trainer import build_module
from tests.distributed.cells import cell_plan, fit, masked_tokens
from tests.distributed.processes import spawn
from tests.reference import plain_loop, update_deviation

STEPS = 8
CLIP = 0.1  # far below every gradient norm of these runs
SGD = ["optimizer=sgd", "optimizer.lr=2.0", "optimizer.weight_decay=0.01", "schedule=none", f"max_steps={STEPS}"]
BOUNDS = {"fp64": 1e-9, "fp32": 1e-4}

# Accumulation 4 in every cell: 4 micro-batches × ranks × micro_batch_size = 16
STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "fsdp, parameters kept": ["strategy=fsdp", "strategy.reshard_after_forward=false"],
    "fsdp, sync deferred": ["strategy=fsdp", "strategy.defer_gradient_sync=true"],
    "fsdp_hybrid": ["strategy=fsdp_hybrid", "strategy.shard_size=2"],
    "fsdp_hybrid, replicas only": ["strategy=fsdp_hybrid", "strategy.shard_size=1"],
    "zero1": ["strategy=zero1"],
    "zero2": ["strategy=zero2"],
    "zero3": ["strategy=zero3"],
}


def batch_words(ranks: int) -> list[str]:
    return [f"micro_batch_size={4 // ranks}", "global_batch_size=16", f"gradient_clip_val={CLIP}"]


def run_cells(folder: Path, ranks: int, precisions: list[str], accelerator: str = "cpu") -> dict[Any, Any]:
    """In each rank: every strategy × precision, one after the other."""
    return {
        (strategy, precision): fit(
            cell_plan(
                folder / f"{precision}-{number}",
                ranks,
                *words,
                *SGD,
                *batch_words(ranks),
                f"precision={precision}",
                accelerator=accelerator,
            )
        )
        for precision in precisions
        for number, (strategy, words) in enumerate(STRATEGIES.items())
        if not ("shard_size=2" in words[-1] and ranks == 1)
        if not (strategy.startswith("zero") and precision == "fp64")  # its masters are fp32
        if accelerator == "cuda" or strategy.startswith("zero") or precision == "fp64" or ranks == 2  # minutes on CPU
    }


Reference = tuple[dict[str, Tensor], dict[str, Tensor], list[float], list[float]]


@functools.cache
def reference(
    precision: str, accelerator: str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], list[float]]:
    """Start and final parameters, losses and gradient norms of the plain loop."""
    folder = Path(tempfile.mkdtemp())
    module = build_module(
        cell_plan(folder, 1, *SGD, *batch_words(1), f"precision={precision}", accelerator=accelerator)
    )
    module.configure_optimizers = None  # type: ignore[assignment,method-assign]
    from shardwise.initialize import Materializer

    Materializer(module, torch.device(accelerator), seed=0).place(module)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}

    def loss_sum(m: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = m.model(batch["tokens"]) @ m.model.head.weight.T
        targets = batch["targets"].flatten()
        per_token = nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="sum")
        return per_token, (targets != -100).sum()

    def optimizer(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameter_groups(m, 0.01), lr=2.0, momentum=0.9)

    rows = [{key: value.to(accelerator) for key, value in row.items()} for row in masked_tokens(50)]
    final, losses, norms = plain_loop(module, rows, loss_sum, optimizer, STEPS, 16, CLIP)
    start, final = ({name: p.cpu() for name, p in state.items()} for state in (start, final))
    assert min(norms) > 2 * CLIP, "clipping must bite"
    return start, final, losses, norms


def check_cells(cells: dict[Any, Any]) -> None:
    for (strategy, precision), cell in cells.items():
        start, final, losses, norms = reference(precision)
        where = f"{strategy} in {precision}"
        for name, tensor in start.items():
            assert torch.equal(cell["start"][name], tensor), f"{where}: {name} starts elsewhere"
        worst = update_deviation(start, cell["final"], final)
        assert max(worst.values()) <= BOUNDS[precision], (where, worst)
        assert cell["losses"] == pytest.approx(losses, rel=BOUNDS[precision]), where
        assert cell["norms"] == pytest.approx(norms, rel=BOUNDS[precision]), where


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_strategy_equals_the_plain_loop(tmp_path: Path, ranks: int) -> None:
    precisions = ["fp64", "fp32"]
    results = spawn(ranks, run_cells, tmp_path, ranks, precisions)
    check_cells(results[0])
    for rank, cells in enumerate(results):
        for key, cell in cells.items():
            for name, tensor in results[0][key]["final"].items():
                assert torch.equal(cell["final"][name], tensor), f"rank {rank} disagrees on {name} under {key}"
