"""Lets one rank at a time compile DeepSpeed's operators, which happens at their first use.

A rank that is killed while it compiles does not block the others for ever.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils.cpp_extension import _get_build_directory, get_default_build_root


def watch_builds() -> None:
    """Guard the compilation of every operator that is loaded after this call."""
    # By default all Python environments of a user share one folder, and each would compile anew after the other.
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{get_default_build_root()}/shardwise-{environment}")
    OpBuilder.jit_load = _load


_jit_load = OpBuilder.jit_load


def _load(self: Any, verbose: bool = True) -> Any:
    # torch's lock is a file, which stays behind when its process is killed (torch/utils/file_baton.py). So a lock of
    # the kernel is held around it: who has that lock knows that no other rank compiles. A compiler that a killed rank
    # left behind is found among the processes.
    folder = Path(_get_build_directory(self.name, False))
    lock = folder / "lock"
    with folder.with_suffix(".held").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        while lock.exists() and _is_built_in(folder):
            time.sleep(0.1)
        lock.unlink(missing_ok=True)
        return _jit_load(self, verbose)


def _is_built_in(folder: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # the process is another user's, or has ended
            if os.readlink(process) == str(folder):
                return True
    return False
