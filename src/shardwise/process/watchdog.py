"""Ends a run that hangs, and reports where every rank is and which of them did not arrive. It does not import torch."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.errors import ExitCode
from shardwise.run_dir.files import LOGS, hang_report, nccl_trace, rank_log, write_whole

_TICK_SECONDS = 1.0
_PATIENCE = 5.0  # seconds in which the other ranks' watchdogs must have written their files
_STACK_SECONDS = 0.2  # in which a data worker writes its stack
_PLACES = 4  # the message names at most so many places at which ranks are
_SETTING_UP = 3  # until the first step is done, the time limit is this many times as long


class Progress:
    """Where this rank is. The training writes it, at the cost of an assignment; the watchdog's thread reads it."""

    def __init__(self) -> None:
        self.position: tuple[int, ...] = (-1,)  # (steps made, micro-batch, …): a larger tuple is further on
        self.activity = "setting up"
        self.waits = False  # whether this rank has said that it waits for another one
        self.beats = 0
        self.settled = False  # the first step is done: nothing is compiled, connected or loaded any more
        self.trained = False  # an optimizer step was made in this process
        self.over = False  # the run has ended, and the watchdog does not watch any more

    def at(self, activity: str, *position: int) -> None:
        """Report progress: what the rank does now, in words, and how far it is."""
        self.activity, self.position, self.waits = activity, position, False
        self.beats += 1

    def doing(self, activity: str, waits: bool = False) -> None:
        """Report another activity at the same position. `waits`: for what another rank sends."""
        self.at(activity, *self.position)
        self.waits = waits

    def begin_setup(self) -> None:
        """Allow more time: the next step may build, compile and connect."""
        self.settled = False

    def end_setup(self) -> None:
        """Return to the normal time limit: the first step is done."""
        self.settled = True

    def note_step(self) -> None:
        """Record that this process has made an optimizer step."""
        self.trained = True

    def end(self) -> None:
        """Stop watching: what follows, such as a tracker's last upload, may take any time."""
        self.over = True


progress = Progress()


class Watchdog:
    """Watches the progress of this rank in a thread.

    Time in which the whole process stood still (SIGSTOP, a closed laptop) does not count.
    """

    def __init__(self, run_dir: str, rank: int, ranks: int, minutes: float, report: Callable[[int, str], None]) -> None:
        self.run_dir = run_dir
        self.folder, self.rank, self.ranks = Path(run_dir) / LOGS, rank, ranks
        self.seconds, self.report = minutes * 60, report
        hang_report(run_dir, rank).unlink(missing_ok=True)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        beats, silent, tick = progress.beats, 0.0, min(_TICK_SECONDS, self.seconds / 10)
        while silent < self._limit():
            before = time.monotonic()
            time.sleep(tick)
            if progress.over:
                return
            silent += min(time.monotonic() - before, 2 * tick)
            if progress.beats != beats:
                beats, silent = progress.beats, 0.0
        try:
            self._end()
        finally:
            os._exit(ExitCode.hang)  # the main thread may be in a call that never returns

    def _limit(self) -> float:
        return self.seconds * (1 if progress.settled else _SETTING_UP)

    def _end(self) -> None:
        """Write the stacks and NCCL's record to files. The lowest rank that has done so reports for all."""
        own = {"place": progress.position, "words": progress.activity, **_main_thread()}
        with suppress(OSError), rank_log(self.run_dir, self.rank).open("a") as log:
            log.write(f"no progress for {self._limit():.0f} s, at {progress.activity}; stacks:\n")
            log.flush()
            faulthandler.dump_traceback(log)
        _dump_data_workers()
        dump = threading.Thread(target=self._dump_nccl, args=(own,), daemon=True)  # it takes locks and may hang
        dump.start()
        dump.join(_PATIENCE)
        with suppress(OSError):
            write_whole(hang_report(self.run_dir, self.rank), json.dumps(own), synced=False)
        # A device runs behind its host, so some hosts went on for a few steps: their limit is reached later.
        patience = max(_PATIENCE, self.seconds / 10)
        deadline = time.monotonic() + patience
        while len(found := self._others() | {self.rank: own}) < self.ranks and time.monotonic() < deadline:
            time.sleep(0.05)
        if min(found) == self.rank:
            self.report(ExitCode.hang, hang_message(found, self.ranks, self._limit(), self.folder))
        else:
            time.sleep(patience)  # the lowest rank needs this time for its report

    def _dump_nccl(self, own: dict[str, Any]) -> None:
        """Write the flight recorder's trace, for `torchfrtrace`, and count the collectives that this rank enqueued."""
        accelerator = sys.modules.get("shardwise.accelerator")  # an import could wait for what hangs
        if accelerator is not None and accelerator.cuda_is_initialized():
            from torch._C import _distributed_c10d as c10d

            status = json.loads(c10d._dump_nccl_trace_json(includeCollectives=False))["pg_status"]  # type: ignore[attr-defined]
            own["enqueued"] = sum(int(group["last_enqueued_collective"]) for group in status.values())
            trace = c10d._dump_nccl_trace()  # type: ignore[attr-defined]
            write_whole(nccl_trace(self.run_dir, self.rank), trace, synced=False)

    def _others(self) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in range(self.ranks):
            with suppress(OSError, ValueError):
                found[rank] = json.loads(hang_report(self.run_dir, rank).read_text())
        return found


def _dump_data_workers() -> None:
    """Have each data worker write its stack to the rank's log: as a fork it has the rank's handler of SIGQUIT."""
    for worker in multiprocessing.active_children():
        with suppress(OSError, StopIteration, ValueError):
            status = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
            caught = int(next(line for line in status if line.startswith("SigCgt")).split()[1], 16)
            if caught >> (signal.SIGQUIT - 1) & 1:  # it would end any other process
                os.kill(worker.pid or 0, signal.SIGQUIT)
                time.sleep(_STACK_SECONDS)


def _main_thread() -> dict[str, Any]:
    """The line that the main thread is in, and whether it waits there for other ranks or for the device."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return {"line": "", "waits": False}
    code = frame.f_code
    waits = progress.waits or any(f"/torch/{part}/" in code.co_filename for part in ("distributed", "autograd", "cuda"))
    line = f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"
    return {"line": line + ", waiting for its data worker" * _awaits_data_worker(frame), "waits": waits}


def _awaits_data_worker(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.endswith("torch/utils/data/dataloader.py"):
        frame = frame.f_back
    return frame is not None


def hang_message(found: dict[int, dict[str, Any]], ranks: int, seconds: float, folder: Path) -> str:
    """The message that names the ranks that did not arrive: those that are silent, behind, or busy with other work."""

    def reached(one: dict[str, Any]) -> tuple[Any, ...]:
        return (tuple(one["place"]), one.get("enqueued", 0))

    furthest = max(map(reached, found.values()))
    waiting = any(one["waits"] for one in found.values())
    absent = {
        rank: one for rank, one in sorted(found.items())
        if reached(one) < furthest or (waiting and not one["waits"])
    }  # fmt: skip
    lines = [f"rank {rank} did not answer: it is stopped, or gone" for rank in range(ranks) if rank not in found]
    lines += [f"rank {n} did not arrive: it is at {one['words']}, in {one['line']}" for n, one in absent.items()]
    lines = lines[:8] + [f"{len(lines) - 8} more did not"] * (len(lines) > 8)
    others: dict[str, tuple[int, str]] = {}  # where ranks are, in words → the lowest of them, and its line
    for rank, one in sorted(found.items()):
        if rank not in absent:
            others.setdefault(one["words"], (rank, one["line"]))
    alone = len(others) == 1
    for words, (rank, line) in list(others.items())[:_PLACES]:  # each stage of a pipeline does something else
        who = f"rank {rank} is" if not alone else "the others are" if lines else "all ranks are"
        lines.append(f"{who} at {words}, in {line}")
    return (
        f"error: no progress for {seconds:.0f} s (strategy.timeout_minutes): {'; '.join(lines)}. "
        f"Stacks of every rank are in {folder}/rank-*.log\n"
    )
