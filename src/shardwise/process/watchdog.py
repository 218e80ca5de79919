"""Ends a run that hangs: says where every rank is, and which of them did not arrive. No torch until it must."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.errors import ExitCode
from shardwise.run_dir.files import LOGS, hang_report, nccl_trace, rank_log, write_whole

_TICK_SECONDS = 1.0
_PATIENCE = 5.0  # seconds in which the other ranks' watchdogs must have spoken
_SETTING_UP = 3  # times as long until the first step is through


class Progress:
    """Where this rank is. Written on the way, at the cost of an assignment; read by the watchdog's thread."""

    def __init__(self) -> None:
        self.place: tuple[int, ...] = (-1,)  # larger is further: step, micro-batch; then validation batch
        self.words = "setting up"
        self.beats = 0
        self.settled = False  # the first step is through: nothing is compiled, connected or loaded any more
        self.trained = False  # an optimizer step was made in this process
        self.over = False  # nothing is waited for any more

    def at(self, words: str, *place: int) -> None:
        self.words, self.place = words, place
        self.beats += 1

    def doing(self, words: str) -> None:
        self.at(words, *self.place)

    def begin_setup(self) -> None:
        """What is built, compiled and connected may take its time."""
        self.settled = False

    def end_setup(self) -> None:
        self.settled = True

    def note_step(self) -> None:
        self.trained = True

    def end(self) -> None:
        """A tracker's last upload, say, may take its time."""
        self.over = True


progress = Progress()


class Watchdog:
    """A thread of a rank. Time in which the whole process stood still (SIGSTOP, a laptop's lid) does not count."""

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
        """Stacks and what NCCL recorded into files; the first rank that can speaks for all."""
        own = {"place": progress.place, "words": progress.words, **_where()}
        with suppress(OSError), rank_log(self.run_dir, self.rank).open("a") as log:
            log.write(f"no progress for {self._limit():.0f} s, at {progress.words}; stacks:\n")
            log.flush()
            faulthandler.dump_traceback(log)
        dump = threading.Thread(target=self._dump_nccl, args=(own,), daemon=True)  # takes locks
        dump.start()
        dump.join(_PATIENCE)
        with suppress(OSError):
            write_whole(hang_report(self.run_dir, self.rank), json.dumps(own))
        # A device that works behind its host lets some hosts go on for some steps: their silence began later.
        patience = max(_PATIENCE, self.seconds / 10)
        deadline = time.monotonic() + patience
        while len(found := self._others() | {self.rank: own}) < self.ranks and time.monotonic() < deadline:
            time.sleep(0.05)
        if min(found) == self.rank:
            self.report(ExitCode.hang, hang_message(found, self.ranks, self._limit(), self.folder))
        else:
            time.sleep(patience)  # let it speak

    def _dump_nccl(self, own: dict[str, Any]) -> None:
        """The flight recorder's, as `torchfrtrace` reads it; and how many collectives this rank has called for."""
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            from torch._C import _distributed_c10d as c10d

            status = json.loads(c10d._dump_nccl_trace_json(includeCollectives=False))["pg_status"]  # type: ignore[attr-defined]
            own["enqueued"] = sum(int(group["last_enqueued_collective"]) for group in status.values())
            trace = c10d._dump_nccl_trace()  # type: ignore[attr-defined]
            write_whole(nccl_trace(self.run_dir, self.rank), trace)

    def _others(self) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in range(self.ranks):
            with suppress(OSError, ValueError):
                found[rank] = json.loads(hang_report(self.run_dir, rank).read_text())
        return found


def _where() -> dict[str, Any]:
    """Which line the main thread is in, and whether that waits for other ranks, or for a device that does."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return {"line": "", "waits": False}
    code = frame.f_code
    waits = any(f"/torch/{part}/" in code.co_filename for part in ("distributed", "autograd", "cuda"))
    return {"line": f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})", "waits": waits}


def hang_message(found: dict[int, dict[str, Any]], ranks: int, seconds: float, folder: Path) -> str:
    """Who did not arrive where the others wait: the silent, those that are behind, and those that are busy."""

    def reached(one: dict[str, Any]) -> tuple[Any, ...]:
        return (tuple(one["place"]), one.get("enqueued", 0))

    furthest = max(map(reached, found.values()))
    waiting = any(one["waits"] for one in found.values())
    absent = {
        rank: one for rank, one in sorted(found.items())
        if reached(one) < furthest or (waiting and not one["waits"])
    }  # fmt: skip
    told = [f"rank {rank} did not answer: it is stopped, or gone" for rank in range(ranks) if rank not in found]
    told += [f"rank {n} did not arrive: it is at {one['words']}, in {one['line']}" for n, one in absent.items()]
    told = told[:8] + [f"{len(told) - 8} more did not"] * (len(told) > 8)
    rest = next((one for rank, one in found.items() if rank not in absent), None)
    if rest is not None:
        told.append(f"{'the others are' if told else 'all ranks are'} at {rest['words']}, in {rest['line']}")
    return (
        f"error: no progress for {seconds:.0f} s (strategy.timeout_minutes): {'; '.join(told)}. "
        f"Stacks of every rank are in {folder}/rank-*.log\n"
    )
