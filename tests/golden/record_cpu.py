"""Records the CPU's golden traces anew: two ranks over gloo, FSDP2 and DDP, three small blocks; and a run under zero3.

    python tests/golden/record_cpu.py

Rank 1 of FSDP sleeps in its loader: its file is `cpu-fsdp-starved-rank1.json.gz`.
"""

from __future__ import annotations

import gzip
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shardwise.run_dir.files import profile_folder, profile_trace
from tests.harness.cells import cell_plan, fit
from tests.harness.processes import spawn
from tests.harness.traces import packed

FOLDER = Path(__file__).parent / "traces"
WIDTH, ROWS, STEPS = 256, 128, 2
SLEEPS = {("fsdp", 1): 0.15}  # s, of a rank's loader


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def record(rank: int, strategy: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    module: nn.Module = nn.Sequential(*(block() for _ in range(3)))
    if strategy == "fsdp":
        for layer in module:
            fully_shard(layer)
        fully_shard(module)
    else:
        module = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step() -> None:
        with record_function("shardwise::data"):
            time.sleep(SLEEPS.get((strategy, rank), 0.002))
            batch = torch.randn(ROWS, WIDTH)
        with record_function("shardwise::forward"):
            loss = module(batch).square().mean()
        with record_function("shardwise::backward"):
            loss.backward()
        with record_function("shardwise::optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    plan = schedule(wait=2, warmup=1, active=STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan) as profiler:
        for _ in range(3 + STEPS):
            step()
            profiler.step()
    name = f"cpu-{strategy}{'-starved' if (strategy, rank) in SLEEPS else ''}-rank{rank}.json"
    write(profiler, FOLDER / name)
    dist.destroy_process_group()


def write(profiler: profile, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.name
        profiler.export_chrome_trace(str(plain))
        path.with_suffix(".json.gz").write_bytes(packed(plain))


def run_zero3(run_dir: Path) -> None:
    """A run of the tests' small language model; DeepSpeed takes its shards and its hooks around every layer."""
    words = ["strategy=zero3", "micro_batch_size=2", "global_batch_size=4", "max_steps=3", "profile.start=3"]
    fit(cell_plan(run_dir, 2, *words))


def record_zero3() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        spawn(2, run_zero3, run_dir)
        plain = Path(folder) / "cpu-zero3-rank0.json"
        plain.write_bytes(gzip.decompress(profile_trace(profile_folder(run_dir, 3), 0).read_bytes()))
        (FOLDER / f"{plain.name}.gz").write_bytes(packed(plain))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for number, strategy in enumerate(("fsdp", "ddp")):
        torch.multiprocessing.spawn(record, (strategy, 29700 + number), nprocs=2)
    record_zero3()
