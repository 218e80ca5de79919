"""`precision=fp8` under ddp and FSDP2, by emulation: one arithmetic, and the masters, state and files of bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from shardwise.errors import ConfigError
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import cell_plan, fit
from tests.harness.float8 import EMULATED, MICRO, Network, plain_loop, plan_of
from tests.harness.processes import spawn
from tests.harness.reference import update_deviation

STEPS = 3
BOUND = 1e-3  # of an update's norm; one master or one scale that is wrong makes it above 1e-2
ROWWISE = "precision.fp8.recipe=rowwise"
RUNS = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "fsdp, recomputed": ["strategy=fsdp", "activation_checkpointing=full"],
    "ddp, rowwise": ["strategy=ddp", ROWWISE],
    "fsdp, rowwise": ["strategy=fsdp", ROWWISE],
}


def run_all(folder: Path) -> dict[str, Any]:
    """In each of two ranks: every run, then a run that goes on under another precision and strategy."""
    found = {
        name: fit(plan_of(folder / str(number), 2, STEPS, *EMULATED, *words))
        for number, (name, words) in enumerate(RUNS.items())
    }
    before = None
    for name, steps, words in CHAIN:
        resume = [] if before is None else [f"resume={before}"]
        found[name] = fit(plan_of(folder / name.replace(" ", "-"), 2, steps, *words, *resume))
        if not name.startswith("again"):
            before = checkpoint_path(folder / name.replace(" ", "-"), steps)
    for strategy in ("ddp", "fsdp"):
        found[f"language, {strategy}"] = fit(cell_plan(folder / strategy, 2, *LANGUAGE, f"strategy={strategy}"))
        found[f"by hand, {strategy}"] = fit(
            plan_of(folder / f"by-hand-{strategy}", 2, STEPS, *EMULATED, *BY_HAND, f"strategy={strategy}")
        )
    with pytest.raises(ConfigError) as caught:
        fit(plan_of(folder / "reaches", 2, 1, *EMULATED, "strategy=fsdp", "+module.reaches=true"))
    return found | {"reaches": str(caught.value)}


# All that a run may do with the weights besides: a tied head, an average, validation, samples
LANGUAGE = [
    *EMULATED, "model.dim=32", "model.ffn_dim=48", "max_steps=2", "micro_batch_size=2", "global_batch_size=8",
    "ema_decay=0.9", "module.sample_tokens=3", "validate_every_n_steps=1", "checkpoint=none", "optimizer=sgd",
    "schedule=none",
]  # fmt: skip


BY_HAND = ["module._target_=tests.harness.float8.ByHand", f"global_batch_size={2 * MICRO}"]
CHAIN = [
    ("in bf16", 2, ["strategy=ddp", "precision=bf16"]),
    ("on in fp8", 4, ["strategy=fsdp", *EMULATED]),
    ("again under ddp", 5, ["strategy=ddp", *EMULATED]),
    ("again under fsdp", 5, ["strategy=fsdp", *EMULATED]),
    ("back in bf16", 5, ["strategy=ddp", "precision=bf16"]),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("fp8")
    return folder, spawn(2, run_all, folder)[0]


@pytest.mark.parametrize("name", RUNS)
def test_every_strategy_equals_a_plain_loop_over_torchaos_layers(runs: Any, name: str) -> None:
    found = runs[1][name]
    start = {f"network.{n}": p.detach() for n, p in Network().named_parameters()}
    assert all(torch.equal(found["start"][n], p) for n, p in start.items())
    final, losses = plain_loop(STEPS, "rowwise" if "rowwise" in name else "tensorwise")
    assert found["losses"] == pytest.approx(losses, rel=1e-4)
    off = update_deviation(start, found["final"], final)
    assert max(off.values()) < BOUND, off


def run_hybrid(folder: Path) -> dict[str, Any]:
    """In each of four ranks: two copies of two shards."""
    return fit(plan_of(folder / "run", 4, STEPS, *EMULATED, "strategy=fsdp_hybrid", "strategy.shard_size=2"))


def test_replicas_of_shards_equal_it_too(tmp_path: Path) -> None:
    start = {f"network.{n}": p.detach() for n, p in Network().named_parameters()}
    off = update_deviation(start, spawn(4, run_hybrid, tmp_path)[0]["final"], plain_loop(STEPS, "tensorwise")[0])
    assert max(off.values()) < BOUND, off


def test_a_run_goes_on_under_the_other_precision(runs: Any) -> None:
    _, found = runs
    for earlier, later in (("in bf16", "on in fp8"), ("on in fp8", "back in bf16")):
        for name, tensor in found[earlier]["final"].items():
            assert torch.equal(found[later]["start"][name], tensor), f"{later}: {name}"
    assert [len(found[name]["losses"]) for name, _, _ in CHAIN] == [2, 2, 1, 1, 1]
    assert found["again under ddp"]["losses"] == pytest.approx(found["again under fsdp"]["losses"], rel=1e-5)
    assert found["again under ddp"]["losses"] != found["back in bf16"]["losses"], "these are two precisions"


def test_a_language_model_validates_with_its_average_and_writes_samples_alike(runs: Any) -> None:
    """With the scales of other weights, those of the masters or of the average, a loss is 2e-5 off."""
    ddp, fsdp = (runs[1][f"language, {strategy}"] for strategy in ("ddp", "fsdp"))
    assert len(ddp["losses"]) == 2 and ddp["losses"] == pytest.approx(fsdp["losses"], rel=5e-6)
    assert ddp["validation"] == pytest.approx(fsdp["validation"], rel=5e-6) and ddp["validation"]


def test_weights_that_change_within_a_step_have_their_own_scales(runs: Any) -> None:
    """A module that optimizes by hand: a weight gets its scale when it is gathered, over all ranks."""
    ddp, fsdp = (runs[1][f"by hand, {strategy}"] for strategy in ("ddp", "fsdp"))
    off = update_deviation(ddp["start"], fsdp["final"], ddp["final"])
    assert max(off.values()) < BOUND, off
    assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-4) and fsdp["losses"]


def test_who_computes_with_a_weight_that_is_gathered_in_fp8_is_told(runs: Any) -> None:
    assert "Module: under fsdp precision=fp8 a weight is in fp8, and something computes with it" in runs[1]["reaches"]
    assert "name that layer in precision.fp8.keep_in_bf16" in runs[1]["reaches"]


def test_the_files_are_those_of_bf16(runs: Any) -> None:
    folder, _ = runs
    files = []
    for name, steps in (("in-bf16", 2), ("on-in-fp8", 4)):
        metadata = FileSystemReader(checkpoint_path(folder / name, steps)).read_metadata().state_dict_metadata
        files.append({key: (tuple(v.size), v.properties.dtype) for key, v in metadata.items() if hasattr(v, "size")})
    assert files[0] == files[1] and {dtype for _, dtype in files[0].values()} == {torch.float32}
