"""DeepSpeed compiles its operators when they are first used. One rank at a time, and a rank that is killed meanwhile
does not stop the others for ever."""

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
    """For every operator that is loaded from here on."""
    # torch has one folder a home: two environments there would build anew, for minutes, whenever the other has run.
    own = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{get_default_build_root()}/shardwise-{own}")
    OpBuilder.jit_load = _load


_jit_load = OpBuilder.jit_load


def _load(self: Any, verbose: bool = True) -> Any:
    # torch's lock is a file, which outlives who made it (torch/utils/file_baton.py): a lock of the kernel's around it
    # tells that nobody of ours is building, and a look at the processes that no orphaned compiler is either.
    folder = Path(_get_build_directory(self.name, False))
    lock = folder / "lock"
    with folder.with_suffix(".held").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        while lock.exists() and _is_built_in(folder):
            time.sleep(0.1)
        lock.unlink(missing_ok=True)
        return _jit_load(self, verbose)


def _is_built_in(folder: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # another user's, or gone
            if os.readlink(process) == str(folder):
                return True
    return False
