"""The reader of traces beside HolisticTraceAnalysis, over the window that it takes, and the reader's speed.

    python -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis==0.5.0
    python benchmarks/trace_reader.py --hta /tmp/hta/bin/python --traces FOLDER

FOLDER has traces of torch.profiler from GPUs, at least two steps each: of tests/golden/traces cuda-none and
cuda-tiny-kernels. Without it, traces are made: the kernels,
copies, collectives and launches of a transformer under FSDP, of random lengths, in the same format.

HTA leaves out what was launched in or after the last profiled step: the figures of the reader are of the same events.
By default HTA also shortens every event to whole microseconds. Every trace is compared with HTA as it is, and with that
switched off (HTA_DISABLE_NS_ROUNDING=1), where both must agree.
Writes benchmarks/results/trace-reader-made.json, or trace-reader-recorded.json for traces of yours.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness.results import command_line, measured_on, write  # noqa: E402
from shardwise_tools.traces import read_trace, summarize  # noqa: E402
from shardwise_tools.traces.steps import step_work  # noqa: E402
from shardwise_tools.traces.trace import Trace  # noqa: E402
from tests.harness.traces import BACKWARD, OFFSET, TraceWriter  # noqa: E402

GEMM, POINTWISE, FLASH = "nvjet_tst_128x256_64x4_v_bz_TNN", "triton_poi_fused_mul_silu_3", "flash_fwd_kernel<traits>"
GATHER, REDUCE = "ncclDevKernel_AllGather_RING_LL(Args)", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(Args)"
FIGURES = ("kernel_time", "idle_time", "compute_time", "non_compute_time", "overlap_percent")
HTA_PROGRAM = """
import json, sys, warnings; warnings.filterwarnings("ignore")
import logging; logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
t = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=sys.argv[2])
row = t.get_temporal_breakdown(visualize=False).iloc[0]
found = {name: float(row[name + "(us)"]) for name in ("kernel_time", "idle_time", "compute_time", "non_compute_time")}
try: found["overlap_percent"] = float(t.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"])
except Exception: pass
print("FOUND " + json.dumps(found))
"""


def made(seed: int, layers: int, scale: float, steps: int = 3) -> TraceWriter:
    """A transformer's steps under FSDP2. `scale` is the mean length of a kernel in µs."""
    chance, writer = random.Random(seed), TraceWriter()
    host, free = 10.0, {7: 0.0, 20: 0.0, 24: 0.0, 30: 0.0}  # when host and streams are free, µs

    def launch(name: str, stream: int, mean: float, thread: int = 100, category: str = "kernel") -> None:
        nonlocal host
        host += chance.uniform(2, 9)
        begin = round(max(free[stream] + chance.uniform(0.3, 1.5), host + chance.uniform(3, 6)), 3)
        free[stream] = round(begin + mean * chance.lognormvariate(0, 0.6), 3)
        operator = "aten::mm" if name == GEMM else "aten::mul"
        writer.host("cpu_op", operator, host - 1.5, host + 1.5, thread)
        writer.kernel(
            name, begin, free[stream], stream=stream, launched=round(host, 3), thread=thread, category=category
        )

    for step in range(20, 20 + steps):
        first = host
        host += chance.uniform(20, 400)
        writer.host("user_annotation", "shardwise::data", first + 1, host)
        launch("Memcpy HtoD (Pinned -> Device)", 30, 3 * scale, category="gpu_memcpy")
        for phase, thread, factor in (("forward", 100, 1.0), ("backward", BACKWARD, 2.0)):
            began = host
            for layer in range(layers):
                at = host + 1
                launch(GATHER, 20, 6 * scale, thread)
                writer.host("user_annotation", f"FSDP::all_gather (layers.{layer})", at, host + 1, thread)
                free[7] = max(free[7], free[20]) if layer == 0 else free[7]
                for name in (GEMM, POINTWISE, FLASH, GEMM, "triton_red_fused_mean_pow_rsqrt_2", GEMM, POINTWISE, GEMM):
                    launch(name, 7, factor * scale * (3 if name in (GEMM, FLASH) else 0.5), thread)
                if phase == "backward":
                    at = host + 1
                    launch(REDUCE, 24, 8 * scale, thread)
                    writer.host("user_annotation", f"FSDP::post_backward_reduce (layers.{layer})", at, host + 1, thread)
            writer.host("user_annotation", f"shardwise::{phase}", began, host + 2)
        free[7] = max(free[7], free[24])
        began = host
        for _ in range(6):
            launch("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 7, 4 * scale)
        launch("Memcpy DtoH (Device -> Pinned)", 7, 1, category="gpu_memcpy")
        done = max(host + 2, free[7] + 3) if step % 2 else host + 2
        writer.host("cuda_runtime", "cudaStreamSynchronize", host + 1.5, done)
        host = done
        writer.host("user_annotation", "shardwise::optimizer", began, host)
        writer.step(step, first, host + 1)
        host += 2
    return writer


def compared(path: Path, python: str) -> dict[str, Any]:
    """Both tools' figures of a trace, in µs, and how far they are apart."""
    exact, rounding = of_hta(path, python, rounds=False), of_hta(path, python, rounds=True)
    ours = figures(read_trace(path))
    return {
        "kernels": ours.pop("kernels"), "ours": ours, "hta": exact, "hta_rounding": rounding,
        "apart_percent": apart(ours, exact), "apart_percent_rounding": apart(ours, rounding),
    }  # fmt: skip


def of_hta(path: Path, python: str, *, rounds: bool) -> dict[str, float]:
    line = [python, "-c", HTA_PROGRAM, str(path.resolve()), str(path.resolve().parent)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["HTA_DISABLE_NS_ROUNDING"] = "0" if rounds else "1"
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if not found:
        sys.exit(f"HTA could not read {path}:\n{done.stderr[-2000:]}")
    return dict(json.loads(found[0].removeprefix("FOUND ")))


def figures(trace: Trace) -> dict[str, float]:
    """Over HTA's window: from the first to the last event of the device that was launched before the last step."""
    device = trace.device
    if len(trace.steps) > 1:
        device = device.where((device.launched < trace.steps[-1].begin) & (device.thread >= 0))
    begin, end = int(device.begin.min()), int(device.end.max())
    work = step_work(device, begin, end)
    hidden = 1 - work.exposed_communication / work.communication if work.communication else 0.0
    values = {
        "kernel_time": end - begin, "idle_time": work.idle, "compute_time": work.compute,
        "non_compute_time": work.exposed_communication + work.copies_alone,
    }  # fmt: skip
    return {name: ns / 1e3 for name, ns in values.items()} | {
        "overlap_percent": 100 * hidden, "kernels": float(len(device)),
    }  # fmt: skip


def apart(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """The difference of each time in per cent of HTA's window; of the overlap in points."""
    whole = theirs["kernel_time"]
    result = {name: round(100 * abs(ours[name] - theirs[name]) / whole, 4) for name in FIGURES[:4]}
    if math.isfinite(theirs.get("overlap_percent", math.nan)):  # without communication it is not
        result["overlap_percent"] = round(abs(ours["overlap_percent"] - theirs["overlap_percent"]), 4)
    return result


def with_a_busy_host(writer: TraceWriter) -> TraceWriter:
    """As many events a kernel as recorded traces have: nested operators, and the arrows from launch to kernel."""
    for event in [event for event in writer.events if event["cat"] == "cuda_runtime"]:
        begin, thread = event["ts"] - OFFSET, event["tid"]
        for number, name in enumerate(
            ("autograd::engine::evaluate_function: MmBackward0", "MmBackward0", "aten::view")
        ):
            ids = {"External id": len(writer.events), "Record function id": 0, "Sequence number": 7, "Ev Idx": number}
            writer.host("cpu_op", name, begin - 2 + number / 10, begin + 1.5, thread, **ids)
        arrow = {"id": len(writer.events), "pid": 1, "tid": thread, "ts": event["ts"], "cat": "ac2g", "name": "ac2g"}
        writer.events += [arrow | {"ph": "s"}, arrow | {"ph": "f", "bp": "e"}]
    return writer


def speed(folder: Path, sizes: Iterable[int]) -> list[dict[str, Any]]:
    """CPU seconds to read and to summarize a compressed trace, per 10,000 kernels: one thread does it all."""
    rows = []
    for layers in sizes:
        path = with_a_busy_host(made(1, layers, 20)).write(folder / f"speed-{layers}.json.gz")
        began = time.process_time()
        trace = read_trace(path)
        read = time.process_time()
        summarize(trace)
        ended = time.process_time()
        kernels = len(trace.device)
        rows.append(
            {"kernels": kernels, "events": len(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]),
             "megabytes": round(path.stat().st_size / 1e6, 2), "read_s": round(read - began, 3),
             "summarize_s": round(ended - read, 3), "s_per_10000_kernels": round((ended - began) / kernels * 1e4, 3)}
        )  # fmt: skip
    return rows


def adds_up(path: Path) -> float:
    """How far a step's parts are from its span at most, in per cent."""
    steps = summarize(read_trace(path)).steps
    sums = [s.compute_ms + s.exposed_communication_ms + s.copies_alone_ms + s.idle_ms for s in steps]
    return float(max(abs(a - s.span_ms) / s.span_ms * 100 for a, s in zip(sums, steps, strict=True)))


def main() -> None:
    parser = command_line(__doc__, accelerator=None)
    parser.add_argument("--hta", default="", help="a Python that has HolisticTraceAnalysis; without it only the speed")
    parser.add_argument("--traces", type=Path, help="a folder of traces from GPUs; they are not kept")
    options = parser.parse_args()
    environment, _ = measured_on("cpu", options.commit)
    result: dict[str, Any] = {"environment": environment, "traces": "made" if not options.traces else "recorded"}
    with tempfile.TemporaryDirectory() as made_here:
        folder = Path(made_here)
        result["speed"] = speed(folder, (30, 150))
        if options.hta and shutil.which(options.hta):
            paths = sorted(options.traces.glob("*.json*")) if options.traces else made_files(folder)
            result["compared"] = {
                path.name: compared(path, options.hta) | {"adds_up_percent": adds_up(path)} for path in paths
            }
    write(options.out / f"trace-reader-{result['traces']}.json", result)
    print(json.dumps(result["speed"], indent=1))
    for name, row in result.get("compared", {}).items():
        print(name, row["kernels"], "apart", row["apart_percent"], "with its rounding", row["apart_percent_rounding"])


def made_files(folder: Path) -> list[Path]:
    """Compute-bound, communication-bound, host-bound with short kernels, and one with many layers."""
    sizes = {"long-kernels": (8, 200.0), "usual": (16, 40.0), "short-kernels": (16, 4.0), "many": (64, 15.0)}
    paths = []
    for seed, (name, (layers, scale)) in enumerate(sizes.items()):
        folder.joinpath(name).mkdir()
        paths.append(made(seed, layers, scale).write(folder / name / f"{name}.json.gz"))
    return paths


if __name__ == "__main__":
    main()
