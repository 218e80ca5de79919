"""A checkpoint is a run's, not a layout's: with divided layers or sequences, too, it goes on under any other one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.layouts import BOUND, LAYOUTS, Pair, go_on, off_the_plain_loop, save_layouts, unlike_saved
from tests.harness.processes import spawn

PAIRS = {
    "quick": [Pair("fsdp", "tensor 2"), Pair("tensor 2", "ddp"), Pair("context 2", "fsdp")],
    "two": [
        Pair("fsdp", "tensor 2", tied=False), Pair("tensor 2", "zero2"), Pair("zero2", "tensor 2"),
        Pair("tensor 2", "one", tied=False), Pair("tensor 2", "tensor 2"), Pair("fsdp", "context 2"),
        Pair("context 2", "tensor 2"), Pair("tensor 2", "context 2"), Pair("context 2", "one"),
    ],
    "four": [
        Pair("tensor 4", "tensor 2, shard 2"), Pair("tensor 2, shard 2", "tensor 4", tied=False),
        Pair("tensor 4", "context 2, shard 2"), Pair("context 2, shard 2", "tensor 2, copies"),
        Pair("tensor 2, copies", "fsdp"), Pair("tensor 4", "one", tied=False),
    ],
}  # fmt: skip


@pytest.mark.parametrize("which", PAIRS)
def test_the_run_goes_on_with_another_layout(which: str, tmp_path: Path) -> None:
    """Weights and optimizer state are read to the bit; 61 tokens are divided unevenly; what follows is the same."""
    pairs, found = PAIRS[which], {}
    for ranks in sorted({LAYOUTS[pair.saved][0] for pair in pairs}):
        cells = sorted({(pair.saved, pair.tied) for pair in pairs if LAYOUTS[pair.saved][0] == ranks})
        spawn(ranks, save_layouts, tmp_path, cells)
    for ranks in sorted({LAYOUTS[pair.resumed][0] for pair in pairs}):
        mine = [pair for pair in pairs if LAYOUTS[pair.resumed][0] == ranks]
        found |= dict(zip(mine, spawn(ranks, go_on, tmp_path, mine)[0], strict=True))
    different = {str(pair): unlike_saved(result) for pair, result in found.items()}
    assert not any(different.values()), different
    off = {str(pair): off_the_plain_loop(pair, result) for pair, result in found.items()}
    print("NUMBERS", off)
    assert max(off.values()) <= BOUND, off
