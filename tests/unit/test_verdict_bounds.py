"""Each rule of a verdict at its bounds: numbers just below a bound say nothing, and just above it are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from shardwise.metrics.verdict_rules import expected_seconds, fewer_transfers, multiple_of, sizes_that_miss
from shardwise.metrics.verdicts import (
    BUSY,
    COLLECTING,
    COMPUTE,
    DATA_WAIT,
    DEVICE_MEMORY,
    HOST_MEMORY,
    IDLE,
    RETRIES,
    WAITING,
)
from tests.unit.test_verdicts import RANKS, active, judge, one, plan, told

Row = dict[str, list[float]]


def same(name: str, value: float) -> Row:
    return {name: [value] * RANKS}


HEAT, CLOCK = "gpu/held_down_by_heat", "gpu/sm_clock_mhz"
SLOW = one(CLOCK, 1200.0, 1700.0)  # by 29 %
# The rows just below a bound and just above it, and what is told of the second; a step takes 0.1 s
BOUNDS: dict[str, tuple[Row, Row, str]] = {
    "wait for data": (same(DATA_WAIT, 0.049), same(DATA_WAIT, 0.051), "data-bound"),
    "others wait for data too": (one(DATA_WAIT, 0.0535, 0.049), one(DATA_WAIT, 0.0545, 0.049), "straggler data"),
    "one waits for data": (one(DATA_WAIT, 0.049, 0.0), one(DATA_WAIT, 0.051, 0.0), "straggler data"),
    "idle device": (same(IDLE, 0.19), one(IDLE, 0.21, 0.0), "host-bound"),
    "busy memory": (active(0.59, 0.1), active(0.61, 0.1), "memory-bound"),
    "memory, idle tensor cores": (active(0.8, 0.41), active(0.8, 0.39), "memory-bound"),
    "busy tensor cores": (active(0.1, 0.59), active(0.1, 0.61), "compute-bound"),
    "tensor cores, idle memory": (active(0.41, 0.8), active(0.39, 0.8), "compute-bound"),
    "heat": (one(HEAT, 0.049, 0.0), one(HEAT, 0.051, 0.0), "held down heat"),
    "garbage": (one(COLLECTING, 0.0019, 0.0), one(COLLECTING, 0.0021, 0.0), "garbage collection"),
    "a host ahead of its GPU": (one(BUSY, 0.079, 0.02), one(BUSY, 0.081, 0.02), "straggler host"),
    "ratio to the others": (one(COMPUTE, 0.0549, 0.05), one(COMPUTE, 0.0551, 0.05), "straggler compute"),
    "share of the step": (one(COMPUTE, 0.0129, 0.01), one(COMPUTE, 0.0131, 0.01), "straggler compute"),
    "a slow clock": (one(CLOCK, 1531.0, 1700.0), one(CLOCK, 1529.0, 1700.0), "straggler clock"),
}  # fmt: skip
CPU_BOUNDS: dict[str, tuple[Row, Row, str]] = {
    "wait for data": (same(DATA_WAIT, 0.099), same(DATA_WAIT, 0.101), "data-bound"),
    "ratio to the others": (one(COMPUTE, 0.089, 0.06), one(COMPUTE, 0.091, 0.06), "straggler compute"),
    "share of the step": (one(COMPUTE, 0.054, 0.03), one(COMPUTE, 0.056, 0.03), "straggler compute"),
    "waiting for the others": (same(WAITING, 0.029), same(WAITING, 0.031), "communication-bound"),
    "every rank has to wait": (one(WAITING, 0.0, 0.05), same(WAITING, 0.05), "communication-bound"),
}


def names(rows: Sequence[Row], *words: str, **more: Any) -> list[str]:
    """What is told of rows of ten steps each, by name and cause."""
    exposed = more.pop("exposed", None)
    return [f"{v.name} {v.cause}".strip() for v in told(judge(*words, **more), rows, exposed)]


@pytest.mark.parametrize("case", BOUNDS)
def test_a_rule_begins_at_its_bound(case: str) -> None:
    below, above, name = BOUNDS[case]
    assert names([below] * 9) == [] and names([above] * 9) == [name]


@pytest.mark.parametrize("case", CPU_BOUNDS)
def test_on_the_cpu_the_bounds_are_wider(case: str) -> None:
    below, above, name = CPU_BOUNDS[case]
    words = ["strategy=fsdp", "strategy.defer_gradient_sync=false"]  # two micro-batches
    assert names([below] * 9, *words, accelerator="cpu") == []
    assert names([above] * 9, *words, accelerator="cpu") == [name]


def test_one_cause_hides_those_that_it_explains() -> None:
    assert names([one(DATA_WAIT, 0.3, 0.049)] * 9) == ["straggler data"]
    assert names([one(DATA_WAIT, 0.3, 0.051)] * 9) == ["data-bound"]
    assert names([same(DATA_WAIT, 0.051) | same(IDLE, 0.5)] * 9) == ["data-bound"], "it waits for data, and is idle so"
    assert names([same("gpu/held_down_by_power", 1.0)] * 9) == [], "a GPU at its power limit is at work"
    assert names([same(WAITING, 0.05)] * 9, "strategy=ddp", accelerator="cpu") == [], "gradients are reduced once"
    # Twice the clock's excess is the clock's; what is more has a cause of its own
    assert names([SLOW | one(COMPUTE, 0.085, 0.03)] * 9) == ["straggler clock"]
    assert names([SLOW | one(COMPUTE, 0.095, 0.03)] * 9) == ["straggler compute"]
    assert names([SLOW | one(BUSY, 0.085, 0.03)] * 9) == ["straggler clock"]
    assert names([one(BUSY, 0.095, 0.05) | one(COMPUTE, 0.1, 0.03)] * 9) == ["straggler host"]
    unknown = [math.nan] * RANKS
    assert names([active(0.8, 0.1) | {"gpu/tensor_active": unknown}] * 9) == []
    assert names([active(0.1, 0.8) | {"gpu/dram_active": unknown}] * 9) == []
    assert names([SLOW] * 9, "devices=1") == [], "one rank alone has no others"


def test_communication_at_its_bounds() -> None:
    words = ["strategy=fsdp", "cluster=dgx_h200", "devices=4"]
    assert names([{}] * 9, *words, exposed=0.149) == [] and names([{}] * 9, *words, exposed=0.151) != []
    most = 0.05 / expected_seconds(plan(*words), 1)  # type: ignore[operator]  # parameters: half of a step of 0.1 s
    assert names([{}] * 9, *words, parameters=int(0.98 * most)) == []
    assert names([{}] * 9, *words, parameters=int(1.02 * most)) == ["communication-bound"]


SENT = {  # words → 3/4 of a parameter's bytes are sent so often in a step of two micro-batches; fp32
    "strategy=ddp": 2, "strategy=zero1": 2, "strategy=zero2": 2 + 1, "strategy=zero3": 4 + 2,
    "strategy=fsdp strategy.reshard_after_forward=true strategy.defer_gradient_sync=false": 4 + 2,
    "strategy=fsdp strategy.reshard_after_forward=true strategy.defer_gradient_sync=true": 4 + 1,
    "strategy=fsdp strategy.reshard_after_forward=false strategy.defer_gradient_sync=true": 2 + 1,
}  # fmt: skip


@pytest.mark.parametrize("words", SENT)
def test_what_a_step_sends(words: str) -> None:
    made = plan(*words.split(), "cluster=dgx_h200", "precision=fp32")
    seconds = expected_seconds(made, 1000)
    assert seconds is not None and made.link_gb_per_second is not None and made.accumulate_grad_batches == 2
    assert seconds * made.link_gb_per_second * 1e9 == pytest.approx(SENT[words] * 0.75 * 4 * 1000)
    assert expected_seconds(plan(*words.split()), 1000) is None


def test_what_would_send_less() -> None:
    def remedy(*words: str) -> str:
        return fewer_transfers(plan(*words)).split(" ")[0]

    shard = ["strategy=fsdp", "strategy.reshard_after_forward=true"]
    assert remedy(*shard, "strategy.defer_gradient_sync=false") == "strategy.defer_gradient_sync=true"
    assert remedy(*shard, "global_batch_size=4") == "strategy.reshard_after_forward=false"
    assert remedy("strategy=zero3") == "strategy=zero2"
    assert remedy("strategy=ddp") == "global_batch_size=16"


def test_what_would_send_less_on_axes_of_the_model() -> None:
    def remedy(*words: str) -> str:
        made = plan("strategy=fsdp", *words)
        assert made.accumulate_grad_batches > 1 and expected_seconds(made, 1000) is None
        return fewer_transfers(made).split(" ")[0]

    tensor, both = "strategy.tensor_parallel_size=4", ["strategy.tensor_parallel_size=2", "global_batch_size=8"]
    heads = "model.n_kv_heads=4"
    assert remedy(tensor, heads, "cluster=dgx_h200") == "strategy.tensor_parallel_size=2", "there is nothing to reduce"
    assert remedy(*both) == "strategy.defer_gradient_sync=true", "two ranks share the parameters"
    assert remedy(*both, "strategy.defer_gradient_sync=true") == "strategy.tensor_parallel_size=1"
    assert remedy("strategy.context_parallel_size=4", "strategy.defer_gradient_sync=true").endswith("size=2")
    assert remedy("strategy.pipeline_parallel_size=4") == "global_batch_size=16", "nothing is gathered"


def grows(name: str, first: float, by: float, rows: int = 40) -> list[Row]:
    """Rows of which the first is not counted; over the others the memory grows by so much, GiB."""
    return [same(name, first + by * max(0, i - 1) / (rows - 2)) for i in range(rows)]


def test_a_leak_at_its_bounds() -> None:
    for name, first, below, above in (
        (DEVICE_MEMORY, 20.0, 0.39, 0.41), (DEVICE_MEMORY, 1.0, 0.061, 0.064), (HOST_MEMORY, 1.0, 0.122, 0.128),
    ):  # fmt: skip
        assert names(grows(name, first, below)) == [] and names(grows(name, first, above)) == ["leaking memory"]
    assert names(grows(HOST_MEMORY, 1.0, 9.0, rows=16)) == []
    assert names(grows(HOST_MEMORY, 1.0, 9.0, rows=17)) == ["leaking memory"]
    slows_down = [same(DEVICE_MEMORY, 20.0 + math.log(i + 1)) for i in range(40)]
    assert names(slows_down) == [], "one quarter grows by less than half of another"


def test_retries_must_grow_in_each_observation() -> None:
    assert names([same(RETRIES, float(n)) for n in (0, 1, 1, 2, 2, 3, 3, 4)]) == []
    assert names([same(RETRIES, float(n)) for n in (0, 1, 1, 2, 3)]) == ["allocator at its limit"]


def sizes(module: nn.Module, *words: str) -> list[tuple[int, int]]:
    return [(size.now, size.better) for size in sizes_that_miss(module, plan("precision=bf16", *words))]


def test_a_size_matters_from_a_million_weights_and_a_twentieth_on() -> None:
    lm = ["data.sequence_length=1024"]
    assert sizes(nn.Linear(1003, 992, bias=False), *lm) == []
    assert sizes(nn.Linear(1003, 1000, bias=False), *lm) == [(1003, 1008)]
    assert sizes(nn.Sequential(nn.Linear(1003, 1000), nn.Linear(4096, 4864)), *lm) == []
    assert sizes(nn.Sequential(nn.Linear(1003, 1000), nn.Linear(4096, 4480)), *lm) == [(1003, 1008)]
    assert sizes(nn.Linear(1030, 1000), *lm) == [(1030, 1088)], "a large size is better a multiple of 64"
    assert sizes(nn.Linear(1021, 1000), *lm) == [(1021, 1024)]


def test_a_precision_has_its_multiple() -> None:
    assert [multiple_of(plan(f"precision={name}")) for name in ("bf16", "fp8", "tf32", "fp32")] == [8, 16, 4, None]
    assert multiple_of(plan("precision=bf16", accelerator="cpu")) is None


def test_a_micro_batch_has_a_multiple_of_tokens() -> None:
    assert sizes(nn.Linear(8, 8), "data.sequence_length=1020") == [(1020, 1024)]
