"""Errors that end a run with one message (rule, numbers, remedy). Any other error is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
import platform
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """How a run ended.

    After `crash`, `saved` and `hang` a job script may start it again; after `bad_node` too, without the nodes that the
    preflight named. After the others it would end the same way again. 128 + n means that signal n ended it, before
    there was anything to save or by a second Ctrl-C.
    """

    done = 0
    crash = 1
    user_error = 2
    non_finite = 3
    out_of_memory = 4
    saved = 5
    hang = 6
    bad_node = 7


class RunStopped(Exception):
    """The run cannot go on, and no line of code is to blame: the user sees one message without a traceback."""

    exit_code: int = ExitCode.crash


class ConfigError(RunStopped):
    """The configuration cannot work."""

    exit_code = ExitCode.user_error


class NonFiniteError(RunStopped):
    """The loss or the gradients are not numbers any more, or have left every bound that was set."""

    exit_code = ExitCode.non_finite


class OutOfMemoryError(RunStopped):
    """A rank asked for more memory than there is. Its message has several lines."""

    exit_code = ExitCode.out_of_memory


class CheckpointError(RunStopped):
    """Checkpoints cannot be written any more, for instance because the disk is full."""


class Left(RunStopped):
    """The run has saved and ends, as a signal asked it to."""

    exit_code: int = ExitCode.saved

    def __init__(self, message: str, goes_on_by: str, unsaved_by: int | None = None) -> None:
        """`goes_on_by`: the words that go on with the run. `unsaved_by`: the signal, where the run saves nothing."""
        super().__init__(message if unsaved_by else f"{message}; {goes_on_by} goes on")
        self.exit_code = 128 + unsaved_by if unsaved_by else ExitCode.saved


class DataError(ConfigError):
    """Data on disk are missing, unreadable, or not what their index says."""


class BadSample(DataError):
    """A sample that cannot be used. Of what a worker's traceback adds to the message, only it is kept."""

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


@contextmanager
def needs_packages() -> Iterator[None]:
    """Around a program's first imports: a Python that lacks a package is one message, and no crash to start again."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("shardwise", "shardwise_tools", "recipes"):
            raise
        sys.stderr.write(
            f"error: {sys.executable} (Python {platform.python_version()}) cannot run shardwise: {error}; use the "
            f"Python in which requirements.txt is installed, such as .venv/bin/python after `make train`\n"
        )
        raise SystemExit(ExitCode.user_error) from None


def describe_error(error: BaseException) -> str:
    """Describe an error in one line: what was raised, and the last line of the user's own code that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).parents[1]  # where the tools are, too
    own = [f for f in frames if "site-packages" not in f.filename and ours not in Path(f.filename).parents]
    line = f" ({own[-1].filename}:{own[-1].lineno}, in {own[-1].name})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{line}"


def first_of(names: Iterable[str], most: int = 4) -> str:
    """The first names of a list, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def count(number: int, noun: str) -> str:
    """A number with its noun: `1 rank`, `2 ranks`, `1,000 steps`. Plurals are formed with s or es."""
    return f"{number:,} {noun if number == 1 else noun + ('es' if noun.endswith(('s', 'x', 'tch')) else 's')}"


def a_or_an(noun: str) -> str:
    """A noun with its article: `an int`, `a list`."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def class_name(made: object) -> str:
    """The name of an object's class as its author wrote it: FSDP2 puts FSDPModel, of its own, in the place of Model."""
    kind = type(made)
    while len(kind.__bases__) == 2 and kind.__bases__[0].__module__.startswith("torch.distributed.fsdp"):
        kind = kind.__bases__[1]
    return kind.__name__


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint to append to a message: the most similar known word, or nothing."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1) or difflib.get_close_matches(word.lower(), words, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
