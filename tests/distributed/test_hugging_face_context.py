"""Models of Hugging Face, as they are, compute a part of every sequence on each rank of a context axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from shardwise.parallel import context_hugging_face
from shardwise.parallel.context_parallel import ContextParallel
from tests.distributed.test_hugging_face import PIPELINE, TENSOR, check
from tests.harness.cells import fit
from tests.harness.hugging_face import CausalLM, Run, deviations, plan_of, run_all
from tests.harness.processes import spawn

BY = "strategy.context_parallel_method="
HEADS, KEYS = (("strategy.context_parallel_size=2", BY + method) for method in ("heads", "keys"))
PACKED = {"kind": "packed", "model": ("use_cache=false",)}  # with a cache transformers does not look for texts
QUICK = [
    Run(HEADS, "Qwen3", tied=False, model=("continues=true",)),
    Run(KEYS, kind="masked"),
    Run(HEADS, "Qwen3", **PACKED),
    Run(KEYS, **PACKED),
]
MORE = {
    2: [
        Run(HEADS, kind="masked", accumulate=4, optimizer="sgd", clip=None),
        Run(KEYS, "Qwen3", tied=False, accumulate=4, model=("continues=true",)),
        Run(HEADS, "Mistral", model=("sliding_window=5",)),
        Run(KEYS, "Mistral", kind="masked", model=("sliding_window=5",)),
        Run(HEADS, model=("attn_implementation=eager",), more=("activation_checkpointing=full",)),
        Run(KEYS, model=("counts=true",)),
        Run(KEYS, accumulate=1, more=("module._target_=tests.harness.hugging_face.UnweighedLM",)),
        Run(KEYS, precision="fp32", optimizer="sgd", model=("own_loss=false",)),
        Run(KEYS, "Qwen3", precision="fp32", optimizer="sgd", more=("compile=layer",)),
    ],
    4: [
        Run(HEADS, data_ranks=2, kind="masked"),
        Run(KEYS, "Qwen3", tied=False, data_ranks=2, accumulate=4),
        Run((*HEADS, *TENSOR), "Qwen3"),
        Run((*KEYS, *TENSOR), tied=False, kind="masked"),
        Run((*HEADS, *PIPELINE), "Qwen3", tied=False, accumulate=4),
        Run((*KEYS, *PIPELINE), kind="masked"),
    ],
}


def test_two_ranks_equal_the_plain_loop(tmp_path: Path) -> None:
    check(QUICK, spawn(2, run_all, tmp_path, 2, QUICK), tmp_path)


@pytest.mark.parametrize("ranks", MORE)
def test_more_models_and_layouts_equal_the_plain_loop(tmp_path: Path, ranks: int) -> None:
    check(MORE[ranks], spawn(ranks, run_all, tmp_path, ranks, MORE[ranks]), tmp_path)


class LooksAtLogits(CausalLM):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.lm(**batch).logits.mean()
        return loss


class OwnLoss(CausalLM):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.lm(input_ids=batch["input_ids"]).logits.mean()
        return loss


REFUSALS = {
    "LooksAtLogits": "gives its loss alone: of 'logits' this rank has a part of each sequence",
    "OwnLoss": "was called without labels where gradients are needed: this rank would have the logits of a part",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_logits_of_a_part_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(AssertionError, match=f"ConfigError: .*LlamaForCausalLM {REFUSALS[kind]}"):
        spawn(2, broken_runs, tmp_path, [f"module._target_={__name__}.{kind}"])


def broken_runs(folder: Path, faults: Sequence[str]) -> list[dict[str, Any]]:
    """In each rank: the same run with one fault after the other."""
    right = context_hugging_face._Divided._part_of

    def positions_from_zero(self: Any, given: dict[str, Any]) -> dict[str, Any]:
        own = right(self, given)
        return own | {"position_ids": own["position_ids"] - own["position_ids"][:, :1]}

    def unshifted(self: Any, given: dict[str, Any]) -> dict[str, Any]:
        own = right(self, given)
        return own | {"labels": own["labels"].roll(1, 1)}

    patches = {
        "positions from 0": patch.object(context_hugging_face._Divided, "_part_of", positions_from_zero),
        "labels not shifted": patch.object(context_hugging_face._Divided, "_part_of", unshifted),
        "losses not summed": patch.object(context_hugging_face, "sum_losses", lambda part, parts: part),
        "rows of another rank": patch.object(
            ContextParallel, "runs", lambda self, whole: [((1 - self.rank) * whole // 2, (2 - self.rank) * whole // 2)]
        ),
    }
    found = []
    for number, fault in enumerate(faults):
        run = Run(HEADS, more=() if fault in patches else (fault,))
        with patches.get(fault, patch.object(ContextParallel, "begin_batch")):
            found.append(fit(plan_of(run, folder / str(number), 2)))
    return found


def test_what_is_broken_on_purpose_is_seen(tmp_path: Path) -> None:
    faults = ["positions from 0", "labels not shifted", "losses not summed", "rows of another rank"]
    for fault, result in zip(faults, spawn(2, broken_runs, tmp_path, faults)[0], strict=True):
        numbers = deviations(Run(HEADS), result, tmp_path)
        assert max(numbers.values()) > 1e-3, (fault, numbers)
