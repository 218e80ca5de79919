"""Real processes for a test: `spawn` runs a function on N gloo (or NCCL) ranks and hands back what each returned."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.patience import Patience


def spawn(ranks: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 240) -> list[Any]:
    """`function(*arguments)` on every rank, RANK and friends in its environment. A failed or hung rank fails all.
    `timeout_seconds` is for an idle machine; see tests/harness/patience.py."""
    context = _context()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, ranks, port, folder, function, arguments))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        patience = Patience(timeout_seconds)
        try:
            while any(p.is_alive() for p in processes):
                if failed := [p for p in processes if p.exitcode]:
                    failed[0].join()
                    raise AssertionError(_failure(folder, processes))
                if patience.is_over():
                    for process in processes:  # each writes where it is
                        os.kill(process.pid or 0, signal.SIGQUIT)
                    raise AssertionError(f"still running: {patience}\n{_failure(folder, processes)}")
                time.sleep(0.05)
            if any(p.exitcode for p in processes):
                raise AssertionError(_failure(folder, processes))
        finally:
            for process in processes:
                process.kill()
                process.join()
        found = [pickle.loads((Path(folder) / f"{rank}.pkl").read_bytes()) for rank in range(ranks)]
        used_by_ranks.append(sum(seconds for _, seconds in found))
        return [result for result, _ in found]


used_by_ranks: list[float] = []  # CPU seconds of the ranks of each `spawn`: a fork server is their parent


def cpu_seconds() -> float:
    """Of this process and of all that it has started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def fork_server() -> Any:
    """Ranks are forks of one process that has imported everything and done nothing: half of a short run is imports.
    None where there are GPUs, which a fork must not share."""
    if Path("/dev/nvidiactl").exists():
        return None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    return context


def _context() -> Any:
    return fork_server() or multiprocessing.get_context("spawn")


def _rank(rank: int, ranks: int, port: int, folder: str, function: Callable[..., Any], arguments: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    # A child of a fork server would have data workers of one of its own, which import everything: half a minute a run
    multiprocessing.set_start_method("fork", force=True)
    errors = Path(folder) / f"{rank}.error"
    stacks = errors.open("w")
    faulthandler.register(signal.SIGQUIT, file=stacks, all_threads=False)
    faulthandler.enable(stacks)  # a rank that a signal ends says where
    try:
        import torch

        torch.set_num_threads(1)
        result = function(*arguments)
        (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps((result, cpu_seconds())))
    except BaseException:
        errors.write_text(traceback.format_exc())
        raise


def _failure(folder: str, processes: list[Any]) -> str:
    codes = [process.exitcode for process in processes]
    time.sleep(0.5)  # let the first failure, not its consequence, be written
    errors = [Path(folder) / f"{rank}.error" for rank in range(len(processes))]
    written = [f"rank {e.stem}:\n{e.read_text()}" for e in errors if e.exists() and e.stat().st_size]
    after = [process.exitcode for process in processes]
    return "\n".join([*written, f"exit codes of the ranks: {codes}, half a second later {after}"])
