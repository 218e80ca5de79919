"""Start a Plan's ranks on this node, pass signals on, end them together, and start them again after a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from shardwise.config.paths import ROOT
from shardwise.devices import count_cpus
from shardwise.errors import ExitCode
from shardwise.launch.worker import run_rank
from shardwise.plan import Plan
from shardwise.process.parent import PARENT
from shardwise.process.report import REPORT
from shardwise.process.scratch import remove_abandoned
from shardwise.process.signals import LEAVE, SAVE, in_words
from shardwise.run_dir.checkpoints import newest_whole, step_of
from shardwise.run_dir.job_folder import claim_exit_code

GRACE_SECONDS = 60  # for a rank that has said how it ends: its tracker's last upload
_DEATH_SECONDS = 10  # a process that waits for a lost disk or GPU does not even die
_SILENCE_SECONDS = 3  # for one that has not, once another has failed: it may be about to say why
_FRUITLESS = 2  # restarts in a row after which nothing new was saved


def launch(plan: Plan, in_process: bool) -> int:
    """Run `plan` and return its exit code. `in_process`: a single rank needs no process of its own.

    Raises:
        SystemExit: told to stop by a signal; every rank is gone by then.
    """
    if plan.launcher != "local" or (plan.topology.world_size == 1 and in_process and not plan.max_restarts):
        return run_rank(plan)
    restarts = fruitless = 0
    while True:
        code = _Start(plan).run()
        # Not what a signal to one rank ended before it could save: it was told to leave
        crashed = code in (ExitCode.crash, ExitCode.hang) or (code > 128 and code - 128 not in (*LEAVE, SAVE))
        if not crashed or plan.stage != "fit" or restarts == plan.max_restarts:
            return code
        newest, before = newest_whole(plan.run_dir), plan.resume
        if newest is not None:
            plan = plan.going_on_from(str(newest), may_fall_back=True)
        fruitless = fruitless + 1 if restarts and plan.resume == before else 0
        if fruitless == _FRUITLESS:
            sys.stderr.write(f"shardwise: {fruitless} restarts in a row have saved nothing new: no further one\n")
            return code
        restarts += 1
        begin = f"step {step_of(plan.resume)}" if plan.resume else "the beginning"
        print(f"shardwise: restart {restarts} of {plan.max_restarts}, from {begin}", flush=True)


class _Rank:
    """A process, and the pipe on which it says what went wrong."""

    def __init__(self, number: int, plan: Plan, environment: dict[str, str]) -> None:
        self.reports, writes = os.pipe()
        os.set_blocking(self.reports, False)
        environment = environment | {"RANK": str(number), "LOCAL_RANK": str(number), REPORT: str(writes)}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "shardwise.launch.worker"], env=environment, stdin=subprocess.PIPE,
            pass_fds=[writes], start_new_session=True,  # Ctrl-C in a terminal reaches its launcher alone
        )  # fmt: skip
        os.close(writes)
        self.number, self.killed, self._said = number, False, b""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as stdin:  # it may be gone already
            stdin.write(plan.to_json().encode())

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def report(self) -> dict[str, Any] | None:
        """What it has said first, if anything."""
        with suppress(BlockingIOError):
            while said := os.read(self.reports, 2**16):
                self._said += said
        first, end, _ = self._said.partition(b"\n")
        return dict(json.loads(first)) if end else None

    def send(self, number: int) -> None:
        if self.code is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """With what it has started."""
        if self.code is None:
            self.killed = True
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class _Start:
    """All ranks once, from start to end."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.told: int | None = None  # the signal that this process was told to stop by
        self.ranks: list[_Rank] = []

    def run(self) -> int:
        from torch._C._distributed_c10d import TCPStore

        # Here, where it outlives every rank; on a port that the system chooses
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        try:
            with self._signals():
                for number in range(self.plan.topology.world_size):
                    self.ranks.append(
                        _Rank(number, self.plan, rank_environment(self.plan.topology.world_size, store.port))
                    )
                    if self.told is not None:  # before this one was there
                        self.ranks[-1].send(self.told)
                self._wait()
        finally:
            for rank in self.ranks:
                rank.kill()
            deadline = time.monotonic() + _DEATH_SECONDS
            while any(rank.code is None for rank in self.ranks) and time.monotonic() < deadline:
                time.sleep(0.05)
            remove_abandoned(patience=1.0)
            del store
        code, text = outcome(self.ranks, self.told)
        if code:
            claim_exit_code(code, text)
        sys.stderr.write(text)
        sys.stderr.flush()
        for rank in self.ranks:
            os.close(rank.reports)
        if self.told is not None:
            raise SystemExit(code)  # nor does what would come next start
        return code

    def _wait(self) -> None:
        while all(rank.code in (None, 0) and rank.report() is None for rank in self.ranks):
            if all(rank.code == 0 for rank in self.ranks):
                return
            time.sleep(0.05)
        failed = time.monotonic()
        while alive := [rank for rank in self.ranks if rank.code is None and not rank.killed]:
            reports = [rank.report() for rank in self.ranks]
            together = any(
                said and said["code"] not in (ExitCode.crash, ExitCode.hang) and not said["alone"] for said in reports
            )
            for rank in alive:
                patience = GRACE_SECONDS if together or reports[rank.number] else _SILENCE_SECONDS
                if time.monotonic() - failed > patience:
                    rank.kill()
            time.sleep(0.05)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """What this process is told, its ranks are told: they save and leave. A second Ctrl-C does not wait for it."""

        def relay(number: int, frame: FrameType | None) -> None:
            if number in LEAVE:
                if number == signal.SIGINT == self.told:
                    for rank in self.ranks:
                        rank.kill()
                self.told = number
            for rank in self.ranks:
                rank.send(number)

        before: dict[signal.Signals, Callable[..., Any] | int | None] = {}
        for number in (*LEAVE, SAVE, signal.SIGQUIT):
            if signal.getsignal(number) != signal.SIG_IGN or number == SAVE:
                before[number] = signal.signal(number, relay)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def outcome(ranks: Sequence[_Rank], told: int | None) -> tuple[int, str]:
    """The exit code of all, and what to say: who died without a word, else what the first to fail said. The others'
    errors are its consequences, but a known reason is nobody's. `told`: the signal that the launcher was told to stop
    by."""
    failed = [rank for rank in ranks if rank.code and not rank.killed]
    reports = sorted((said for rank in ranks if (said := rank.report())), key=lambda said: said["time"])
    silent = [rank for rank in failed if rank.report() is None]
    known = [said for said in reports if said["code"] != ExitCode.crash]
    if told is not None and not known and (any(rank.code == -told for rank in silent) or not (failed or reports)):
        ended = any(rank.code for rank in ranks)  # before there was anything to save, or by force
        return (128 + told, f"shardwise: stopped by {in_words(told)}\n") if ended else (0, "")
    if reports and not known:  # no rank is through before all are: somebody's own sys.exit()
        silent += [rank for rank in ranks if rank.code == 0 and rank.report() is None]
    if not known and silent:
        code = int(silent[0].code or 0)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended by itself with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        text = f"shardwise: rank {silent[0].number} {how}{hint}; the other ranks are stopped\n"
        if 0 <= code <= 128:  # not one of ours
            code = int(ExitCode.crash)
        return (code if code > 0 else 128 - code), text
    said = next(iter(known or reports), None)
    return (0, "") if said is None else (int(said["code"]), str(said["text"]))


def rank_environment(ranks: int, port: int) -> dict[str, str]:
    """Of `ranks` processes on this node, whose store is this process's; RANK and LOCAL_RANK are each one's own."""
    here = [str(ROOT / "src"), str(ROOT), os.getcwd()]
    before = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in here]
    return os.environ | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, count_cpus() // ranks))),
        "PYTHONPATH": os.pathsep.join([*here, *before]),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for: the store is there, be its client
        PARENT: str(os.getpid()),
    }
