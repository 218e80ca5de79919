"""Start a Plan's ranks on this node through torch.distributed's elastic launcher, which ends them together."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from shardwise.compose import ROOT
from shardwise.errors import ExitCode
from shardwise.launch.worker import FAILURE, PARENT, run_rank
from shardwise.plan import Plan

GRACE_SECONDS = 20  # for a rank that was told to stop, before it is killed


def launch(plan: Plan, in_process: bool) -> int:
    """Run `plan` and return its exit code. `in_process`: a single rank needs no process of its own.

    Raises:
        SystemExit: told to stop by a signal; every rank is gone by then.
    """
    if plan.launcher == "torchrun" or (plan.topology.world_size == 1 and in_process):
        return run_rank(plan)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as directory:
        plan_file, failure = Path(directory) / "plan.json", Path(directory) / "failure"
        plan_file.write_text(plan.to_json())
        os.environ |= _environment(plan, failure)
        try:
            return _launch_processes(plan, plan_file, failure)
        finally:
            del os.environ[FAILURE], os.environ[PARENT]  # theirs, not the launcher's


def _environment(plan: Plan, failure: Path) -> dict[str, str]:
    here = [str(ROOT / "src"), str(ROOT), str(Path.cwd())]
    before = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in here]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // plan.topology.world_size))),
        "PYTHONPATH": os.pathsep.join([*here, *before]),
        FAILURE: str(failure),
        PARENT: str(os.getpid()),
    }


def _launch_processes(plan: Plan, plan_file: Path, failure: Path) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what happened is said once, below
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(GRACE_SECONDS)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.topology.devices,
        run_id=plan.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a port that the system chooses
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(plan_file.parent)),  # its own would be left behind in /tmp
        monitor_interval=0.05,
        # Without SIGINT, which would be passed on to ranks that may still be importing: Ctrl-C ends them by SIGTERM.
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "shardwise.launch.worker", str(plan_file))
    except ChildFailedError as error:
        return _say(failure, error.failures)
    except KeyboardInterrupt:
        return _stopped(signal.SIGINT)
    except SignalException as error:
        return _stopped(error.sigval)
    return 0


def _stopped(by: signal.Signals) -> NoReturn:
    sys.stderr.write(f"shardwise: stopped by {'Ctrl-C' if by == signal.SIGINT else by.name}\n")
    raise SystemExit(128 + by.value)


def _say(failure: Path, failures: dict[int, Any]) -> int:
    """Which rank died without a word, else what the first to fail reported: the others' errors are consequences.

    A known reason is nobody's consequence. And SIGTERM is the elastic launcher's, to those who wait for the one that
    failed: torch 2.13 counts them among the failures.
    """
    said = json.loads(failure.read_text()) if failure.exists() else None
    silent = {r: p for r, p in failures.items() if not failure.with_suffix(f".{p.pid}").exists()}
    if said is None or said["code"] == ExitCode.crash:
        for rank, process in silent.items():
            code = int(process.exitcode)
            if said is not None and code == -signal.SIGTERM:
                continue
            how = f"was killed by {process.signal_name()}" if code < 0 else f"ended with exit code {code}"
            hint = " (out of memory?)" if code == -9 else ""
            sys.stderr.write(f"shardwise: rank {rank} {how}{hint}; the other ranks are stopped\n")
            return code if code > 0 else 128 - code
    assert said is not None
    sys.stderr.write(said["text"])
    return int(said["code"])
