"""Traces are read: synthetic ones whose answer is known, and recorded ones that have to add up."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwise.errors import DataError
from shardwise_tools.traces import (
    ProfileSummary,
    draw,
    read_trace,
    summarize,
    summarize_ranks,
    table,
)
from shardwise_tools.traces.steps import step_work
from shardwise_tools.traces.summary import StepTime
from shardwise_tools.traces.trace import COMMUNICATION, COMPUTE, COPY, KINDS, DeviceEvents, Union, kind_of, short_name
from tests.harness.traces import BACKWARD, TraceWriter

GOLDEN_FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = sorted((GOLDEN_FOLDER / "traces").glob("*.json.gz"))
GEMM, ADD = "nvjet_hsh_128x256_64x4_2x1_v_bz_TNT", "void at::native::vectorized_elementwise_kernel<4, AddFunctor>(int)"
GATHER, REDUCE = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL()"


def summary_of(writer: TraceWriter, folder: Path) -> ProfileSummary:
    return summarize(read_trace(writer.write(folder / "trace.json")))


def us(step: StepTime) -> dict[str, float]:
    """What of a step is not zero, in µs."""
    values = {
        name.removesuffix("_ms"): round(value * 1000, 3) for name, value in vars(step).items() if name != "number"
    }
    return {name: value for name, value in values.items() if value}


def test_what_runs_at_the_same_time_is_counted_once(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.step(5, 0, 1000)
    for name, begin, end, stream in (
        (GEMM, 100, 300, 7), (GATHER, 200, 400, 20), (ADD, 500, 600, 7), (GEMM, 550, 650, 8), (REDUCE, 700, 710, 20),
    ):  # fmt: skip
        writer.kernel(name, begin, end, stream=stream, launched=begin - 50)
    writer.kernel("Memcpy HtoD (Pinned -> Device)", 380, 450, stream=30, launched=300, category="gpu_memcpy")
    writer.kernel("Memset (Device)", 120, 130, stream=30, launched=110, category="gpu_memset")
    summary = summary_of(writer, tmp_path)
    said = us(summary.step)
    assert said.pop("launching") + said.pop("between_kernels", 0) == said["idle"]
    assert said == {
        "span": 1000, "compute": 350, "exposed_communication": 110, "copies_alone": 50, "idle": 490,
        "communication": 210,
    }  # fmt: skip
    # Two kinds that ran at once share that time: 50 µs of addition alone, 50 of both, 50 of the product alone.
    kinds = {kind: round(ms * 1000) for kind, ms in summary.kinds_ms.items() if ms}
    assert kinds == {"matmul": 200 + 75, "elementwise": 75}
    top = summary.kernels[0]
    assert (top.name, top.kind, top.calls, round(top.total_ms, 6), round(top.mean_us, 6)) == (
        GEMM,
        "matmul",
        2,
        0.3,
        150,
    )
    assert (summary.device_name, summary.host_name, summary.is_cpu) == ("NVIDIA Made By Hand", "node7", False)


def test_sums_are_those_of_counting_every_nanosecond() -> None:
    chance = np.random.default_rng(0)
    for _ in range(20):
        begin = chance.integers(0, 900, 40)
        end = begin + chance.integers(0, 120, 40)
        kind = chance.integers(0, len(KINDS), 40)
        device = DeviceEvents(kind, begin, end, kind, kind, begin, kind)
        low, high = 100, 900
        running = np.zeros((3, 1100), dtype=int)
        groups = {KINDS.index(COMMUNICATION): 1, KINDS.index(COPY): 2}
        for b, e, k in zip(begin, end, kind, strict=True):
            running[groups.get(int(k), 0), b:e] += 1
        compute, communication, copy = running[:, low:high] > 0
        work = step_work(device, low, high)
        assert work.compute == compute.sum() and work.communication == communication.sum()
        assert work.exposed_communication == (communication & ~compute).sum()
        assert work.copies_alone == (copy & ~compute & ~communication).sum()
        assert work.idle == (~copy & ~compute & ~communication).sum()
        assert sum(work.kinds.values()) == pytest.approx(work.compute)
        union = Union.of(begin, end)
        times = np.arange(0, 1000)
        busy = (running.sum(axis=0) > 0)[:1000]
        assert (union.has(times) == busy).all()
        assert (union.overlap(times, times + 7) == [(running.sum(axis=0) > 0)[t : t + 7].sum() for t in times]).all()


def idle_trace() -> TraceWriter:
    writer = TraceWriter()
    writer.step(20, 0, 1000)
    writer.host("user_annotation", "shardwise::data", 0, 100)
    writer.host("user_annotation", "shardwise::forward", 100, 900)
    writer.kernel(GEMM, 120, 220, launched=110)  # 100 of data, 20 of launching
    writer.kernel(GEMM, 225, 325, launched=115)  # it was queued: 5 between kernels
    writer.kernel("Memcpy DtoH (Device -> Pinned)", 325, 330, launched=150, category="gpu_memcpy")
    writer.host("cuda_runtime", "cudaStreamSynchronize", 155, 335)  # the host waits while the device runs dry: 60
    writer.host("cpu_op", "aten::item", 140, 336)
    writer.host("cpu_op", "aten::_local_scalar_dense", 141, 335.5)
    writer.kernel(GEMM, 390, 490, launched=380)
    writer.kernel(GEMM, 605, 705, launched=600)  # the host was busy: 115 of launching
    writer.host("cuda_runtime", "cudaDeviceSynchronize", 720, 730)  # the device was idle: 10, and 285 of launching
    return writer


def test_idle_time_has_the_cause_of_what_the_host_did(tmp_path: Path) -> None:
    summary = summary_of(idle_trace(), tmp_path)
    assert us(summary.step) == {
        "span": 1000, "compute": 400, "copies_alone": 5, "idle": 595, "waiting_for_data": 100, "synchronising": 70,
        "launching": 420, "between_kernels": 5,
    }  # fmt: skip
    places = {(place.cause, place.place): round(place.ms * 1000) for place in summary.idle_places}
    assert places == {
        ("waiting_for_data", "the loader"): 100,
        ("synchronising", ".item() in shardwise::forward"): 60,
        ("synchronising", "cudaDeviceSynchronize in shardwise::forward"): 10,
        ("launching", "forward"): 20 + 115,
        ("launching", "between phases"): 285,
    }


def test_a_synchronisation_is_named_with_its_line(tmp_path: Path) -> None:
    writer = idle_trace()
    for name, begin, end in (
        ("train.py(3): <module>", 0, 1000), ("recipes/mine/module.py(12): training_step", 100, 700),
        ("torch/_tensor.py(40): wrapped", 130, 340), ("<built-in method item of Tensor object at 0x7f>", 135, 338),
    ):  # fmt: skip
        writer.host("python_function", name, begin, end)
    writer.host("python_function", "elsewhere.py(1): of_another_thread", 150, 337, BACKWARD)
    places = [place.place for place in summary_of(writer, tmp_path).idle_places if place.cause == "synchronising"]
    assert places[0] == ".item() in recipes/mine/module.py(12): training_step"


def test_a_thread_that_launches_nothing_holds_nobody_up(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.step(0, 0, 500)
    writer.kernel(GEMM, 100, 200, launched=90)
    writer.host("cuda_runtime", "cudaEventSynchronize", 50, 400, 999)  # a thread that copies a checkpoint
    writer.kernel(GEMM, 300, 500, launched=290)
    assert us(summary_of(writer, tmp_path).step) == {"span": 500, "compute": 300, "idle": 200, "launching": 200}


def test_a_kernel_that_was_launched_long_before_it_began_had_to_wait_on_the_device(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.step(0, 0, 50)
    writer.kernel(GEMM, 300, 400, launched=10)  # what ran before it is not in the trace
    said = us(summary_of(writer, tmp_path).step)
    assert said == {"span": 400, "compute": 100, "idle": 300, "launching": 30, "between_kernels": 270}


def test_a_steps_work_is_what_was_launched_in_it(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.kernel(ADD, 0, 40)  # of the step before: the trace has no launch
    writer.step(10, 10, 50)
    writer.step(11, 50, 90)
    writer.kernel(GEMM, 40, 100, launched=20)
    writer.kernel(GEMM, 100, 160, launched=45)  # runs after the host has ended its step
    writer.kernel(GEMM, 165, 300, launched=60)
    first, second = summary_of(writer, tmp_path).steps
    assert us(first) == {"span": 120, "compute": 120} and first.number == 10
    assert us(second) == {"span": 140, "compute": 135, "idle": 5, "between_kernels": 5}


def test_calls_that_are_not_in_every_step_are_no_whole_number(tmp_path: Path) -> None:
    writer = TraceWriter()
    for number in range(3):
        writer.step(number, 100 * number, 100 * number + 100)
        writer.kernel(GEMM, 100 * number + 10, 100 * number + 20, launched=100 * number + 5)
    writer.kernel(ADD, 230, 260, launched=225)
    writer.host("user_annotation", "shardwise::validation", 210, 290)
    text = table(summary_of(writer, tmp_path))
    rows = [line.split() for line in text.splitlines()]
    assert ["elementwise", "0.01", "0.3", "30.0"] in [row[:4] for row in rows]
    assert ["matmul", "0.01", "1", "10.0"] in [row[:4] for row in rows]
    assert [row[-1] for row in rows if row[:1] == ["validation"]] == ["0.3"]


def test_kernels_of_a_cuda_graph_were_launched_together(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.step(0, 0, 100)
    writer.graph([(GEMM, 20, 50), (ADD, 53, 60), (GEMM, 61, 100)], launched=10)
    assert us(summary_of(writer, tmp_path).step) == {
        "span": 100, "compute": 76, "idle": 24, "launching": 20, "between_kernels": 4,
    }  # fmt: skip


def test_on_cpu_operators_stand_for_kernels(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.step(0, 0, 1000)
    writer.host("user_annotation", "shardwise::data", 0, 100)
    writer.host("cpu_op", "aten::randn", 10, 90)  # makes a batch: no work of the step
    for name, begin, end, thread in (
        ("autograd::engine::evaluate_function: AddmmBackward0", 100, 400, 100),  # its own time is the host's: 70
        ("aten::linear", 120, 350, 100),
        ("aten::addmm", 150, 300, 100), ("aten::view", 160, 170, 100),  # a view computes nothing: 10
        ("mkl::something_new", 310, 340, 100),  # has the kind of its caller
        ("aten::copy_", 700, 800, 200),  # within a collective
        ("my_op", 850, 900, 100),
    ):  # fmt: skip
        writer.host("cpu_op", name, begin, end, thread)
    writer.host("user_annotation", "gloo:all_reduce", 340, 840, 200)  # exposed but for its first 10
    summary = summary_of(writer, tmp_path)
    assert us(summary.step) == {
        "span": 1000, "compute": 220 + 50, "communication": 500, "exposed_communication": 490, "idle": 240,
        "waiting_for_data": 100, "launching": 140,
    }  # fmt: skip
    kinds = {kind: round(ms * 1000) for kind, ms in summary.kinds_ms.items() if ms}
    assert kinds == {"matmul": 220, "other": 50}
    kernels = {kernel.name: (kernel.calls, round(kernel.total_ms * 1000)) for kernel in summary.kernels}
    assert (
        kernels["aten::addmm"] == (1, 140) and kernels["aten::linear"] == (1, 50) and kernels["aten::copy_"] == (1, 100)
    )
    assert summary.is_cpu and "no GPU in this trace" in summary.notes[0]


@pytest.mark.parametrize(
    "hook", ["PostBackwardFunctionModule", "PreBackwardFunctionForModule", "RegisterPostBackwardFunction"]
)
def test_the_python_of_an_engines_hook_is_no_compute(tmp_path: Path, hook: str) -> None:
    """DeepSpeed and FSDP2 hang their hooks on autograd Functions: only the operators that these call compute."""
    writer = TraceWriter()
    writer.step(0, 0, 100)
    for name, begin, end in ((hook, 0, 60), ("aten::mm", 10, 20), ("aten::unflatten", 70, 80)):
        writer.host("cpu_op", name, begin, end)
    summary = summary_of(writer, tmp_path)
    assert us(summary.step) == {"span": 100, "compute": 10, "idle": 90, "launching": 90}
    assert summary.kinds_ms["matmul"] == pytest.approx(0.01) and summary.other_names == ()


def test_phases_come_from_annotations_and_from_collectives(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.step(0, 0, 1000)
    for name, begin, end, thread in (
        ("shardwise::forward", 0, 300, 100), ("FSDP::all_gather (blocks.0)", 10, 20, 100),
        ("shardwise::backward", 300, 600, 100), ("FSDP::post_backward_reduce (blocks.0)", 400, 450, BACKWARD),
        ("Optimizer.step#AdamW.step", 600, 700, 100), ("shardwise::save", 700, 900, 100),
        ("shardwise::validation", 900, 990, 100),
    ):  # fmt: skip
        writer.host("user_annotation", name, begin, end, thread)
    writer.kernel(GATHER, 20, 60, stream=20, launched=12)
    writer.kernel("split_with_sizes_copy_out", 60, 65, stream=20, launched=15)
    writer.kernel(GEMM, 70, 270, launched=50)
    writer.kernel(GEMM, 310, 500, launched=305, thread=BACKWARD)
    writer.kernel("chunk_cat_cuda_kernel", 500, 510, launched=410, thread=BACKWARD)
    writer.kernel(REDUCE, 510, 560, stream=20, launched=420, thread=BACKWARD)
    writer.kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 650, 690, launched=640)
    phases = {
        phase.name: (round(phase.host_ms * 1e3), round(phase.device_ms * 1e3))
        for phase in summary_of(writer, tmp_path).phases
    }
    assert phases == {
        "forward": (300, 200), "backward": (300, 190), "gather": (10, 45), "reduce": (50, 60), "optimizer": (100, 40),
        "save": (200, 0), "validation": (90, 0),
    }  # fmt: skip


def test_without_annotations_autograd_tells_forward_from_backward(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.step(0, 0, 400)
    writer.kernel(GEMM, 20, 100, launched=10)
    writer.host("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 110, 200, BACKWARD)
    writer.kernel(GEMM, 120, 190, launched=115, thread=BACKWARD)
    phases = {phase.name: round(phase.device_ms * 1e3) for phase in summary_of(writer, tmp_path).phases}
    assert phases == {"forward": 80, "backward": 70}


def test_a_trace_without_steps_counts_as_one_and_says_so(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.kernel(GEMM, 20, 100, launched=10)
    writer.kernel(GEMM, 200, 220, device=1)
    summary = summary_of(writer, tmp_path)
    assert us(summary.step) == {"span": 90, "compute": 80, "idle": 10, "launching": 10}
    assert any("names no steps" in note for note in summary.notes)
    assert any("on other GPUs" in note for note in summary.notes)


ROWS = (GOLDEN_FOLDER / "kernel_names.tsv").read_text().splitlines()
KERNELS = {
    kind: [name for row in ROWS for its, name in [row.split("\t")] if its == kind] for kind in (*COMPUTE, COMMUNICATION)
}


@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernels_name_tells_its_kind(kind: str) -> None:
    assert {name: kind_of(name) for name in KERNELS[kind]} == dict.fromkeys(KERNELS[kind], kind)


def test_a_name_is_shortened_to_what_it_is() -> None:
    assert short_name("void (anonymous namespace)::softmax_warp_forward<float>(float*)") == "softmax_warp_forward"
    assert short_name(ADD) == "at::native::vectorized_elementwise_kernel [AddFunctor]"
    assert short_name(GATHER) == "ncclDevKernel_AllGather_RING_LL" and len(short_name("x" * 300)) == 60


def test_kernels_without_a_kind_are_named(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.step(0, 0, 100)
    writer.kernel("my_own_kernel", 0, 10, launched=0)
    writer.kernel(GEMM, 10, 100, launched=1)
    summary = summary_of(writer, tmp_path)
    assert summary.other_share == pytest.approx(0.1) and summary.other_names == ("my_own_kernel",)
    assert "my_own_kernel" in table(summary).splitlines()[-1]


def rank(number: int, **ms: float) -> ProfileSummary:
    zero = dict.fromkeys((name for name in StepTime.__dataclass_fields__ if name != "number"), 0.0)
    values = zero | {f"{name}_ms": value for name, value in ms.items()}
    step = StepTime(number=0, **values)
    return ProfileSummary(number, False, "", f"node{number}", (step,), step, {}, (), 0.0, (), (), (), ())


def test_the_slow_rank_has_the_shortest_collectives() -> None:
    usual = {"span": 100.0, "compute": 60.0, "communication": 40.0, "exposed_communication": 30.0}
    ranks = [rank(number, **usual) for number in range(4)]
    assert summarize_ranks(ranks).slow_rank is None and summarize_ranks(ranks[:1]).slow_rank is None
    short = {"communication": 20.0, "exposed_communication": 10.0}
    late = rank(2, **usual | short | {"idle": 20.0, "waiting_for_data": 18.0, "launching": 2.0})
    said = summarize_ranks([ranks[0], ranks[1], late, ranks[3]])
    assert (said.slow_rank, said.reason, said.idle_cause) == (2, "late", "waiting_for_data")
    assert said.others_wait_ms == 20 and "rank 2 is slow" in said.text and "waiting for data" in said.text
    said = summarize_ranks([ranks[0], rank(1, **usual | short | {"compute": 80.0}), *ranks[2:]])
    assert (said.slow_rank, said.reason, said.idle_cause) == (1, "slow_gpu", None)
    assert json.loads(said.to_json())["ranks"][1]["compute_ms"] == 80
    less = {"communication": 5.0, "exposed_communication": 0.0}
    both = rank(2, **usual | less | {"compute": 68.0, "idle": 27.0, "launching": 27.0})
    said = summarize_ranks([*ranks[:2], both])  # it computes longer, and above all it is late
    assert (said.slow_rank, said.reason, said.idle_cause) == (2, "late", "launching")
    hidden = rank(0, **usual | {"communication": 20.0, "exposed_communication": 28.0, "compute": 61.0, "idle": 11.0})
    said = summarize_ranks([hidden, *ranks[1:]])  # the others compute while they wait
    assert said.slow_rank is None and said.others_wait_ms == 2 and "alike" in said.text
    with pytest.raises(ValueError, match="each rank once"):
        summarize_ranks([ranks[0], ranks[0]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b'{"traceEvents": [{"ph": "X", "na', "cut short, or no JSON"),
        (gzip.compress(b'{"traceEvents": []}' * 99, mtime=0)[:60], "cut short"),
        (b"\x1f\x8b\x08\x00garbage!", "damaged|cut short"),
        (b"\x89PNG\r\n", "cut short, or no JSON"),
        (b'{"a": 1}', "without a list traceEvents"),
        (b'{"traceEvents": []}', "nothing was recorded"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', "an event is malformed"),
        (b'{"traceEvents": [7]}', "an event is malformed"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::view", "ts": 1}]}',
            "no operator that computes",
        ),
    ],
)
def test_what_is_no_trace_gets_one_message(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "trace.json.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_that_is_no_utf_8_hides_nothing(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.step(0, 0, 100)
    writer.kernel("gemm_NAME", 10, 90, launched=0)
    path = writer.write(tmp_path / "trace.json")
    path.write_bytes(path.read_bytes().replace(b"NAME", b"\xff\xfe"))
    assert summarize(read_trace(path)).kernels[0].kind == "matmul"


def test_names_are_drawn_whatever_is_in_them(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.step(0, 0, 100)
    writer.kernel("hip $\\frac$", 10, 90, launched=0)
    trace = read_trace(writer.write(tmp_path / "trace.json"))
    draw(summarize(trace), trace, tmp_path / "profile.png")


def test_there_are_golden_traces() -> None:
    assert GOLDEN


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_a_recorded_trace_adds_up_and_is_drawn(path: Path, tmp_path: Path) -> None:
    """Whatever is put into tests/golden/traces is tried: GPU traces too, as soon as they are there."""
    assert path.stat().st_size < 1_000_000
    trace = read_trace(path)
    summary = summarize(trace)
    for step in summary.steps:
        parts = step.compute_ms + step.exposed_communication_ms + step.copies_alone_ms + step.idle_ms
        assert parts == pytest.approx(step.span_ms, rel=0.01) and step.span_ms > 0
        causes = step.waiting_for_data_ms + step.synchronising_ms + step.launching_ms + step.between_kernels_ms
        assert causes == pytest.approx(step.idle_ms, rel=0.01, abs=1e-6)
    assert sum(summary.kinds_ms.values()) == pytest.approx(summary.step.compute_ms, rel=0.01)
    assert summary.other_share < 0.05, f"these kernels have no kind: {summary.other_names}"
    names = {phase.name for phase in summary.phases}
    assert {"data", "forward", "backward", "optimizer"} <= names
    if "fsdp" in path.name or "zero3" in path.name:
        assert ({"reduce"} if path.name.startswith("cuda-run") else {"gather", "reduce"}) <= names  # those had one GPU
    assert "starved" not in path.name or summary.share("waiting_for_data") > 0.2
    assert 0 < len(summary.kernels) <= 10 and ProfileSummary.from_json(summary.to_json()) == summary
    assert all(len(line) <= 110 for line in table(replace(summary, notes=())).splitlines())
    draw(summary, trace, tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes()[:4] == b"\x89PNG"


def test_ranks_of_a_recorded_run_are_compared() -> None:
    summaries = [summarize(read_trace(path)) for path in GOLDEN if path.name.startswith("cpu-fsdp")]
    assert [summary.rank for summary in summaries] == [0, 1]
    said = summarize_ranks(summaries)  # rank 1's loader slept
    assert (said.slow_rank, said.reason, said.idle_cause) == (1, "late", "waiting_for_data")


def test_the_reader_imports_no_torch() -> None:
    code = "import sys, shardwise_tools.traces; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root / "src", capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
