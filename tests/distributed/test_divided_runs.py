"""Runs whose layers or sequences are divided, from their weights to their end: resume, export, the guard."""

from __future__ import annotations

import dataclasses
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from shardwise.nn.linear_cross_entropy import IGNORE
from shardwise.plan import Plan
from shardwise.rank import run_until_rolled_back
from shardwise.run_dir.files import checkpoint_path
from shardwise_tools import main
from tests.distributed.test_guard import watched
from tests.harness.cells import Capture, fit, masked_tokens
from tests.harness.exact_resume import STEPS, STOP, stopped_and_not, unlike
from tests.harness.layouts import layout_plan
from tests.harness.marked import BATCH, WORDS, marked_plan
from tests.harness.processes import spawn

EXACT = (
    "max_steps=7",
    "+module.dropout=true",
    "ema_decay=0.9",
    "optimizer=adamw",
    f"checkpoint.save_every_n_steps={STOP}",
)
TARGETS = sum(int((row["targets"] != IGNORE).sum()) for row in masked_tokens(STEPS * BATCH))  # of all samples, once
CELLS = {
    "tensor": ["gradient_clip_val=0.1"],
    "tensor, bf16, checkpointing": [
        "precision=bf16",
        "activation_checkpointing=full",
        "checkpoint=async",
        "checkpoint.monitor=null",
    ],
    "context by keys": ["precision=bf16", "activation_checkpointing=selective"],
    "context by heads": [],
}


def run_exact(folder: Path) -> dict[str, Any]:
    """In each rank."""
    found = {}
    for number, (name, words) in enumerate(CELLS.items()):

        def make(run_dir: Path, *more: str, layout: str = name.split(",")[0], words: list[str] = words) -> Plan:
            return marked_plan(run_dir, layout, *words, *EXACT, *more)

        found[name] = stopped_and_not(folder / str(number), make)
    return found


def test_a_resumed_run_never_stopped(tmp_path: Path) -> None:
    """With dropout, whose masks differ between the ranks, the average of the weights, and a sum over the epoch, of
    which each rank of a context axis has counted its own part."""
    found = spawn(2, run_exact, tmp_path)
    for name in CELLS:
        assert len(found[0][name]["straight"]["losses"]) == STEPS
        assert [unlike(**rank[name]) for rank in found] == [[], []], name
        counted = [run["validation"]["own/targets"] for rank in found for run in rank[name].values()]
        assert counted == [TARGETS] * 4, name


def begin(folder: Path, weights: str) -> list[dict[str, Tensor]]:
    """In each rank: what a run has before its first step, divided by layers and by sequences."""
    words = (f"init_from={weights}", "max_steps=1", "checkpoint=none")
    return [
        fit(layout_plan(folder / layout.replace(" ", "-"), layout, False, *words))["start"]
        for layout in ("tensor 2", "context 2")
    ]


def train(folder: Path) -> dict[str, Tensor]:
    return fit(layout_plan(folder, "tensor 2", False, "max_steps=1", "ema_decay=0.9"))["final"]


def test_what_is_exported_is_whole_and_another_run_begins_with_it(tmp_path: Path) -> None:
    final = spawn(2, train, tmp_path / "tensor")[0]
    assert main(["export", str(tmp_path / "tensor"), "format=safetensors", f"out={tmp_path}/ours"]) == 0
    assert main(["export", str(tmp_path / "tensor"), "format=hf", "weights=average", f"out={tmp_path}/theirs"]) == 0
    ours, theirs = load_file(tmp_path / "ours/model.safetensors"), load_file(tmp_path / "theirs/model.safetensors")
    assert ours.keys() == final.keys() and all(torch.equal(ours[name], tensor) for name, tensor in final.items())
    assert theirs["lm_head.weight"].shape == (61, 32) == theirs["model.embed_tokens.weight"].shape
    assert not torch.equal(theirs["lm_head.weight"], final["model.head.weight"])
    for found in (start for rank in spawn(2, begin, tmp_path / "begun", f"{tmp_path}/theirs") for start in rank):
        assert torch.equal(found["model.head.weight"], theirs["lm_head.weight"])
        for word, own in (("self_attn.q_proj", "attention.wq"), ("self_attn.o_proj", "attention.wo"),
                          ("mlp.down_proj", "feed_forward.w2"), ("input_layernorm", "attention_norm")):  # fmt: skip
            name = f"model.layers.1.{word}.weight"
            assert torch.equal(found[f"model.blocks.1.{own}.weight"], theirs[name]), name


def run_faults(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """In each rank: under each layout and fault a run that stops, one that goes on from it, one that skips."""
    cells = {}
    for number, layout in enumerate(WORDS):
        for kind in ("loss", "gradient"):
            words, home = (
                (f"+module.fault={kind}", "max_steps=5", "guard.on_nonfinite=skip"),
                folder / f"{number}-{kind}",
            )
            stopped = watched(marked_plan(home, layout, *words, "guard.on_nonfinite=stop"))
            resume = f"resume={checkpoint_path(home, 2)}"
            cells[layout, kind] = {
                "stopped": stopped,
                "resumed": watched(marked_plan(folder / f"{number}-{kind}-on", layout, *words, resume)),
                "skipped": watched(marked_plan(folder / f"{number}-{kind}-skip", layout, *words, "checkpoint=none")),
            }
    return cells


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    ranks = spawn(2, run_faults, tmp_path)
    for layout, kind in ranks[0]:
        stopped, resumed, skipped = (ranks[0][layout, kind][word] for word in ("stopped", "resumed", "skipped"))
        other = ranks[1][layout, kind]
        for number, step in skipped["steps"].items():
            assert same(step["weights"], other["skipped"]["steps"][number]["weights"]), (layout, kind, number)
            assert all(tensor.isfinite().all() for tensor in step["weights"].values())
            assert step["samples"] == number * BATCH
        weights = {number: step["weights"] for number, step in skipped["steps"].items()}
        assert [same(weights[n], weights[n + 1]) for n in range(5)] == [False, False, True, False, False]
        assert skipped["error"] is None and resumed["error"] is None
        assert stopped["error"] is not None and stopped["error"] == other["stopped"]["error"]
        assert min(resumed["steps"]) == 2 and same(resumed["steps"][5]["weights"], weights[5])
        (noted,) = skipped["noted"]
        assert (noted["what"], noted["step"]) == (f"non-finite {kind}", 3)
        assert [rank["rank"] for rank in noted["ranks"]] == [0, 1]
        assert [micro["samples"] for micro in noted["ranks"][0]["micro_batches"]] == [
            [16, 17, 18, 19],
            [20, 21, 22, 23],
        ]
        peer = noted["ranks"][1]["micro_batches"]  # a tensor peer has the same losses; one of a context its own parts
        assert [micro["samples"] for micro in peer] == (
            [] if layout == "tensor" else [[16, 17, 18, 19], [20, 21, 22, 23]]
        )


def run_spikes(folder: Path) -> list[dict[str, Any]]:
    """In each rank: back to the checkpoint and without the window that leapt; and without it from the start."""
    window, found = 34 * BATCH, []
    words = ("+module.fault=spike", "+data.samples=400", f"+data.at={window + 1}", "max_steps=36",
             "guard.on_spike=rollback", "checkpoint.save_every_n_steps=30", "checkpoint.keep_last=2")  # fmt: skip
    for layout in ("tensor", "context by keys"):
        name = layout.replace(" ", "-")
        plan, capture = marked_plan(folder / name, layout, *words), Capture()
        guard = dataclasses.replace(plan.guard, pass_over=(window,))
        straight = dataclasses.replace(plan, run_dir=str(folder / f"{name}-straight"), guard=guard)
        Path(straight.run_dir).mkdir(exist_ok=True)
        final = fit(straight)["final"]
        groups = len(dist.distributed_c10d._world.pg_map)
        with redirect_stdout(io.StringIO()):
            again = run_until_rolled_back(plan)
            assert again is not None and run_until_rolled_back(again, capture) is None
        assert again.resume is not None and again.resume.endswith("step-00000030.ckpt")
        more = len(dist.distributed_c10d._world.pg_map) - groups
        found.append({"passed over": again.guard.pass_over, "final": capture.final, "straight": final, "groups": more})
    return found


def test_a_leap_rolls_all_ranks_back(tmp_path: Path) -> None:
    for found in (layout for rank in spawn(2, run_spikes, tmp_path) for layout in rank):
        assert found["passed over"] == (34 * BATCH,)
        assert same(found["final"], found["straight"])
        assert found["groups"] == 0, "a run that is rolled back made its groups anew"
