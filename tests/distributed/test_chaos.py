"""The short form of `make chaos`: every fault once, spread over strategies."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.distributed.chaos import FAULTS, MOUNTS, make_subject, may_mount, torment

# Whether its launcher brings it back, whether it saves asynchronously
HOW = {"ddp": (True, False), "fsdp": (False, True), "zero1": (True, True)}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("chaos")
    make_subject(home)
    return home


@pytest.mark.parametrize("strategy", HOW)
def test_a_run_that_is_interrupted_again_and_again_is_the_one_that_was_not(home: Path, strategy: str) -> None:
    in_place, asynchronous = HOW[strategy]
    faults = [fault for fault in FAULTS if may_mount(home) or fault not in MOUNTS]
    mine = random.Random(0).sample(faults, len(faults))[list(HOW).index(strategy) :: len(HOW)]
    found = list(torment(home, strategy, mine, 0, in_place=in_place, asynchronous=asynchronous))
    assert [(one.fault, one.told) for one in found] == [*((fault, "") for fault in mine), ("the end", "")]
    assert all(one.survived for one in found)
