"""Reports an exception in a module author's code in two lines: the error, and the author's line. No torch.

The author's files are those that are neither ours nor a library's. If the module comes from an installed package, the
files of that package are the author's too.
"""

from __future__ import annotations

import gc
import linecache
import os
import re
import sysconfig
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OURS = (str(ROOT / "train.py"), str(Path(__file__).resolve().parents[1]) + os.sep)  # the tools' files, too
_STANDARD = tuple(str(Path(sysconfig.get_paths()[word])) + os.sep for word in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = ("torch", "lightning", "deepspeed", "torchmetrics", "numpy")
_WORKER = "Original Traceback (most recent call last):"  # torch hands on a data worker's traceback as text
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
# Texts of errors of a network, a device or a process, which no line of the author's has caused
_MACHINE = re.compile(r"gloo|nccl|Connection (closed|reset|refused)|CUDA (error|driver)|[Tt]imed out|DataLoader worker")
NOTE = "strategy."  # begins what this code adds to an author's error
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
        line = f"{file} line {self.line}: {linecache.getline(self.file, self.line).strip()}"
        return line if self.function == "<module>" else f"{self.function}, {line}"


def _class_of(made: object) -> str:
    return type(made).__name__


def describe_mistake(
    error: Exception, package: str | None, class_name: Callable[[object], str] = _class_of
) -> str | None:
    """The error and the author's line that it came from; None: it did not come from the author's code.

    `package`: the top-level package of the module. `class_name`: the name of an object's class as its author wrote it.
    """
    frames = [*_frames(error), *_of_the_call(error)]
    found = [] if _is_of_the_machine(error) else [f for f in frames if is_authors(f.file, package)]
    if not found:
        return None
    lines = [f"error: {type(error).__name__}: {_message(error, class_name)}", f"  in {found[-1]}"]
    if found[0].function != found[-1].function:
        lines.append(f"  called by {found[0]}")
    lines += [f"  {note}" for note in getattr(error, "__notes__", ()) if note.startswith(NOTE)]
    return "\n".join(lines) + "\n"


def would_fail_again(error: Exception) -> bool:
    """Whether a restart would end in the same error: not after one of a file system or server that may come back."""
    return not isinstance(error, OSError) or isinstance(error, _OF_A_PATH)


def is_authors(file: str, package: str | None = None) -> bool:
    """Whether a file belongs to the module's author. `package`: the top-level package of the module."""
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
    """The frames that the error came through, the outermost first, also those in a data worker."""
    frames = [Frame(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(Frame(error.filename, error.lineno or 0, "<module>"))
    if _WORKER in str(error):
        text = str(error).partition(_WORKER)[2]
        frames += [Frame(file, int(line), function) for file, line, function in _FRAME.findall(text)]
    return frames


def _of_the_call(error: Exception) -> list[Frame]:
    """The first line of a function that was called with wrong arguments: such a call has no frame of its own."""
    called = _CALL.match(str(error)) if isinstance(error, TypeError) else None
    if called is None:
        return []
    return [
        Frame(f.__code__.co_filename, f.__code__.co_firstlineno, f.__name__)
        for f in gc.get_objects()
        if type(f) is types.FunctionType and f.__qualname__ == called[1]
    ]


def _with_the_authors_class(error: Exception, class_name: Callable[[object], str]) -> str:
    """The text of an error; where torch says that a module lacks an attribute, with the name of the author's class."""
    text, innermost = str(error), error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if isinstance(error, AttributeError) and innermost is not None and "self" in innermost.tb_frame.f_locals:
        made = innermost.tb_frame.f_locals["self"]
        text = text.replace(f"'{type(made).__name__}' object", f"'{class_name(made)}' object")
    return text


def _message(error: Exception, class_name: Callable[[object], str]) -> str:
    text = _with_the_authors_class(error, class_name)
    if _WORKER in text:  # the message is at the end of the worker's traceback
        text = text.rpartition(f"\n{type(error).__name__}: ")[2]
    text = " ".join(text.split())
    return text if len(text) <= 1000 else text[:1000] + " …"
