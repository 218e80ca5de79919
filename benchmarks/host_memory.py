"""The peak memory of the host while a model is made from its seed, and while it is read from safetensors.

    python benchmarks/host_memory.py                         all GPUs: layers and vocabulary of Llama 3 70 B, six layers
    python benchmarks/host_memory.py --layers 4 --folder /data/tmp
    python benchmarks/host_memory.py --accelerator cpu --ranks 4          a model of 1.4 GB in fp32

Real ranks, up to their first step, fp32 master weights. The safetensors are written before, in bf16 and in several
files, and deleted after. A rank's peak is what it holds beyond what it held before: memory of its own, and beside it
the pages of the files that it has mapped, which the host takes back where it needs them. The peaks are added up. Writes
benchmarks/results/host-memory-<device>-x<ranks>.json after every strategy.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.data import Held, batch_of_tokens  # noqa: E402
from benchmarks.harness.device import device_of, free_memory, peaks_gib  # noqa: E402
from benchmarks.harness.limits import note, noted, on_ranks  # noqa: E402
from benchmarks.harness.trainers import on_all, resolve  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.plan import Plan  # noqa: E402
from tests.harness.host_memory import measure_setup, write_random_weights  # noqa: E402

SIZES = {
    "cuda": ["model=llama3_70b", "model.n_layers=6"],
    "cpu": ["model=llama3_70b", "model.n_layers=16", "model.dim=1024", "model.n_heads=16", "model.n_kv_heads=2",
            "model.ffn_dim=3584", "model.vocab_size=16032"],
}  # fmt: skip
CELLS = {  # the words of each row; HALF is half of the ranks
    "ddp": "strategy=ddp",
    "fsdp": "strategy=fsdp",
    "fsdp_hybrid": "strategy=fsdp_hybrid strategy.shard_size=HALF",
    "zero2": "strategy=zero2",
    "zero3": "strategy=zero3",
}
ALWAYS = ["precision=bf16", "optimizer.lr=1e-5", "schedule=none", "checkpoint=none", "module.sample_tokens=0",
          "validate_every_n_steps=1000000", "max_steps=1", "micro_batch_size=1", "data.sequence_length=16"]  # fmt: skip


def plan_of(words: list[str], ranks: int, accelerator: str, folder: Path, name: str) -> Plan:
    half = str(max(2, ranks // 2))
    return resolve(on_all([*ALWAYS, *(w.replace("HALF", half) for w in words)], ranks), accelerator, folder, name)


def measure(folder: Path, ranks: int, accelerator: str, cells: list[str], size: list[str]) -> None:
    """In each rank. Rank 0 writes a row for each strategy."""
    device = device_of(accelerator)
    for name in cells:
        words = [*size, *CELLS[name].split(), f"init_from={folder / 'weights'}"]
        plan = plan_of(words, ranks, accelerator, folder, name)
        if not dist.is_initialized():
            init_process_group(plan)
            dist.all_reduce(torch.ones(1, device=device))  # what CUDA and NCCL take is there before
        free_memory(device)
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            found = measure_setup(plan, Held(batch_of_tokens(plan), 1))
        seconds = time.perf_counter() - began
        of_ranks: list[Any] = [None] * ranks
        dist.all_gather_object(of_ranks, found)
        peaks = {how: [one[how] for one in of_ranks] for how in ("made", "read")}
        note(
            folder, {"strategy": name, "whole_bytes": found["whole"], "seconds": seconds, **peaks, **peaks_gib(device)}
        )


def show(row: dict[str, Any]) -> str:
    own = {how: [rank["own"] / 1e9 for rank in row[how]] for how in ("made", "read")}
    peaks = ", ".join(f"{how} {sum(found):.2f} GB (a rank {max(found):.2f})" for how, found in own.items())
    mapped = max(rank["mapped"] for rank in row["read"]) / 1e9
    whole = f"the model {row['whole_bytes'] / 1e9:.2f} GB ({row['seconds']:.0f} s)"
    return f"{row['strategy']}: {peaks}, files {mapped:.2f} GB a rank; {whole}"


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--layers", type=int, help="of the model")
    parser.add_argument("--strategies", default=",".join(CELLS))
    parser.add_argument("--folder", type=Path, help="where the safetensors are written; default: a temporary one")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for all strategies together")
    arguments = parser.parse_args()
    ranks = arguments.ranks or torch.cuda.device_count()
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    size = [*SIZES[arguments.accelerator], *([f"model.n_layers={arguments.layers}"] if arguments.layers else [])]
    cells = arguments.strategies.split(",")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        began = time.perf_counter()
        plan = plan_of([*size, "strategy=fsdp"], ranks, arguments.accelerator, folder, "written")
        written = write_random_weights(plan, folder / "weights", 5e9 if arguments.accelerator == "cuda" else 200e6)
        print(f"{written / 1e9:.2f} GB of safetensors in {time.perf_counter() - began:.0f} s", flush=True)
        error = ""
        try:
            options = (folder, ranks, arguments.accelerator, cells, size)
            on_ranks(ranks, measure, *options, timeout_seconds=arguments.timeout)
        except AssertionError as failed:
            error = str(failed)[-3000:]
            print(error, flush=True)
        rows = noted(folder)
    for row in rows:
        print(show(row), flush=True)
    result = {"command": results.command(), "ranks": ranks, "environment": environment, "rows": rows, "error": error,
              "settings": {"model": size, "file_bytes": written}}  # fmt: skip
    results.write(arguments.out / f"host-memory-{device}-x{ranks}.json", result)


if __name__ == "__main__":
    main()
