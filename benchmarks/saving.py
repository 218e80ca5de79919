"""How long a save holds up the training, how much it slows down the steps after it, how fast it is written and loaded.

    python benchmarks/saving.py                                    all GPUs: llama3_1b under fsdp and zero2, llama3_8b
    python benchmarks/saving.py --cells "llama3_8b fsdp" --ranks 4
    python benchmarks/saving.py --accelerator cpu --ranks 2 --tiny    tries it out

Random tokens in memory, accumulation 1. A run saves three times. Before each save it makes quiet steps, with which the
steps after it are compared, since the speed of a host that others use varies. The first step after a save takes longer
by the time for which the save held up the training. The steps after that one are timed as long as the save is being
written. Then the last checkpoint is loaded: on all ranks, on half of them, or under another strategy. Writes
benchmarks/results/saving-<device>-x<ranks>.json after every cell.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.data import NO_CORPUS, Held, batch_of_tokens  # noqa: E402
from benchmarks.harness.device import device_of, wait_for  # noqa: E402
from benchmarks.harness.limits import on_ranks  # noqa: E402
from benchmarks.harness.trainers import TINY_LANGUAGE_MODEL, on_all, resolve  # noqa: E402
from shardwise.callbacks.saving import Saving  # noqa: E402
from shardwise.checkpoint.writer import Outcome  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.plan import Plan  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from shardwise.run_dir.checkpoints import list_checkpoints  # noqa: E402
from shardwise.trainer import build_module, build_trainer  # noqa: E402

ONE = ["model=llama3_1b", "micro_batch_size=2", "data.sequence_length=2048"]
EIGHT = ["model=llama3_8b", "micro_batch_size=1", "data.sequence_length=8192", "activation_checkpointing=full"]
CELLS = {  # strategy, further words, (what it is loaded under, on which part of the ranks)
    "llama3_1b fsdp": ("fsdp", ONE, ("fsdp", 1)),
    "llama3_1b zero2, then fsdp": ("zero2", ONE, ("fsdp", 1)),
    "llama3_8b fsdp": ("fsdp", EIGHT, ("fsdp", 1)),
    "llama3_8b fsdp, then half the ranks": ("fsdp", EIGHT, ("fsdp", 2)),
}  # fmt: skip
WARM_UP, QUIET, SAVES = 4, 8, 3
BEHIND = 12  # steps after a save, at most, that are timed while it is written
STRIDE = BEHIND + 1 + QUIET  # from one save to the next: it is waited for in between
STEPS = WARM_UP + QUIET + (SAVES - 1) * STRIDE + BEHIND


class Watch(Callback):
    """Saves at its steps, after every other callback. Does not wait for the device between the steps that it times."""

    ends_step = True  # the step is recorded before it is saved, as in a run's own saving

    def __init__(self, plan: Plan, device: torch.device, one_at_a_time: bool) -> None:
        self.saving, self.device, self.run_dir = Saving(plan), device, plan.run_dir
        self.one_at_a_time = one_at_a_time
        self.ends: dict[int, Any] = {}  # when a step was over, on the device
        self.saved_after: list[int] = []
        self.host_seconds: list[float] = []
        self.written: list[Outcome] = []
        self.busy: set[int] = set()  # steps after which a save was still being written

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step = trainer.global_step
        self.ends[step] = self._now()
        if self.saving.writer is not None and self.saving.writer.busy:
            self.busy.add(step)
        since, place = divmod(step - WARM_UP - QUIET, STRIDE)
        if place == BEHIND and 0 <= since < SAVES - 1:
            self._wait_for_last()
            wait_for(self.device)
            self.ends[step] = self._now()
        if place == 0 and 0 <= since < SAVES:
            began = time.perf_counter()
            self.saving.save_step(trainer)
            self.host_seconds.append(time.perf_counter() - began)
            self.saved_after.append(step)

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        self._wait_for_last(keep=True)
        wait_for(self.device)

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait_for_last(self, keep: bool = False) -> None:
        assert self.saving.writer is not None
        while self.saving.writer.busy:  # to wait for it would hurry it
            time.sleep(0.01)
        outcome = self.saving.writer.wait()
        assert outcome is not None and outcome.error is None, outcome
        self.written.append(outcome)
        dist.barrier()
        if self.one_at_a_time and not keep and dist.get_rank() == 0:
            for path in list_checkpoints(self.run_dir):
                shutil.rmtree(path)
        dist.barrier()

    def found(self) -> dict[str, Any]:
        seconds = {step: self._between(step - 1, step) for step in self.ends if step - 1 in self.ends}
        quiet = [
            mean(seconds[step] for step in range(after - QUIET + 1, after + 1) if step in seconds)
            for after in self.saved_after
        ]
        behind = [
            [seconds[step] for step in range(after + 2, after + BEHIND) if step in self.busy]
            for after in self.saved_after
        ]
        return {
            "step_seconds": mean(quiet),
            "quiet_seconds": quiet,
            "held_seconds": [
                max(0.0, seconds[after + 1] - before) for after, before in zip(self.saved_after, quiet, strict=True)
            ],
            "held_host_seconds": self.host_seconds,
            "behind_seconds": [mean(steps) if steps else None for steps in behind],
            "behind_steps": [len(steps) for steps in behind],
            "steps": list(seconds.values()),
            "write_seconds": [one.seconds for one in self.written],
            "bytes": self.written[-1].bytes,
            "checkpoint": str(self.written[-1].path),
        }

    def _between(self, first: int, second: int) -> float:
        if self.device.type == "cpu":
            return float(self.ends[second] - self.ends[first])
        return float(self.ends[first].elapsed_time(self.ends[second]) / 1e3)


def plan_of(words: list[str], strategy: str, ranks: int, accelerator: str, folder: Path, name: str) -> Plan:
    argv = [
        "schedule=none", "optimizer.lr=1e-5", "module.sample_tokens=0", "data._target_=benchmarks.harness.data.Held",
        *NO_CORPUS, "precision=bf16", "checkpoint=async", "checkpoint.monitor=null",
        "checkpoint.save_every_n_steps=null", "checkpoint.save_at_end=false", "validate_every_n_steps=1000000",
        f"strategy={strategy}", *words, f"max_steps={STEPS}",
    ]  # fmt: skip
    return resolve(on_all(argv, ranks), accelerator, folder, name)


def tokens_for(plan: Plan) -> Held:
    return Held(batch_of_tokens(plan), plan.micro_batch_size)


def save(
    words: list[str], strategy: str, ranks: int, accelerator: str, folder: Path, one_at_a_time: bool
) -> dict[str, Any]:
    quiet_lightning()
    plan = plan_of(words, strategy, ranks, accelerator, folder, "saved")
    init_process_group(plan)
    watch = Watch(plan, device_of(accelerator), one_at_a_time)
    module = build_module(plan)
    trainer = build_trainer(plan, module)
    trainer.callbacks.append(watch)  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=tokens_for(plan))
    return {**watch.found(), "peak_host_gib": peak_host_gib()}


def load(words: list[str], strategy: str, ranks: int, accelerator: str, folder: Path, path: str) -> dict[str, Any]:
    quiet_lightning()
    plan = plan_of([*words, f"resume={path}"], strategy, ranks, accelerator, folder, "loaded")
    init_process_group(plan)
    module = build_module(plan)
    trainer = build_trainer(plan, module)
    seconds: list[float] = []
    strategy_ = trainer.strategy
    original = strategy_.load_checkpoint

    def timed(*args: Any, **kwargs: Any) -> Any:
        dist.barrier()
        began = time.perf_counter()
        loaded = original(*args, **kwargs)
        wait_for(device_of(accelerator))
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        return loaded

    strategy_.load_checkpoint = timed  # type: ignore[method-assign]
    trainer.fit(module, datamodule=tokens_for(plan), ckpt_path=path, weights_only=True)
    return {"load_seconds": seconds[0], "loaded_ranks": ranks, "loaded_strategy": strategy}


def peak_host_gib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--cells", default=";".join(CELLS), help="separated by semicolons")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary one")
    parser.add_argument("--one-at-a-time", action="store_true", help="for a folder that has room for one checkpoint")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a cell's saving, and for its loading")
    arguments = parser.parse_args()
    ranks = arguments.ranks or torch.cuda.device_count()
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    result: dict[str, Any] = {
        "command": results.command(),
        "ranks": ranks,
        "environment": environment,
        "cells": [],
    }
    for name in arguments.cells.split(";"):
        strategy, words, (other, part) = CELLS[name]
        words = [*words, *(TINY_LANGUAGE_MODEL if arguments.tiny else [])]
        cell: dict[str, Any] = {"name": name, "overrides": words}
        folder = Path(tempfile.mkdtemp(dir=arguments.folder))
        try:
            what = (words, strategy, ranks, arguments.accelerator, folder)
            cell |= on_ranks(ranks, save, *what, arguments.one_at_a_time, timeout_seconds=arguments.timeout)[0]
            few = ranks // part
            loading = (words, other, few, arguments.accelerator, folder, cell.pop("checkpoint"))
            cell |= on_ranks(few, load, *loading, timeout_seconds=arguments.timeout)[0]
        except Exception as error:
            cell["error"] = str(error)[-1500:].replace(f"{ROOT}/", "")
        shutil.rmtree(folder, ignore_errors=True)
        result["cells"].append(cell)
        results.write(arguments.out / f"saving-{device}-x{ranks}.json", result)
        print({key: value for key, value in cell.items() if key != "overrides"}, flush=True)


if __name__ == "__main__":
    main()
