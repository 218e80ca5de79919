"""The arithmetic of the axes: each formula against numbers that were computed by hand, and against the simulator."""

import pytest

from shardwise.plan import parallel_costs as arithmetic
from shardwise.plan.pipeline_schedule import make_schedule, simulate

# 8 B: 32 layers of width 4096, 32 heads with 8 keys, 8,192 tokens
LLAMA = {"samples": 1, "tokens": 8192, "width": 4096}
HEADS = {"heads": 32, "key_heads": 8}
ROW = 8192 * 4096  # 33,554,432 elements of one hand-over: 64 MiB in bf16


@pytest.mark.parametrize("layout", [("gpipe", 4, 1, 8), ("1f1b", 4, 1, 8), ("1f1b", 8, 1, 3), ("interleaved", 4, 2, 8)])
def test_the_formulas_are_what_the_simulator_finds(layout: tuple[str, int, int, int]) -> None:
    name, ranks, chunks, micro_batches = layout
    line = simulate(make_schedule(*layout))
    assert line.bubble == pytest.approx(arithmetic.bubble(ranks, chunks, micro_batches))
    assert line.idle == pytest.approx(arithmetic.idle_share(ranks, chunks, micro_batches))
    for position, kept in enumerate(line.kept):
        found = arithmetic.micro_batches_kept(name, position, ranks, chunks, micro_batches)
        assert kept / chunks == pytest.approx(found)


def test_bubble_and_idle_share() -> None:
    assert arithmetic.bubble(4, 1, 8) == 0.375
    assert arithmetic.bubble(4, 2, 8) == 0.1875
    assert arithmetic.idle_share(4, 1, 8) == pytest.approx(3 / 11)
    assert arithmetic.idle_share(1, 1, 8) == 0


def test_kept_micro_batches() -> None:
    assert [arithmetic.micro_batches_kept("1f1b", r, 4, 1, 8) for r in range(4)] == [4, 3, 2, 1]
    assert [arithmetic.micro_batches_kept("gpipe", r, 4, 1, 8) for r in range(4)] == [8] * 4
    assert [arithmetic.micro_batches_kept("interleaved", r, 4, 2, 8) for r in range(4)] == [5.5, 4.5, 3.5, 2.5]
    assert arithmetic.micro_batches_kept("1f1b", 0, 4, 1, 2) == 2


def test_hand_overs_of_a_pipeline() -> None:
    assert 2 * ROW == 64 * 2**20  # bytes
    assert arithmetic.pipeline_elements(micro_batches=32, **LLAMA) == 64 * ROW
    assert arithmetic.pipeline_elements(micro_batches=32, chunks=2, context=2, tensor=4, **LLAMA) == 16 * ROW


def test_tensor_parallelism() -> None:
    assert arithmetic.tensor_elements(layers=32, micro_batches=1, tensor=2, **LLAMA) == 128 * ROW
    assert arithmetic.tensor_elements(layers=32, micro_batches=4, tensor=8, context=2, **LLAMA) == 448 * ROW
    assert arithmetic.tensor_end_elements(micro_batches=1, tensor=2, **LLAMA) == 2 * ROW + 3 * 8192
    assert arithmetic.tensor_elements(layers=32, micro_batches=1, tensor=1, **LLAMA) == 0


def test_context_parallelism() -> None:
    # By heads: queries 1, keys and values 1/4 each, the result 1: 2.5 rows a way, half a row a rank, half of it sent
    by_heads = arithmetic.context_elements_by_heads(layers=1, micro_batches=1, context=2, **LLAMA, **HEADS)
    assert by_heads == 2 * 2.5 * ROW / 2 / 2
    # By keys: keys and values 1/4 each, of which the other rank has half
    by_keys = arithmetic.context_elements_by_keys(layers=1, micro_batches=1, context=2, **LLAMA, **HEADS)
    assert by_keys == 2 * 0.5 * ROW / 2
    many = arithmetic.context_elements_by_heads(layers=4, micro_batches=3, context=4, tensor=2, **LLAMA, **HEADS)
    assert many == 12 * 2 * 2.5 * ROW / 4 / 2 * 3 / 4


def test_fsdp() -> None:
    gathered, scattered = arithmetic.fsdp_gathered_elements, arithmetic.fsdp_scattered_elements
    assert gathered(parameters=1000, shards=4, gathers=6) == 6 * 750
    assert scattered(parameters=1000, shards=4, micro_batches=3) == 3 * 750
    assert scattered(parameters=1000, shards=4, micro_batches=3, once=True) == 750
    assert gathered(parameters=1000, shards=1, gathers=6) == 0


def test_weights_gradients_and_optimizer_state() -> None:
    assert arithmetic.state_bytes(parameters=1e9, shards=4) == 4e9
    assert arithmetic.state_bytes(parameters=1e9, shards=4, gathered=True) == 6e9
    assert arithmetic.state_bytes(parameters=1e9, shards=4, gathered=True, synced_once=True) == 10e9
