"""The short form of `make chaos`: a fault of each kind, over two strategies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.chaos import MOUNTS, make_subject, may_mount, torment

# Whether its launcher brings it back, whether it saves asynchronously, its steps, and what it meets
RUNS = {
    "ddp": (True, False, 120, ["a full file system", "SIGKILL of one rank", "SIGUSR1 to one rank",
                               "SIGSTOP of one rank", "SIGTERM to one rank in validation"]),
    "fsdp": (False, True, 120, ["SIGKILL in the middle of a write", "a read-only directory", "a flipped byte",
                                "SIGTERM and SIGUSR2, skewed", "SIGKILL of the launcher"]),
    "pipeline": (True, False, 40, ["SIGKILL of one rank"]),
    "tensor": (True, True, 60, ["SIGKILL of one rank", "SIGKILL in the middle of a write"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("chaos")
    make_subject(home)
    return home


@pytest.mark.parametrize("strategy", RUNS)
def test_a_run_that_is_interrupted_again_and_again_is_the_one_that_was_not(home: Path, strategy: str) -> None:
    in_place, asynchronous, steps, faults = RUNS[strategy]
    mine = [fault for fault in faults if may_mount(home) or fault not in MOUNTS]
    found = list(torment(home, strategy, mine, 0, in_place=in_place, asynchronous=asynchronous, steps=steps))
    assert [(one.fault, one.told) for one in found] == [*((fault, "") for fault in mine), ("the end", "")]
    assert all(one.survived for one in found)
