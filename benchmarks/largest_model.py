"""The largest model that trains on this machine's GPUs, without offload and with: as many layers of Llama 3 8 B as fit.

    python benchmarks/largest_model.py --ranks 1
    python benchmarks/largest_model.py --ranks 2 --only offload      some of the rows; the others stay as recorded
    python benchmarks/largest_model.py --accelerator cpu --tiny --most 4         tries the search out anywhere

One sequence of 8,192 random tokens a GPU, full activation checkpointing, the loss in chunks. A try makes three steps
in processes of its own. The first guess comes from the bytes a parameter takes; from there the number of layers grows
until a try runs out of memory, or shrinks until one fits. Writes benchmarks/results/largest-model-<gpu>-x<ranks>.json
after every try.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.clock import StepTimer  # noqa: E402
from benchmarks.harness.data import NO_CORPUS  # noqa: E402
from benchmarks.harness.device import device_of, free_memory, peaks_gib  # noqa: E402
from benchmarks.harness.limits import note, noted, on_ranks  # noqa: E402
from benchmarks.harness.trainers import TINY_LANGUAGE_MODEL, on_all, our_trainer, resolve  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.parallel.precision import set_matmul_mode  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from shardwise.trainer import build_data, build_module  # noqa: E402

ALWAYS = [
    "model=llama3_8b", "data._target_=benchmarks.harness.data.RandomTokens", *NO_CORPUS, "data.sequence_length=8192",
    "+data.vocab_size=${model.vocab_size}", "module.sample_tokens=0", "optimizer.lr=1e-5", "gradient_clip_val=1.0",
    "checkpoint=none", "schedule=none", "log_every_n_steps=1000", "validate_every_n_steps=1000000", "max_steps=3",
    "micro_batch_size=1", "activation_checkpointing=full", "loss=chunked",
]  # fmt: skip
# Row → its words, and the bytes that a parameter takes on the GPUs and on the host, over all ranks
ROWS = {
    "AdamW, fp32 masters": ("strategy=fsdp precision=bf16", 16.0, 0.0),
    "8-bit AdamW, fp32 masters": ("strategy=fsdp precision=bf16 optimizer=adamw_8bit", 10.1, 0.0),
    "8-bit AdamW, bf16 masters": ("strategy=fsdp precision=bf16_true optimizer=adamw_8bit", 6.1, 0.0),
    "optimizer offload": ("strategy=zero3 precision=bf16 strategy.offload_optimizer=true", 4.0, 16.0),
    "optimizer and parameter offload": (
        "strategy=zero3 precision=bf16 strategy.offload_optimizer=true strategy.offload_parameters=true", 2.0, 18.0,
    ),
}  # fmt: skip
PER_LAYER, BESIDE = 218_112_000, 1_050_939_392  # parameters of a layer of Llama 3 8 B, and of embedding and head
USABLE = 0.9  # of the memory: the rest is for activations, gathered weights and what lies outside the allocator
GROWTH = 1.08


def try_out(folder: Path, words: list[str], ranks: int, accelerator: str) -> None:
    """In each rank: three steps. Rank 0 writes down what they took."""
    quiet_lightning()
    device = device_of(accelerator)
    plan = resolve(on_all(words, ranks), accelerator, folder, "try")
    init_process_group(plan)
    set_matmul_mode(plan.precision)
    free_memory(device)
    module, timer = build_module(plan), StepTimer(device, 1, 2, 1)
    parameters = sum(p.numel() for p in module.parameters())
    our_trainer(plan, module, timer).fit(module, datamodule=build_data(plan))
    peaks: list[Any] = [None] * ranks
    dist.all_gather_object(peaks, peaks_gib(device))
    note(folder, {"parameters": parameters, "seconds_per_step": timer.result()["seconds_per_step"],
                  **{key: max(peak[key] for peak in peaks) for key in peaks[0]}})  # fmt: skip


def attempt(words: list[str], layers: int, options: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, Any] = {"layers": layers, "fits": False}
        try:
            given = [*words, f"model.n_layers={layers}"]
            on_ranks(options["ranks"], try_out, folder, given, options["ranks"], options["accelerator"],
                     timeout_seconds=options["timeout"])  # fmt: skip
            found |= {"fits": True} | noted(folder)[0]
        except (AssertionError, IndexError) as error:
            found["error"] = str(error)[-2000:]
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def first_guess(on_gpu: float, on_host: float, ranks: int, accelerator: str, host_gib: float | None) -> int:
    """The layers whose state fills the usable memory of the GPUs, or of the host."""
    if accelerator == "cpu":
        return 2
    gpu = ranks * torch.cuda.get_device_properties(0).total_memory * USABLE / on_gpu
    host = (host_gib * 2**30 if host_gib else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) * 0.8
    with_offload = host / on_host if on_host else gpu
    return max(1, int((min(gpu, with_offload) - BESIDE) / PER_LAYER))


def search(words: list[str], guess: int, options: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Tries until the largest number of layers that fits stands beside one that does not, or `most` are made. After
    each try: all so far."""
    tries: list[dict[str, Any]] = []
    layers = guess
    while len(tries) < options["most"]:
        tries.append(attempt(words, layers, options))
        show(tries[-1])
        yield tries
        fits = [t["layers"] for t in tries if t["fits"]]
        fails = [t["layers"] for t in tries if not t["fits"]]
        if fits and fails:
            if min(fails) - max(fits) <= max(1, round(0.04 * max(fits))):
                break
            layers = (max(fits) + min(fails)) // 2
        else:
            layers = max(layers + 1, int(layers * GROWTH)) if fits else max(1, int(layers / GROWTH))
            if layers in fails:
                break


def show(found: dict[str, Any]) -> None:
    if found["fits"]:
        peak = f", {found['peak_reserved_gib']:.1f} GiB reserved" if "peak_reserved_gib" in found else ""
        words = f"{found['parameters'] / 1e9:.2f} B fit: {found['seconds_per_step']:.2f} s a step{peak}"
    else:
        words = "do not fit: " + ([line for line in found["error"].splitlines() if line.strip()] or ["?"])[-1][:200]
    print(f"  {found['layers']} layers {words}  ({found['seconds']} s)", flush=True)


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a small model, for trying the search out")
    parser.add_argument("--most", type=int, default=4, help="tries for each row")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for one try")
    parser.add_argument("--host-gib", type=float, help="the host's memory, where the kernel says too little (balloons)")
    parser.add_argument("--only", default="", help="a regular expression: rows to search, the others stay as recorded")
    arguments = parser.parse_args()
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    options = {key: value for key, value in vars(arguments).items()
               if key in ("ranks", "most", "timeout", "accelerator")}  # fmt: skip
    path = arguments.out / f"largest-model-{device}-x{arguments.ranks}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    commit = environment.pop("commit")
    for name, (words, on_gpu, on_host) in ROWS.items():
        if not re.search(arguments.only, name):
            continue
        print(name, flush=True)
        given = [*ALWAYS, *words.split(), *(TINY_LANGUAGE_MODEL if arguments.tiny else [])]
        guess = first_guess(on_gpu, on_host, arguments.ranks, arguments.accelerator, arguments.host_gib)
        for tries in search(given, guess, options):
            rows[name] = {"words": words, "tries": tries, "commit": commit}
            result = {"command": f"python benchmarks/largest_model.py --ranks {arguments.ranks}",
                      "ranks": arguments.ranks, "environment": environment, "settings": {"words": ALWAYS},
                      "rows": rows}  # fmt: skip
            results.write(path, result)


if __name__ == "__main__":
    main()
