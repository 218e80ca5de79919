"""`python train.py …` without its imports: launcher and ranks are forks of a process that has imported everything.

What a test looks at stays as it is: command line, environment, working directory, output, signals, exit code, and whose
child a rank is. Most of a short run would be imports. Tests of how a run is started start it anew.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.harness.patience import Patience
from tests.harness.processes import fork_server

RANKS = 4  # that a launcher can fork; a further one it starts anew
_MAIN = multiprocessing.current_process()  # where this file is imported: what a program is to itself
_HIGH = 200  # file descriptors from here on are not in anybody's way


def start(
    script: Path, words: list[str], home: Path, environment: dict[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run the script; fails the test when it hangs."""
    context, command = fork_server(), [sys.executable, str(script), *words]
    assert context is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = context.Process(target=_launcher, args=(script, words, home, environment, out, err))
        process.start()
        patience = Patience(seconds)
        try:
            while process.is_alive() and not patience.is_over():
                process.join(0.5)
            hangs = process.is_alive()
        finally:
            process.kill()
            process.join()
        said = [path.read_text() if path.exists() else "" for path in (out, err)]
    assert not hangs, f"{command} still runs; {patience}\n{said[0]}\n{said[1]}"
    return subprocess.CompletedProcess(command, process.exitcode or 0, *said)


def _launcher(
    script: Path, words: list[str], home: Path, environment: dict[str, str], out: Path, err: Path
) -> None:  # in a fork
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.chdir(home)
    standbys = [_Standby() for _ in range(RANKS)]

    def popen(command: list[str], **options: Any) -> Any:
        return standbys.pop(0).become(**options) if standbys else subprocess.Popen(command, **options)

    def run() -> None:
        sys.argv = [str(script), *words]
        with patch("shardwise.launch.local.subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE)):
            runpy.run_path(str(script), run_name="__main__")

    _be_a_program(environment, str(script.parent), run)


def _be_a_program(environment: dict[str, str], first: str, run: Callable[[], None], unbuffered: bool = False) -> None:
    """What the interpreter does around a program, in a fork. Does not return."""
    import torch
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = _get_rank() or 0  # both read the environment when they are imported
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first, *path, *_library_path()]
    multiprocessing.process._current_process = _MAIN  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=unbuffered)  # type: ignore[attr-defined]
    code = 0
    try:
        run()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code & 0xFF)


def _library_path() -> list[str]:
    """Of the standard library and of what is installed: what stays where no checkout is on the path."""
    # As they are written in sys.path, and as links lead: a virtual environment may be a link.
    roots = {path for prefix in (sys.prefix, sys.base_prefix) for path in (prefix, str(Path(prefix).resolve()))}
    return [entry for entry in sys.path if any(entry.startswith(root) for root in roots)]


class _Standby:
    """A fork of a launcher that has done nothing yet. It waits to be what `subprocess.Popen` would have started, and is
    to the launcher what Popen is: pid, stdin, poll, send_signal."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._orders.close()
            _stand_by(theirs)
        theirs.close()
        self._code: int | None = None

    def become(self, env: dict[str, str], stdin: int, pass_fds: list[int], start_new_session: bool) -> _Standby:
        assert stdin == subprocess.PIPE and start_new_session
        reads, writes = os.pipe()
        orders = json.dumps([env, pass_fds]).encode()
        socket.send_fds(self._orders, [len(orders).to_bytes(8, "big")], [reads, *pass_fds])
        self._orders.sendall(orders)
        self._orders.close()
        os.close(reads)
        self.stdin = open(writes, "wb")  # noqa: SIM115
        return self

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _stand_by(orders: socket.socket) -> None:
    """Does not return."""
    from shardwise.process.signals import kill_with_parent

    kill_with_parent()
    size, files, *_ = socket.recv_fds(orders, 8, 8)
    if not size:
        os._exit(0)
    environment, numbers = json.loads(orders.makefile("rb").read(int.from_bytes(size, "big")))
    orders.close()
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(aside, [0, *numbers], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.setsid()

    def run() -> None:
        sys.argv = ["-m"]
        warnings.filterwarnings("ignore", ".*found in sys.modules after import.*", RuntimeWarning)
        runpy.run_module("shardwise.launch.worker", run_name="__main__", alter_sys=True)

    _be_a_program(environment, os.getcwd(), run, unbuffered=True)
