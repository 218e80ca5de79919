"""Starts a Plan's ranks on this node, passes signals on, ends them together, and restarts them after a crash."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from shardwise.config.paths import ROOT
from shardwise.devices import count_cpus
from shardwise.errors import ConfigError, ExitCode
from shardwise.launch.worker import STANDBY, remove_abandoned, run_rank
from shardwise.plan import Plan
from shardwise.process.report import REPORT
from shardwise.process.signals import BEHIND_ANOTHER, LEAVE, PARENT, SAVE, in_words
from shardwise.run_dir.checkpoints import give_name_again, newest_whole, step_of
from shardwise.run_dir.events import append_event, claim_exit_code
from shardwise.run_dir.files import profile_folder

LOOPBACK = "127.0.0.1"
GRACE_SECONDS = 60  # a rank that has reported how it ends gets this time, for instance for its tracker's last upload
_DEATH_SECONDS = 10  # the launcher waits this long for killed ranks: one that waits for a lost disk or GPU cannot die
_SILENCE_SECONDS = 3  # once a rank has failed, the others get this time to report why they end
STANDBY_SECONDS = 30.0  # after this time a start has its imports behind it, and the ranks of a restart make theirs
_FRUITLESS = 2  # after this many restarts in a row that saved nothing new, there is no further one


def launch(plan: Plan, in_process: bool) -> int:
    """Run `plan` and return its exit code. `in_process`: a single rank runs in this process.

    Raises:
        SystemExit: a signal has stopped the run; every rank is gone by then.
    """
    alone = plan.topology.world_size == 1 and in_process and not plan.max_restarts and plan.profile.tool == "torch"
    if plan.launcher != "local" or alone:
        return run_rank(plan)
    make_folder(plan)
    start, restarts, fruitless = _Start(plan), 0, 0
    try:
        while True:
            code = start.run(plan)
            show_reports(plan)
            # A rank that LEAVE or SAVE has ended before it could save has not crashed: it was asked to leave
            crashed = code in (ExitCode.crash, ExitCode.hang) or (code > 128 and code - 128 not in (*LEAVE, SAVE))
            if not crashed or plan.stage != "fit" or restarts == plan.max_restarts:
                return code
            give_name_again(plan.run_dir)
            newest, before = newest_whole(plan.run_dir), plan.resume
            if newest is not None:
                plan = plan.going_on_from(str(newest), may_fall_back=True)
            fruitless = fruitless + 1 if restarts and plan.resume == before else 0
            if fruitless == _FRUITLESS:
                sys.stderr.write(f"shardwise: {fruitless} restarts in a row have saved nothing new: no further one\n")
                return code
            restarts += 1
            begin = f"step {step_of(plan.resume)}" if plan.resume else "the beginning"
            text = f"restart {restarts} of {plan.max_restarts}, from {begin}"
            append_event(plan.run_dir, "restart", None, text, exit_code=code)
            print(f"shardwise: {text}", flush=True)
            start = start.following(plan)
    finally:
        start.end_standby()


class _Rank:
    """A rank's process, and the pipe on which it reports what went wrong."""

    def __init__(self, number: int, plan: Plan, environment: dict[str, str]) -> None:
        self.reports, writes = os.pipe()
        os.set_blocking(self.reports, False)
        environment = environment | {"RANK": str(number), "LOCAL_RANK": str(number), REPORT: str(writes)}
        if before := words_before(plan, number):
            environment |= {PARENT: BEHIND_ANOTHER}  # the rank's parent is the profiler
        self.process = subprocess.Popen(
            [*before, sys.executable, "-u", "-m", "shardwise.launch.worker"], env=environment, stdin=subprocess.PIPE,
            pass_fds=[writes], start_new_session=True,  # so Ctrl-C in a terminal reaches the launcher alone
        )  # fmt: skip
        os.close(writes)
        self.number, self.killed, self._received = number, False, b""

    def begin(self, plan: Plan) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as stdin:  # the process may be gone already
            stdin.write(plan.to_json().encode())

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def report(self) -> dict[str, Any] | None:
        """The first report that the rank has sent; None: it has sent none."""
        with suppress(BlockingIOError):
            while received := os.read(self.reports, 2**16):
                self._received += received
        first, end, _ = self._received.partition(b"\n")
        return dict(json.loads(first)) if end else None

    def send(self, number: int) -> None:
        if self.code is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and those that it has started."""
        if self.code is None:
            self.killed = True
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class _Start:
    """All ranks once, from start to end. In a `standby` they have imported what they need and wait for their Plan."""

    def __init__(self, plan: Plan, standby: bool = False) -> None:
        self.plan = plan
        self.stopped_by: int | None = None  # the signal that asked this process to stop
        self.standby: _Start | None = None
        self.store = local_store()  # in this process, which outlives every rank
        self.environment = rank_environment(plan.topology.world_size, self.store.port)
        ready = plan.environment | self.environment | {STANDBY: "yes"}
        self.ranks = [_Rank(number, plan, ready) for number in range(plan.topology.world_size if standby else 0)]

    def following(self, plan: Plan) -> _Start:
        """The start after this one."""
        if self.standby is not None and all(rank.code is None for rank in self.standby.ranks):
            return self.standby
        self.end_standby()
        return _Start(plan)

    def end_standby(self) -> None:
        if self.standby is not None:
            self.standby._end()
            self.standby._close()

    def run(self, plan: Plan) -> int:
        self.plan = plan
        try:
            with self._signals():
                for number in range(plan.topology.world_size):
                    if number == len(self.ranks):
                        self.ranks.append(_Rank(number, plan, self.environment))
                    self.ranks[number].begin(plan)
                    if self.stopped_by is not None:  # the signal came before this rank was started
                        self.ranks[number].send(self.stopped_by)
                self._wait()
        finally:
            self._end()
            remove_abandoned(patience=1.0)
        code, text = outcome(self.ranks, self.stopped_by)
        if code:
            claim_exit_code(code, text)
            if self.plan.stage == "fit":
                append_event(self.plan.run_dir, "error", None, text.strip(), exit_code=code)
        sys.stderr.write(text)
        sys.stderr.flush()
        self._close()
        if self.stopped_by is not None:
            raise SystemExit(code)  # further runs of a sweep do not start either
        return code

    def _end(self) -> None:
        """Kill the ranks that are left."""
        for rank in self.ranks:
            rank.kill()
        deadline = time.monotonic() + _DEATH_SECONDS
        while any(rank.code is None for rank in self.ranks) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _close(self) -> None:
        for rank in self.ranks:
            os.close(rank.reports)

    def _wait(self) -> None:
        """Wait for all ranks. Once one has failed, give the others some time and kill those that are left."""
        restarts = self.plan.stage == "fit" and self.plan.max_restarts > 0 and self.plan.profile.tool == "torch"
        began = time.monotonic()
        while all(rank.code in (None, 0) and rank.report() is None for rank in self.ranks):
            if all(rank.code == 0 for rank in self.ranks):
                return
            if restarts and self.standby is None and time.monotonic() - began > STANDBY_SECONDS:
                self.standby = _Start(self.plan, standby=True)
            time.sleep(0.05)
        failed = time.monotonic()
        while alive := [rank for rank in self.ranks if rank.code is None and not rank.killed]:
            reports = [rank.report() for rank in self.ranks]
            # Whether the ranks end for a reason that they all have in common
            together = any(
                report and report["code"] not in (ExitCode.crash, ExitCode.hang) and not report["alone"]
                for report in reports
            )
            for rank in alive:
                patience = GRACE_SECONDS if together or reports[rank.number] else _SILENCE_SECONDS
                if time.monotonic() - failed > patience:
                    rank.kill()
            time.sleep(0.05)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass this process's signals on to its ranks, which save and leave. A second Ctrl-C kills them."""

        def relay(number: int, frame: FrameType | None) -> None:
            if number in LEAVE:
                if number == signal.SIGINT == self.stopped_by:
                    for rank in self.ranks:
                        rank.kill()
                self.stopped_by = number
            for rank in self.ranks:
                rank.send(number)

        before: dict[signal.Signals, Callable[..., Any] | int | None] = {}
        for number in (*LEAVE, SAVE, signal.SIGQUIT):
            # A script's `train.py … &` ignores what a terminal sends, SIGQUIT too, which here asks for stacks alone
            if signal.getsignal(number) != signal.SIG_IGN or number in (SAVE, signal.SIGQUIT):
                before[number] = signal.signal(number, relay)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def outcome(ranks: Sequence[_Rank], stopped_by: int | None) -> tuple[int, str]:
    """The exit code of the run, and its message.

    A report with a known reason (an exit code other than `crash`) comes first, then a rank that died without a report,
    then the first report: the other ranks' errors are its consequences. `stopped_by`: the signal that asked the
    launcher to stop.
    """
    failed = [rank for rank in ranks if rank.code and not rank.killed]
    reports = sorted((report for rank in ranks if (report := rank.report())), key=lambda report: report["time"])
    silent = [rank for rank in failed if rank.report() is None]
    known = [report for report in reports if report["code"] != ExitCode.crash]
    by_signal = stopped_by is not None and any(rank.code == -stopped_by for rank in silent)
    if stopped_by is not None and not known and (by_signal or not (failed or reports)):
        ended = any(rank.code for rank in ranks)  # ranks ended before there was anything to save, or were killed
        return (128 + stopped_by, f"shardwise: stopped by {in_words(stopped_by)}\n") if ended else (0, "")
    if reports and not known:  # a rank ends with code 0 only when all do, so this one has called sys.exit() itself
        silent += [rank for rank in ranks if rank.code == 0 and rank.report() is None]
    if not known and silent:
        code = int(silent[0].code or 0)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended by itself with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        text = f"shardwise: rank {silent[0].number} {how}{hint}; the other ranks are stopped\n"
        if 0 <= code <= 128:  # such a code of the user's own could be mistaken for one of ours
            code = int(ExitCode.crash)
        return (code if code > 0 else 128 - code), text
    report = next(iter(known or reports), None)
    return (0, "") if report is None else (int(report["code"]), str(report["text"]))


def local_store() -> Any:
    """A TCPStore for ranks on this node, on a port that the system chooses.

    torch would listen on every interface of the node, whatever name it is given, and asks nobody for a password: it
    gets a socket that listens on the loopback interface alone.
    """
    from torch._C._distributed_c10d import TCPStore

    listening = socket.create_server((LOOPBACK, 0), backlog=1024)
    port = listening.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )  # the store closes it


def rank_environment(ranks: int, port: int) -> dict[str, str]:
    """The environment of `ranks` processes on this node, without RANK and LOCAL_RANK. `port`: the store's."""
    ours = [str(ROOT / "src"), str(ROOT), os.getcwd()]
    before = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in ours]
    return os.environ | {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),  # else gloo listens where the host's name is
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, count_cpus() // ranks))),
        "PYTHONPATH": os.pathsep.join([*ours, *before]),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # by this torch knows that the store exists: rank 0 makes none
        PARENT: str(os.getpid()),
    }


# Puts NVIDIA's profilers before a rank's command, and says where their reports are. No torch.

# slurm/job.sh has the same words
NSYS = ("nsys", "profile", "--trace=cuda,nvtx,osrt", "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        "--cuda-graph-trace=node", "--force-overwrite=true")  # fmt: skip
# Each of these kernels runs several times; clocks are left as the run has them
NCU = ("ncu", "--profile-from-start=off", "--nvtx", "--clock-control=none", "--launch-count=500", "--force-overwrite")


def check_profiler(plan: Plan) -> None:
    """Check that the profiler is there which this process has to start.

    Raises:
        ConfigError: it is not.
    """
    tool = plan.profile.tool
    if tool != "torch" and plan.launcher == "local" and shutil.which(tool) is None:
        raise ConfigError(
            f"profile.tool={tool}: there is no {tool} on the PATH; it comes with NVIDIA's CUDA toolkit, or use "
            f"profile.tool=torch, which needs nothing"
        )


def words_before(plan: Plan, rank: int) -> list[str]:
    """The words before the command of `rank`; none if no other profiler than torch's records it."""
    profile = plan.profile
    if profile.tool == "torch" or profile.start is None or not profile.has(rank):
        return []
    folder = profile_folder(plan.run_dir, profile.start)
    output = str(folder).replace("%", "%%")  # both read % as the begin of a variable
    if profile.tool == "ncu":
        return [*NCU, f"--export={output}/rank-{rank}"]
    return [*NSYS, f"--output={output}/rank-%q{{RANK}}"]


def make_folder(plan: Plan) -> None:
    """Make the folder of the reports: the profilers make none, and ncu opens its report at once. Raises OSError."""
    if plan.profile.tool != "torch" and plan.profile.start is not None:
        profile_folder(plan.run_dir, plan.profile.start).mkdir(parents=True, exist_ok=True)


def show_reports(plan: Plan) -> None:
    """Say where the reports of nsys and ncu are, and what reads them."""
    profile = plan.profile
    if profile.tool == "torch" or profile.start is None:
        return
    folder = profile_folder(plan.run_dir, profile.start)
    if not any(folder.glob(f"*.{profile.tool}-rep")):
        said = f"{profile.tool} has written no report into {folder}"
    elif profile.tool == "nsys":
        said = f"nsys stats and nsys-ui read the reports in {folder}"
    else:
        said = f"ncu-ui opens the report in {folder}"
    print(f"profile: {said}", flush=True)
