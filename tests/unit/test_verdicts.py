"""The rules of verdicts, fed with numbers; when a verdict is told; sizes that miss tensor cores."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from benchmarks.report import ROOT, with_tables
from shardwise.callbacks.steps import StepLog
from shardwise.callbacks.verdicts import Verdicts
from shardwise.config.compose import compose
from shardwise.metrics.meter import GarbageClock
from shardwise.metrics.verdict_rules import RULES, sizes_that_miss
from shardwise.metrics.verdicts import (
    BUSY,
    COLLECTING,
    COMPUTE,
    DATA_WAIT,
    DEVICE_MEMORY,
    IDLE,
    RETRIES,
    SECONDS,
    Circumstances,
    Judge,
    Place,
    Verdict,
    larger_micro_batch,
)
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.files import profile_folder

RANKS = 4
WELL = {
    name: [value] * RANKS
    for name, value in {
        SECONDS: 0.1, BUSY: 0.02, COMPUTE: 0.03, IDLE: 0.0, DATA_WAIT: 0.01, COLLECTING: 0.0005, DEVICE_MEMORY: 20.0,
        RETRIES: 0.0, "gpu/sm_clock_mhz": 1700.0, "gpu/dram_active": 0.5, "gpu/tensor_active": 0.5,
        "gpu/held_down_by_power": 0.9, "gpu/held_down_by_heat": 0.0,
    }.items()
}  # fmt: skip


@functools.cache
def plan(*words: str, accelerator: str = "cuda") -> Plan:
    argv = [f"accelerator={accelerator}", f"devices={RANKS}", "name=v", "micro_batch_size=1",
            "global_batch_size=8", "max_steps=9", *words]  # fmt: skip
    host = Host(cuda_devices=RANKS, gpu="NVIDIA H200", gpu_capability=(9, 0))
    return make_plan(compose(argv).jobs[0].config, host)


def judge(*words: str, parameters: int = 10**8, accelerator: str = "cuda") -> Judge:
    places = tuple(Place(f"node-{rank // 2}", f"GPU {rank % 2}") for rank in range(RANKS))
    return Judge(Circumstances(plan(*words, accelerator=accelerator), places, parameters), RULES)


def told(judge: Judge, rows: Sequence[dict[str, list[float]]], exposed: float | None = None) -> list[Verdict]:
    """What is told of rows of ten steps each."""
    start = 1 if judge._row_step is None else judge._row_step + 10
    return [v for number, row in enumerate(rows) for v in judge.add(start + 10 * number, WELL | row, exposed)]


def one(name: str, bad: float, usual: float) -> dict[str, list[float]]:
    return {name: [usual, usual, bad, usual]}


def active(memory: float, tensor: float) -> dict[str, list[float]]:
    return {"gpu/dram_active": [memory] * RANKS, "gpu/tensor_active": [tensor] * RANKS}


SLOW_CLOCK = one("gpu/sm_clock_mhz", 1200.0, 1700.0)
CASES: dict[str, tuple[dict[str, list[float]], str, str, str]] = {  # row → name, cause, what the remedy says
    "all wait for data": ({DATA_WAIT: [0.2] * RANKS, IDLE: [0.9] * RANKS}, "data-bound", "", "workers"),
    "one waits for data": (one(DATA_WAIT, 0.3, 0.0), "straggler", "data", "workers"),
    "the device is idle": ({IDLE: [0.5] * RANKS}, "host-bound", "", "compile=layer"),
    "the host is the limit": (one(BUSY, 0.095, 0.02), "straggler", "host", "processes"),
    "more work": (one(COMPUTE, 0.06, 0.03), "straggler", "compute", "preflight=true"),
    "a low clock": (SLOW_CLOCK | one(COMPUTE, 0.04, 0.03), "straggler", "clock", "preflight=true"),
    "heat": (one("gpu/held_down_by_heat", 0.4, 0.0), "held down", "heat", "cooling"),
    "memory": (active(0.8, 0.1), "memory-bound", "", "compile=layer"),
    "tensor cores": (active(0.2, 0.8), "compute-bound", "", "fp8"),
    "garbage": (one(COLLECTING, 0.01, 0.0), "garbage collection", "", "make fewer objects"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_three_rows_make_a_verdict_and_two_do_not(case: str) -> None:
    row, name, cause, remedy = CASES[case]
    at = judge()
    assert told(at, [row] * 3) == []  # the first row of a process does not count
    (found,) = told(at, [row])
    assert (found.name, found.cause) == (name, cause) and remedy in found.remedy
    if cause:
        assert found.rank == 2 and "rank 2 (host node-1, GPU 0)" in found.sentence
    assert told(at, [row] * 9) == [], "it is told once"
    assert [v.name for v in at.in_force] == ([] if found.is_note else [name])


GRAPHS = ["compile=layer", "compile.cudagraphs=true"]
RUNS: dict[str, list[list[str]]] = {  # accelerator → words of runs
    "cuda": [[], GRAPHS, [*GRAPHS, "micro_batch_size=2"], ["strategy=fsdp", "compile=layer"],
             ["strategy=fsdp_hybrid", "strategy.shard_size=2"], ["strategy=zero3"], ["gc_every_n_steps=5"]],
    "cpu": [["strategy=fsdp"]],
}  # fmt: skip
OVERRIDE = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)*=\w+")


@pytest.mark.parametrize("accelerator", RUNS)
def test_the_run_can_take_each_override_that_a_verdict_names(accelerator: str) -> None:
    followed = set()
    for words in RUNS[accelerator]:
        faults = [told(judge(*words, accelerator=accelerator), [row] * 9) for row, *_ in CASES.values()]
        faults.append(told(judge(*words, accelerator=accelerator), [WELL] * 9, 0.3))
        faults.append(told(judge(*words, accelerator=accelerator), [one(RETRIES, float(i), 0.0) for i in range(9)]))
        for found in (verdict for verdicts in faults for verdict in verdicts):
            for choice in re.split("; | or ", found.remedy):
                named = {word.partition("=")[0]: word for word in OVERRIDE.findall(choice)}
                kept = [
                    word for word in words if not word.startswith(tuple(f"{name}{c}" for name in named for c in "=."))
                ]
                plan(*kept, *named.values(), accelerator=accelerator)  # raises an error where one is refused
                followed |= named.keys()
    assert "activation_checkpointing" in followed


def test_a_module_without_layers_that_repeat_is_compiled_whole() -> None:
    for case in ("the device is idle", "memory"):
        at = judge()
        at.circumstances = dataclasses.replace(at.circumstances, has_layers=False)
        (found,) = told(at, [CASES[case][0]] * 9)
        assert "compile=model" in found.remedy and "compile=layer" not in found.remedy
    at = judge("strategy=zero3")
    at.circumstances = dataclasses.replace(at.circumstances, has_layers=False)
    (found,) = told(at, [CASES["memory"][0]] * 9)
    assert "compile=" not in found.remedy


def test_a_larger_micro_batch_divides_the_global_one() -> None:
    assert larger_micro_batch(plan("global_batch_size=48")) == "micro_batch_size=2 (global_batch_size=48 stays)"
    assert larger_micro_batch(plan("global_batch_size=12")) == "micro_batch_size=3 (global_batch_size=12 stays)"
    assert larger_micro_batch(plan("global_batch_size=4")) == "micro_batch_size=2 global_batch_size=8"


def test_garbage_of_young_objects_is_not_mended_by_rarer_full_collections() -> None:
    row, *_ = CASES["garbage"]
    (young,), (full,) = told(judge(), [row] * 9), told(judge("gc_every_n_steps=5"), [row] * 9)
    assert "gc_every_n_steps=" not in young.remedy and "gc_every_n_steps=50" in full.remedy
    (python,) = told(judge("gc_every_n_steps=null"), [row] * 9)
    assert "gc_every_n_steps=100" in python.remedy


def test_waiting_for_a_core_is_no_collecting_of_garbage() -> None:
    def sleep(phase: str, _: dict[str, Any]) -> None:  # within a collection, after the clock has begun
        time.sleep(0.2)

    clock = GarbageClock()
    clock.begin()
    gc.callbacks.append(sleep)
    try:
        gc.collect(0)
    finally:
        gc.callbacks.remove(sleep)
        clock.end()
    assert clock.count and 0 < clock.take() < 0.2


def test_a_healthy_run_has_no_verdict_and_nor_has_one_of_very_short_steps() -> None:
    assert told(judge("strategy=fsdp"), [WELL] * 30) == []
    ahead = one(BUSY, 0.06, 0.02)  # a host that is ahead of its GPU slows nobody
    assert told(judge(), [ahead] * 9) == []
    short = {SECONDS: [0.003] * RANKS, IDLE: [1.0] * RANKS, DATA_WAIT: [0.5] * RANKS, COLLECTING: [0.001] * RANKS}
    assert told(judge(), [short] * 200) == []
    assert told(judge(), [one(COMPUTE, 0.06, 0.03), WELL, WELL] * 5) == [], "not three rows in a row"
    unknown = {name: [math.nan] * RANKS for name in WELL}
    assert told(judge(), [unknown] * 9) == []
    assert told(judge(accelerator="cpu"), [one(COMPUTE, 0.04, 0.03)] * 9) == [], "ranks on CPUs share cores"


def test_a_verdict_is_told_again_when_it_is_worse_or_has_come_back() -> None:
    at, bad = judge(), {DATA_WAIT: [0.1] * RANKS}
    assert len(told(at, [bad] * 6)) == 1
    worse = told(at, [{DATA_WAIT: [0.16] * RANKS}] * 9)
    assert [v.name for v in worse] == ["data-bound"]
    assert told(at, [WELL] * 12) == [] and at.in_force == []
    assert len(told(at, [bad] * 6)) == 1
    assert told(at, [WELL] * 12) + told(at, [bad] * 6) == [], "three times at most"
    assert [round(v.severity, 2) for v in at.told.values()] == [0.16], "the worst is kept"


def test_memory_that_grows_and_an_allocator_at_its_limit() -> None:
    at = judge()
    (leak,) = told(at, [{DEVICE_MEMORY: [20.0, 20.0 + 0.05 * i, 20.0, 20.0]} for i in range(40)])
    assert (leak.name, leak.rank) == ("leaking memory", 1) and "memory_history=true" in leak.remedy
    assert "5.12 MiB a step" in leak.sentence
    levels_off = [{DEVICE_MEMORY: [20.0 + min(i, 10) / 10] * RANKS} for i in range(40)]
    assert told(judge(), levels_off) == []
    assert told(judge(), [one(RETRIES, 3.0, 0.0)] * 9) == [], "it does not grow"
    (limit,) = told(judge(), [one(RETRIES, float(i), 0.0) for i in range(9)])
    assert limit.name == "allocator at its limit" and limit.rank == 2 and "activation_checkpointing" in limit.remedy


def test_the_last_profile_of_a_run_on_a_gpu_says_what_is_exposed(tmp_path: Path) -> None:
    run = dataclasses.replace(plan(), run_dir=str(tmp_path))
    verdicts = Verdicts(run, StepLog(run))
    for step, exposed, is_cpu, expected in ((20, 2.0, False, 0.2), (9, 5.0, False, 0.2), (30, 3.0, True, None)):
        folder = profile_folder(tmp_path, step)
        folder.mkdir(parents=True)
        content = {"is_cpu": is_cpu, "step": {"exposed_communication_ms": exposed, "span_ms": 10.0}}
        (folder / "summary.json").write_text(json.dumps(content))
        verdicts.read_profile()
        assert verdicts.exposed_communication == expected


def test_the_table_at_the_end_names_the_rank_and_every_verdict_of_a_kind() -> None:
    verdicts = Verdicts(plan(), StepLog(plan()))
    verdicts.judge = judge()
    verdicts.judge.tell([
        Verdict("straggler", "slow", "look at it", rank=1, cause="host"),
        Verdict("data-bound", "waits", "more workers"),
        Verdict("dimensions", "a", "a=8", cause="a"), Verdict("dimensions", "b", "b=16", cause="b"),
    ])  # fmt: skip
    assert verdicts.lines == {
        "verdict: straggler": "rank 1 (host node-0, GPU 1): look at it",
        "verdict: data-bound": "more workers",
        "verdict: dimensions": "a=8; b=16",
    }


def test_communication_by_a_profile_and_by_the_size_of_transfers() -> None:
    assert told(judge("strategy=fsdp"), [WELL] * 9, 0.1) == []
    (found,) = told(judge("strategy=fsdp"), [WELL] * 9, 0.3)
    assert found.name == "communication-bound" and "strategy.defer_gradient_sync=true" in found.remedy
    words = ["strategy=fsdp", "cluster=dgx_h200", "devices=4"]
    (found,) = told(judge(*words, parameters=8 * 10**9), [WELL] * 9)
    assert "its transfers alone need" in found.sentence  # 8 B parameters, gathered four times in 0.1 s
    assert told(judge(*words, parameters=10**8), [WELL] * 9) == []


class Model(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.classes = nn.Linear(width, 3)


def test_sizes_that_miss_tensor_cores() -> None:
    lm = ["model=gpt2_124m", "precision=bf16", "data.sequence_length=1024"]

    def words(*more: str, module: nn.Module, **others: Any) -> list[str]:
        return [f"{s.name}={s.now}: {s.better}" for s in sizes_that_miss(module, plan(*lm, *more, **others))]

    good, bad = Model(50304, 768), Model(50257, 768)
    assert words(module=good) == []
    assert words("model.vocab_size=50257", module=bad) == ["model.vocab_size=50257: 50304"]
    assert words(module=bad) == ["embedding.num_embeddings=50257: 50304"], "no word of the config sets it"
    assert words("precision=fp32", module=bad) == words(module=bad, accelerator="cpu") == []
    assert words("data.sequence_length=1021", module=good) == ["data.sequence_length=1021: 1024"]
    assert words("model.n_heads=64", "model.n_kv_heads=64", module=good) == ["model.n_heads=64: 48"]
    assert words(module=nn.Linear(30, 3)) == [], "too small to matter"
    (size,) = sizes_that_miss(bad, plan(*lm, "model.vocab_size=50257"))
    at = judge()
    at.circumstances = dataclasses.replace(at.circumstances, sizes=(size,))
    (found,) = at.begin()
    assert found.name == "dimensions" and found.remedy == "model.vocab_size=50304"
    assert told(at, [WELL] * 9) == [] and [v.name for v in at.in_force] == ["dimensions"]


def test_the_page_has_every_rule() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert with_tables(page) == page, "run python benchmarks/report.py"
    assert len({rule.name for rule in RULES}) == len(RULES) == 11
    assert {name for _, name, _, _ in CASES.values()} <= {rule.name for rule in RULES}


def test_the_line_of_a_step_has_the_speed_of_the_run_the_time_left_and_no_rate_of_a_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer: Any = SimpleNamespace(is_global_zero=True)
    rates = {"train/tokens_per_second": 5e4, "gpu/pcie_received_bytes_per_second": 2.7e7}
    log = StepLog(plan())
    log.total = 9
    log._show(trainer, 5, {"train/loss": 2.0, "train/step_seconds": 900.0} | rates)
    assert capsys.readouterr().out == "step 5/9  loss 2  tokens/s 50,000  left 1:00:00\n"
