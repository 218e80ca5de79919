"""Models of Hugging Face, as they are, are divided over ranks by the plans that they bring."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.nn.peers import Peers
from shardwise.parallel import tensor_parallel
from shardwise.parallel.tensor_parallel import TensorParallel
from shardwise.parallel.tensor_plan import CheckedCopies
from shardwise.parallel.tensor_plan import planned_layers as planned
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import fit
from tests.harness.hugging_face import Run, deviations, plan_of, run_all
from tests.harness.processes import spawn

BOUNDS = {"fp64": 1e-9, "fp32": 1e-4}
TENSOR = ("strategy.tensor_parallel_size=2",)
PIPELINE = ("strategy.pipeline_parallel_size=2",)
INTERLEAVED = (*PIPELINE, "strategy.pipeline_schedule=interleaved", "strategy.pipeline_chunks=2")
BIASES = ("attention_bias=true", "mlp_bias=true", "pad_token_id=40")
QUICK = [
    Run(TENSOR),
    Run(TENSOR, "Qwen3", tied=False),
    Run(PIPELINE, "Qwen3", accumulate=4),
]
MORE = {
    2: [
        Run(TENSOR, "Qwen3", model=("attention_bias=true",), more=("activation_checkpointing=full",)),
        Run(TENSOR, tied=False, model=BIASES, accumulate=4, optimizer="sgd", clip=None),
        Run(TENSOR, precision="fp32", optimizer="sgd", model=("own_loss=false",)),
        Run(TENSOR, "Qwen3", precision="fp32", optimizer="sgd", more=("compile=layer",)),
        Run(PIPELINE, tied=False, accumulate=4, model=BIASES),
        Run(INTERLEAVED, accumulate=4, model=("num_hidden_layers=4",)),
        Run(PIPELINE, "Qwen3", accumulate=8, optimizer="sgd", more=("activation_checkpointing=full",)),
    ],
    4: [
        Run(TENSOR, data_ranks=2),
        Run(TENSOR, "Qwen3", tied=False, data_ranks=2, accumulate=4),
        Run(("strategy.tensor_parallel_size=4",), "Qwen3"),
        Run(PIPELINE, data_ranks=2, accumulate=4),
        Run(PIPELINE, "Qwen3", tied=False, data_ranks=2),
    ],
}


def check(runs: list[Run], found: list[list[dict[str, Any]]], folder: Path) -> None:
    numbers = {run: deviations(run, result, folder) for run, result in zip(runs, found[0], strict=True)}
    print("NUMBERS", *numbers.items(), sep="\n")
    assert not {run: off for run, off in numbers.items() if max(off.values()) > BOUNDS[run.precision]}
    for results in found[1:]:
        for run, own, first in zip(runs, results, found[0], strict=True):
            for name, tensor in first["final"].items():
                assert torch.equal(own["final"][name], tensor), (run, name)


def test_two_ranks_equal_the_plain_loop(tmp_path: Path) -> None:
    check(QUICK, spawn(2, run_all, tmp_path, 2, QUICK), tmp_path)


@pytest.mark.parametrize("ranks", MORE)
def test_more_models_and_layouts_equal_the_plain_loop(tmp_path: Path, ranks: int) -> None:
    check(MORE[ranks], spawn(ranks, run_all, tmp_path, ranks, MORE[ranks]), tmp_path)


@pytest.mark.parametrize("run", [Run(TENSOR, "Qwen3")])
def test_a_run_goes_on_with_another_layout(tmp_path: Path, run: Run) -> None:
    """Saved after two steps of three, by both sides; one process goes on with what two have saved, and back."""
    alone = replace(run, layout=())
    for before, after in ((run, alone), (alone, run)):
        ranks, then = (2 if one.layout else 1 for one in (before, after))
        words = ("checkpoint=default", "checkpoint.save_every_n_steps=2")
        saved = tmp_path / f"saved-{ranks}"
        spawn(ranks, run_all, saved, ranks, [replace(before, more=(*words, "max_steps=2"))])
        resume = f"resume={checkpoint_path(saved / '0', 2)}"
        on = spawn(then, run_all, tmp_path / f"on-{then}", then, [replace(after, more=(*words, resume))])[0][0]
        numbers = deviations(run, on, tmp_path, resumed=True)
        assert max(numbers.values()) <= BOUNDS["fp64"], numbers


def forgotten(model: Any, _: int) -> Any:
    """A plan that does not name Qwen3's norms of queries and keys, which see the rank's heads alone."""
    return {name: style for name, style in planned(model, 2).items() if not name.endswith("_norm")}


def broken_runs(folder: Path, faults: Sequence[str]) -> list[dict[str, Any]]:
    """In each rank: the same run with one fault after the other."""

    def nothing(*_: Any) -> None: ...

    unsummed = patch.object(Peers, "copies", lambda self, whole: whole)
    unchecked = patch.object(CheckedCopies, "check", nothing)
    patches: dict[str, list[Any]] = {
        "norms are not summed": [patch.object(TensorParallel, "sum_gradients", nothing)],
        "gradients of inputs are not summed": [unsummed, unchecked],
        "gradients of inputs differ": [unsummed],
        "norms are forgotten": [patch.object(tensor_parallel, "planned_layers", forgotten)],
    }
    found = []
    for fault in faults:
        with ExitStack() as stack:
            for one in patches[fault]:
                stack.enter_context(one)
            found.append(fit(plan_of(Run(TENSOR, "Qwen3"), folder / fault.replace(" ", "-"), 2)))
    return found


def test_what_is_broken_on_purpose_is_seen(tmp_path: Path) -> None:
    faults = ["norms are not summed", "gradients of inputs are not summed"]
    for fault, result in zip(faults, spawn(2, broken_runs, tmp_path, faults)[0], strict=True):
        assert deviations(Run(TENSOR, "Qwen3"), result, tmp_path)["update"] > 1e-2, fault


@pytest.mark.parametrize(
    ("fault", "layer"),
    [("norms are forgotten", r"layers\.0\.self_attn\.[qk]_norm"), ("gradients of inputs differ", "layernorm")],
)
def test_ranks_that_would_part_in_silence_are_refused(tmp_path: Path, fault: str, layer: str) -> None:
    with pytest.raises(AssertionError, match=rf"ConfigError: .*ranks that compute lm\.\S*{layer}\S* alike have found"):
        spawn(2, broken_runs, tmp_path, [fault])
