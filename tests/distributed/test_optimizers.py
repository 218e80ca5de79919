"""Optimizers with compact state, and Muon: the numbers of their plain versions under every strategy that allows them,
also where a run goes on under another strategy and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.checkpoint.dcp import read_metadata
from shardwise.optim.optimizers import after_step
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import cell_plan, fit
from tests.harness.optimizers import PLAIN, SAVED, Cell, deviation, run_all
from tests.harness.processes import spawn
from tests.harness.reference import update_deviation

Found = dict[Cell, dict[str, Any]]
BOUNDS = {"fp64": 1e-9, "fp32": 1e-3}  # in fp32 the last bit of a gradient decides about the last one of a moment
ON_TWO = [
    *(Cell(optimizer, strategy) for optimizer in PLAIN for strategy in ("ddp", "fsdp")),
    Cell("muon", "fsdp_hybrid, replicas only"),  # the others, and shards beside replicas, are run on four ranks
    *(Cell("adamw_bf16", strategy, "fp32") for strategy in ("zero1", "zero2", "zero3")),
    *(Cell(optimizer, "fsdp", skips=True) for optimizer in PLAIN),
]
# A cell → the one on two ranks whose checkpoint it goes on from
AGAIN_ON_TWO = {cell: cell for cell in (Cell(optimizer, "fsdp") for optimizer in PLAIN)}
ON_ONE = {
    **{Cell(optimizer, "ddp"): Cell(optimizer, "fsdp") for optimizer in PLAIN},
    Cell("adamw_bf16", "ddp", "fp32"): Cell("adamw_bf16", "zero2", "fp32"),
}
ON_FOUR = {Cell(optimizer, "fsdp_hybrid"): Cell(optimizer, "ddp") for optimizer in PLAIN}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("optimizers")


def run_twice(folder: Path) -> tuple[Found, Found]:
    straight = run_all(folder, 2, [*AGAIN_ON_TWO])
    again = run_all(folder, 2, [*AGAIN_ON_TWO], AGAIN_ON_TWO)
    return straight | run_all(folder, 2, [cell for cell in ON_TWO if cell not in straight]), again


@pytest.fixture(scope="module")
def on_two(folder: Path) -> list[tuple[Found, Found]]:
    return spawn(2, run_twice, folder)


def too_far(found: Found) -> dict[str, float]:
    deviations = {cell: deviation(cell, result) for cell, result in found.items()}
    return {cell.name: off for cell, off in deviations.items() if not off <= BOUNDS[cell.precision]}


def test_every_strategy_equals_the_plain_version(on_two: list[tuple[Found, Found]]) -> None:
    assert too_far(on_two[0][0]) == {}
    for cell, result in on_two[1][0].items():
        for name, tensor in on_two[0][0][cell]["final"].items():
            assert torch.equal(result["final"][name], tensor), f"rank 1 disagrees on {name} under {cell}"


def test_a_resumed_run_never_stopped(on_two: list[tuple[Found, Found]]) -> None:
    straight, again = on_two[0]
    for cell, result in again.items():
        for name, tensor in straight[cell]["final"].items():
            off = float((result["final"][name] - tensor).abs().max())
            assert off == 0, f"{name} under {cell}: {off}"


@pytest.mark.parametrize(("ranks", "pairs"), [(1, ON_ONE), (4, ON_FOUR)], ids=["one", "four"])
def test_a_run_goes_on_under_another_strategy(on_two: Any, folder: Path, ranks: int, pairs: dict[Cell, Cell]) -> None:
    assert too_far(spawn(ranks, run_all, folder, ranks, list(pairs), pairs)[0]) == {}


def run_fused(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """In each rank: AdamW fused and not; and whether each step clipped within itself."""
    words = ["max_steps=4", "micro_batch_size=2", "global_batch_size=8", "checkpoint=none", "gradient_clip_val=0.05"]
    found, within = {}, list[bool]()

    def look(optimizer: torch.optim.Optimizer) -> None:
        within.append("grad_scale" in vars(optimizer))
        after_step(optimizer)

    with patch("shardwise.step.precision_plugin.after_step", look):
        for strategy in ("ddp", "fsdp"):
            for fused in ("false", "true"):
                name = f"{strategy}-{fused}"
                plan = cell_plan(folder / name, 2, *words, f"strategy={strategy}", f"+optimizer.fused={fused}")
                found[strategy, fused] = fit(plan) | {"within": [*within]}
                within.clear()
    return found


def test_the_fused_optimizer_clips_within_its_step(tmp_path: Path) -> None:
    found = spawn(2, run_fused, tmp_path)[0]
    for strategy in ("ddp", "fsdp"):
        plain, fused = (found[strategy, word] for word in ("false", "true"))
        assert plain["within"] == [False] * 4 and fused["within"] == [True] * 4
        assert fused["norms"] == pytest.approx(plain["norms"], rel=1e-5) and min(plain["norms"]) > 0.05
        assert max(update_deviation(plain["start"], fused["final"], plain["final"]).values()) <= 1e-3


def test_a_checkpoint_holds_codes_and_scales_as_plain_tensors(on_two: Any, folder: Path) -> None:
    """What fsdp wrote on two ranks has the form of what ddp wrote."""
    kept = {}
    for strategy in ("ddp", "fsdp"):
        known = read_metadata(checkpoint_path(folder / Cell("adamw_8bit", strategy).name, SAVED)).state_dict_metadata
        kept[strategy] = {
            name.removeprefix("optimizer.0.network."): (tuple(tensor.size), tensor.properties.dtype)
            for name, tensor in known.items()
            if name.startswith("optimizer.")
        }
    assert kept["fsdp"] == kept["ddp"]
    of = {name: found for name, found in kept["fsdp"].items() if name.startswith("blocks.0.kernel.weight")}
    codes, scales = ((5, 64, 5), torch.uint8), ((5, 2), torch.float32)
    assert of == {
        "blocks.0.kernel.weight.exp_avg": codes, "blocks.0.kernel.weight.exp_avg_scale": scales,
        "blocks.0.kernel.weight.exp_avg_sq_root": codes, "blocks.0.kernel.weight.exp_avg_sq_root_scale": scales,
        "blocks.0.kernel.weight.step": ((), torch.float32),
    }  # fmt: skip
    assert kept["fsdp"]["embedding.weight.exp_avg"] == ((23, 64), torch.uint8)
    assert kept["fsdp"]["blocks.0.norm.weight.exp_avg"] == ((64,), torch.float64)
