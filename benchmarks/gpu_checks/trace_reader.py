"""Checks on a GPU that the reader of traces (shardwise_tools.traces) understands what torch.profiler records there.

    python benchmarks/gpu_checks/trace_reader.py                            one GPU, a minute; with two also NCCL
    python benchmarks/gpu_checks/trace_reader.py --keep tests/golden/traces keeps the traces, each below 1 MB
    python benchmarks/gpu_checks/trace_reader.py --accelerator cpu          tries it out anywhere

Each trace is made with a fault on purpose, which the reader has to name. Prints a line for each check, ends with exit
code 1 if one fails, and writes nothing but what `--keep` asks for. benchmarks/trace_reader.py compares the kept traces
with HolisticTraceAnalysis.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function, schedule  # noqa: E402

from shardwise_tools.traces import ProfileSummary, draw, read_trace, summarize, table  # noqa: E402
from tests.harness.traces import packed  # noqa: E402

STEPS = 2
SLEEP = 0.05  # s, of a slow loader and of a slow host
Judge = Callable[[ProfileSummary], bool]


def blocks(width: int, layers: int) -> nn.Sequential:
    make = nn.TransformerEncoderLayer
    return nn.Sequential(*(make(width, width // 64, 4 * width, 0.0, batch_first=True) for _ in range(layers)))


def record(device: torch.device, fault: str, stacks: bool) -> profile:
    """A few steps of a small transformer, one of which is left out of the trace."""
    is_gpu = device.type == "cuda"
    width, layers, length = (2048, 8, 1024) if is_gpu and fault != "tiny kernels" else (64, 2, 64)
    module = blocks(width, layers).to(device)
    if fault == "fsdp":
        for layer in module:
            fully_shard(layer)
        fully_shard(module)
    optimizer, rows = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True), torch.randn(8, length, width)

    def step() -> None:
        with record_function("shardwise::data"):
            time.sleep(SLEEP if fault == "slow loader" else 0)
            batch = rows.to(device, non_blocking=True)
        with record_function("shardwise::forward"), torch.autocast(device.type, torch.bfloat16):
            loss = module(batch).float().square().mean()
        if fault == "item":
            loss.item()
            time.sleep(SLEEP)
        with record_function("shardwise::backward"):
            loss.backward()
        with record_function("shardwise::optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with profile(
        activities=activities, with_stack=stacks, schedule=schedule(wait=3, warmup=1, active=STEPS, repeat=1)
    ) as profiler:  # fmt: skip
        for _ in range(4 + STEPS):
            step()
            profiler.step()
    return profiler


def is_sound(summary: ProfileSummary) -> bool:
    """It adds up, and (almost) every kernel has a kind."""
    for s in summary.steps:
        parts = s.compute_ms + s.exposed_communication_ms + s.copies_alone_ms + s.idle_ms
        if abs(parts - s.span_ms) > 0.01 * s.span_ms:
            return False
    names = {phase.name for phase in summary.phases}
    found = {"data", "forward", "backward", "optimizer"} <= names and summary.kinds_ms["matmul"] > 0
    return found and summary.other_share < 0.05


def names_the_line(summary: ProfileSummary) -> bool:
    places = [place.place for place in summary.idle_places if place.cause == "synchronising"]
    return summary.step.synchronising_ms > 0.8 * SLEEP * 1e3 and bool(places) and ".item() in" in places[0]


FAULTS: dict[str, tuple[bool, Judge]] = {  # whether a GPU is needed, and what the reader must find besides `is_sound`
    "none": (True, lambda s: s.share("idle") < 0.5 and s.share("copies_alone") < 0.2),
    # Some of the wait is hidden: the device is busy with the step before
    "slow loader": (False, lambda s: s.step.waiting_for_data_ms > 0.5 * SLEEP * 1e3),
    "item": (True, names_the_line),
    "tiny kernels": (True, lambda s: s.share("launching") > 0.5),
}


def tried(device: torch.device, fault: str, judge: Judge, keep: Path | None, rank: int = 0) -> bool:
    stacks = fault == "item"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record(device, fault, stacks).export_chrome_trace(str(path))
        trace = read_trace(path)
        summary = summarize(trace, rank=rank)
        draw(summary, trace, Path(folder) / "trace.png")
        if keep is not None and not stacks:  # stacks name the folders of this machine
            name = f"{device.type}-{fault.replace('slow loader', 'starved').replace(' ', '-')}-rank{rank}.json.gz"
            save(packed(path), keep / name)
    ok = is_sound(summary) and judge(summary)
    if not ok:
        print(table(summary))
    print(
        f"{'ok    ' if ok else 'FAILED'} {fault}, rank {rank}: {summary.kernels_per_step:.0f} kernels a step",
        flush=True,
    )
    return ok


def save(content: bytes, path: Path) -> None:
    if len(content) > 1_000_000:
        print(f"{path.name} has {len(content) / 1e6:.1f} MB: too large to keep")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def on_rank(rank: int, ranks: int, folder: str, keep: Path | None) -> None:
    """FSDP2 over NCCL: collectives are seen, and are sorted into gathers and reductions."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29731")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)

    def judge(summary: ProfileSummary) -> bool:
        phases = {phase.name: phase.device_ms for phase in summary.phases}
        return summary.step.communication_ms > 0 and min(phases.get("gather", 0), phases.get("reduce", 0)) > 0

    if tried(device, "fsdp", judge, keep, rank):
        Path(folder, f"{rank}.ok").touch()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--keep", type=Path, help="a folder for the traces")
    options = parser.parse_args()
    device = torch.device(options.accelerator)
    wanted = {name: judge for name, (needs_gpu, judge) in FAULTS.items() if not needs_gpu or device.type == "cuda"}
    results = [tried(device, name, judge, options.keep) for name, judge in wanted.items()]
    ranks = min(torch.cuda.device_count(), 2)
    if device.type == "cuda" and ranks == 2:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(on_rank, (ranks, folder, options.keep), nprocs=ranks)
            results.append(len(list(Path(folder).glob("*.ok"))) == ranks)
    else:
        print("not run: FSDP over NCCL needs two GPUs")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
