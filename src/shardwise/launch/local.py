"""Start a Plan's ranks on this node, and end them together: none outlives another's failure or the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.compose import ROOT
from shardwise.launch.worker import FAILURE, PARENT, run_rank
from shardwise.plan import Plan

GRACE_SECONDS = 20.0  # for a rank that failed or was told to stop, before it is killed

Processes = list[subprocess.Popen[bytes]]


def launch(plan: Plan, in_process: bool) -> int:
    """Run `plan` and return its exit code. `in_process`: a single rank needs no process of its own.

    Raises:
        KeyboardInterrupt, SystemExit: told to stop by SIGINT or SIGTERM; every rank is gone by then.
    """
    if plan.launcher == "torchrun" or (plan.topology.world_size == 1 and in_process):
        return run_rank(plan)
    return _launch_processes(plan)


def _launch_processes(plan: Plan) -> int:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Served from here, on a port that the system chose: none is guessed, none can be taken meanwhile.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: Processes = []
    before = signal.signal(signal.SIGTERM, _terminated)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as directory:
        failure = Path(directory) / "failure"
        try:
            _start(plan, Path(directory), store.port, processes)
            return _wait(processes, failure)
        finally:
            _stop(processes)
            signal.signal(signal.SIGTERM, before)


def _start(plan: Plan, directory: Path, port: int, processes: Processes) -> None:
    plan_file = directory / "plan.json"
    plan_file.write_text(plan.to_json())
    size = plan.topology.world_size
    here = [str(ROOT / "src"), str(ROOT), str(Path.cwd())]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    shared = {
        "OMP_NUM_THREADS": str(max(1, cores // size)),
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for: rank 0 does not serve the store
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        FAILURE: str(directory / "failure"),
        PARENT: str(os.getpid()),
    }
    # Ctrl-C reaches the whole process group. The ranks ignore it, from their first instruction on: it is ours to act.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for rank in range(size):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-u", "-m", "shardwise.launch.worker", str(plan_file)]
            processes.append(subprocess.Popen(command, env=environment))
    finally:
        signal.signal(signal.SIGINT, before)


def _wait(processes: Processes, failure: Path) -> int:
    """Until all ranks are done, or one has failed: its exit code. The first to go is the cause, the rest follow."""
    said: dict[str, Any] | None = None
    while said is None:
        time.sleep(0.02)
        if failure.exists():
            said = json.loads(failure.read_text())
        codes = [process.poll() for process in processes]
        for rank, (process, code) in enumerate(zip(processes, codes, strict=True)):
            if code and not failure.with_suffix(f".{process.pid}").exists():  # without a word
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                hint = " (out of memory?)" if code == -signal.SIGKILL else ""
                sys.stderr.write(f"shardwise: rank {rank} {how}{hint}; the other ranks are stopped\n")
                return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
    sys.stderr.write(said["text"])
    sys.stderr.flush()
    deadline = time.monotonic() + GRACE_SECONDS  # for what it still has to write
    while processes[said["rank"]].poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return int(said["code"])


def _stop(processes: Processes) -> None:
    """SIGTERM, and SIGKILL to what is left after a while."""
    try:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _terminated(number: int, frame: FrameType | None) -> None:
    sys.stderr.write(f"shardwise: stopped by {signal.Signals(number).name}\n")
    raise SystemExit(128 + number)
