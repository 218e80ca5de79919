"""`precision=fp8` under ddp and FSDP2, by emulation: one arithmetic, and the masters, state and files of bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import fit
from tests.harness.float8 import EMULATED, Network, plain_loop, plan_of
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
    return found


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


def test_the_files_are_those_of_bf16(runs: Any) -> None:
    folder, _ = runs
    files = []
    for name, steps in (("in-bf16", 2), ("on-in-fp8", 4)):
        metadata = FileSystemReader(checkpoint_path(folder / name, steps)).read_metadata().state_dict_metadata
        files.append({key: (tuple(v.size), v.properties.dtype) for key, v in metadata.items() if hasattr(v, "size")})
    assert files[0] == files[1] and {dtype for _, dtype in files[0].values()} == {torch.float32}
