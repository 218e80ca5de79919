"""An exception in a module author's code → his frame and his line, in two lines. No torch.

His are the files that are neither ours nor a library's; where the module comes from an installed package, also the
files of that package.
"""

from __future__ import annotations

import gc
import linecache
import os
import re
import sysconfig
import traceback
import types
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OURS = (str(ROOT / "train.py"), str(Path(__file__).resolve().parent) + os.sep)
_STANDARD = tuple(str(Path(sysconfig.get_paths()[word])) + os.sep for word in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = ("torch", "lightning", "deepspeed", "torchmetrics", "numpy")
_WORKER = "Original Traceback (most recent call last):"  # a data worker's, which torch hands on as text
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
# A network, a device or a process that failed beneath the author's line
_MACHINE = re.compile(r"gloo|nccl|Connection (closed|reset|refused)|CUDA (error|driver)|[Tt]imed out|DataLoader worker")
_CALL = re.compile(r"([\w.<>]+)\(\) (?:takes|missing|got) ")
_OF_A_PATH = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """`training_step, my.py line 12: loss = …`; without a name at the top level of a file."""
        file = os.path.relpath(self.file) if self.file.startswith(os.getcwd() + os.sep) else self.file
        where = f"{file} line {self.line}: {linecache.getline(self.file, self.line).strip()}"
        return where if self.function == "<module>" else f"{self.function}, {where}"


def tell(error: Exception, package: str | None) -> str | None:
    """`error: ValueError: …` and where, or None: it did not come up in the author's code. `package`: the module's."""
    frames = [*_frames(error), *_of_the_call(error)]
    found = [] if _is_of_the_machine(error) else [f for f in frames if is_authors(f.file, package)]
    if not found:
        return None
    lines = [f"error: {type(error).__name__}: {_message(error)}", f"  in {found[-1]}"]
    if found[0].function != found[-1].function:
        lines.append(f"  called by {found[0]}")
    return "\n".join(lines) + "\n"


def would_fail_again(error: Exception) -> bool:
    """Not a file system or a server that may be there the next time."""
    return not isinstance(error, OSError) or isinstance(error, _OF_A_PATH)


def is_authors(file: str, package: str | None = None) -> bool:
    if file.startswith("<"):
        return False
    path = os.path.abspath(file)
    parts = Path(path).parts
    for above, part in pairwise(parts):
        if above in _INSTALLED:
            return package not in _LIBRARIES and part.removesuffix(".py") == package
    return not path.startswith((*_OURS, *_STANDARD))


def _is_of_the_machine(error: Exception) -> bool:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, MemoryError) or kinds & {"DistError", "AcceleratorError", "OutOfMemoryError"}:
        return True
    return isinstance(error, RuntimeError) and _WORKER not in str(error) and bool(_MACHINE.search(str(error)))


def _frames(error: Exception) -> list[Frame]:
    """Outermost first."""
    frames = [Frame(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(Frame(error.filename, error.lineno or 0, "<module>"))
    if _WORKER in str(error):
        text = str(error).partition(_WORKER)[2]
        frames += [Frame(file, int(line), function) for file, line, function in _FRAME.findall(text)]
    return frames


def _of_the_call(error: Exception) -> list[Frame]:
    """Where a function begins that was called with other arguments than it takes: it has no frame of its own."""
    called = _CALL.match(str(error)) if isinstance(error, TypeError) else None
    if called is None:
        return []
    return [
        Frame(f.__code__.co_filename, f.__code__.co_firstlineno, f.__name__)
        for f in gc.get_objects()
        if type(f) is types.FunctionType and f.__qualname__ == called[1]
    ]


def _message(error: Exception) -> str:
    text = str(error)
    if _WORKER in text:  # its last lines
        text = text.rpartition(f"\n{type(error).__name__}: ")[2]
    text = " ".join(text.split())
    return text if len(text) <= 1000 else text[:1000] + " …"
