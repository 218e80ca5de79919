"""What a step draws at random is the same on all ranks that are given the same batch, and in layers it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.test_hugging_face import PIPELINE
from tests.distributed.test_hugging_face_context import HEADS, KEYS
from tests.harness.draws import STEPS, Case, plain_run, run_cases, run_models
from tests.harness.hugging_face import Run
from tests.harness.parity import largest
from tests.harness.processes import spawn
from tests.harness.reference import update_deviation

TENSOR = ("strategy=fsdp", "strategy.tensor_parallel_size=2")
FULL = "activation_checkpointing=full"
CASES = {
    "quick": [Case(TENSOR)],
    "more": [
        Case((*TENSOR, FULL), calls=True),
        Case(TENSOR, recomputes="body"),
        Case(TENSOR, recomputes="blocks"),
        Case((*TENSOR, "units=[]")),
    ],
}
COMPILED = [Case((*TENSOR, *words, "validate_every_n_steps=99")) for words in (["compile=layer"], ["compile=model"])]


def forward_alone(noted: list[Tensor], passes: int) -> list[Tensor]:
    """Of what one layer drew, that of the forward passes. What is computed again draws the same."""
    if len(noted) == STEPS * passes:
        return noted
    assert len(noted) == 2 * STEPS * passes
    found: list[Tensor] = []
    for step in range(0, len(noted), 2 * passes):
        forward, again = noted[step : step + passes], noted[step + passes : step + 2 * passes]
        assert all(torch.equal(one, other) for one, other in zip(forward, reversed(again), strict=True))
        found += forward
    return found


@pytest.mark.parametrize("tier", CASES)
def test_peers_mask_the_same_tokens_and_drop_other_numbers(tmp_path: Path, tier: str) -> None:
    """In two passes of a step. One process that computes with what they drew finds the same losses and weights."""
    cases = CASES[tier]
    for case, own, other in zip(cases, *spawn(2, run_cases, tmp_path, 2, cases), strict=True):
        check_steps(case, own, other)
        masks, drops = own["step"], dict[str, list[Tensor]]()
        for name, (along, noted) in own["drops"].items():
            pair = [forward_alone(one, case.passes) for one in (noted, other["drops"][name][1])]
            assert not any(torch.equal(one, two) for one, two in zip(*pair, strict=True)), (case, name)
            drops[name] = [torch.cat(parts, along) for parts in zip(*pair, strict=True)]
        final, losses = plain_run(case, own["start"], masks, drops)
        assert largest(own["losses"], losses) < 1e-12, case
        assert max(update_deviation(own["start"], own["final"], final).values()) < 1e-10, case


def test_stages_of_a_pipeline_mask_the_same_tokens_too(tmp_path: Path) -> None:
    """Two stages, and two tensor ranks in each. The first two ranks have the last stage."""
    case = Case((*TENSOR, "strategy.pipeline_parallel_size=2"), passes=1, accumulate=2)
    ranks = [found[0] for found in spawn(4, run_cases, tmp_path, 4, [case])]
    assert all(len(own["step"]) == 2 * STEPS and all(map(same, own["step"], ranks[0]["step"])) for own in ranks)
    drops = dict[str, list[Tensor]]()
    for own, other in (ranks[:2], ranks[2:]):
        check_steps(case, own, other)
        for name, (along, noted) in own["drops"].items():
            if name == "body.first" and own is ranks[0]:  # what it drops there, nobody looks at
                continue
            pairs = list(zip(noted, other["drops"][name][1], strict=True))
            assert not any(torch.equal(*pair) for pair in pairs), name
            drops |= {name: [torch.cat(pair, along) for pair in pairs]} if pairs else {}
    final, losses = plain_run(case, ranks[0]["start"], ranks[0]["step"], drops)
    assert largest(ranks[0]["losses"], losses) < 1e-12
    assert max(update_deviation(ranks[0]["start"], ranks[0]["final"], final).values()) < 1e-10


# Runs of models of Hugging Face → the ranks whose layers draw the same
MODELS = {
    2: {Run(TENSOR): [(0, 1)], Run(KEYS): [(0,), (1,)], Run(HEADS, more=(FULL,)): [(0,), (1,)]},
    4: {Run((*KEYS, *TENSOR)): [(0, 1), (2, 3)], Run((*HEADS, *PIPELINE)): [(0,), (1,), (2,), (3,)]},
}


@pytest.mark.parametrize("ranks", MODELS)
def test_models_of_hugging_face_draw_so_too(tmp_path: Path, ranks: int) -> None:
    """Each rank of a context axis is given whole batches, and its layers have parts of them."""
    found = spawn(ranks, run_models, tmp_path, ranks, list(MODELS[ranks]))
    for number, (run, groups) in enumerate(MODELS[ranks].items()):
        own = [rank[number] for rank in found]
        assert all(one["step"] and all(map(torch.equal, one["step"], own[0]["step"])) for one in own), run
        assert all(all(map(torch.equal, one["behind"], own[0]["behind"])) for one in own), run
        for group in groups:
            first, *others = (own[rank] for rank in group)
            assert first["layers"], run
            assert all(all(map(torch.equal, first["layers"], other["layers"])) for other in others), run
        firsts = [float(number) for ranks_, *_ in groups for number in own[ranks_]["layers"]]
        assert len(set(firsts)) == len(firsts), run
        whole = [one["whole"] for one in own if one["behind"]]
        assert all(all(map(torch.equal, one, whole[0])) for one in whole), run


def check_steps(case: Case, own: dict[str, Any], other: dict[str, Any]) -> None:
    for kind in ("transfer", "hook", "python", "step", "validation"):
        assert own[kind], (case, kind)
        assert all(same(*pair) for pair in zip(own[kind], other[kind], strict=True)), (case, kind)
        assert not any(same(*pair) for pair in zip(own[kind], own[kind][1:], strict=False)), (case, kind)
    for name, drawn in own["whole"].items():
        assert all(torch.equal(*pair) for pair in zip(drawn, other["whole"][name], strict=True)), (case, name)


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_compiled_layers_and_steps_draw_so_too(tmp_path: Path) -> None:
    """Seen in buffers, since a graph notes nothing else."""
    for case, own, other in zip(COMPILED, *spawn(2, run_cases, tmp_path, 2, COMPILED), strict=True):
        for name, tensor in own["buffers"].items():
            if tensor.any():
                assert torch.equal(tensor, other["buffers"][name]) == (name == "mask"), (case, name)
        assert own["buffers"]["body.blocks.0.mlp.drop.last"].any(), case
        assert own["buffers"]["mask"].any() == ("compile=model" in case.words), case
