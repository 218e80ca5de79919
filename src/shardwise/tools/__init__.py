"""Runs `shardwise <tool> …`: tools for before and after a run, one file each, with words of the form key=value."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from shardwise.config.bind import bind
from shardwise.errors import ConfigError, did_you_mean, needs_packages
from shardwise.process.console import show_anything
from shardwise.process.report import report as report_error  # `report` is a tool in this folder
from shardwise.process.signals import Stopped, in_words

TOOLS = {
    "bench-data": "is a run's data fast enough for its model, and with how many workers?",
    "chat": "a run's model continues what you type, line by line",
    "doctor": "what is this machine, what is installed, and what keeps a run from training?",
    "export": "a run's weights for others to read: safetensors, Hugging Face, torch",
    "generate": "text that a run's model writes, from a prompt or a file of them",
    "prepare": "text into token shards, for data=token_shards",
    "preflight": "are the machines that a run would be on what they should be, and do they work together?",
    "profile": "where the time of a step goes, in a run that is under way",
    "report": "a page about a run, or about several side by side, also where they died",
    "schedule": "how long each rank of a pipeline waits, and what it keeps",
    "submit": "a run to Slurm, once it is known that it can work",
    "watch": "how is a run, now and as it goes on?",
}

_TRUTHS = {"true": True, "false": False}
_T = TypeVar("_T")


class Weights(Enum):
    """Which of a checkpoint's weights a tool takes."""

    model = "model"
    average = "average"


def main(argv: list[str] | None = None) -> int:
    """Run a tool. Returns 0 for done, 2 for a user's mistake (one message on stderr), or the tool's own exit code."""
    show_anything()
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return report_error(error)
    except BrokenPipeError:  # who reads our output, such as `head`, has enough; Python would flush it once more
        _write_nothing_more()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _write_nothing_more()
        return report_error(ConfigError(f"the output cannot be written: {error.strerror}; write it somewhere else"))
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Stopped) else signal.SIGINT
        said = ": ".join([f"shardwise: stopped by {in_words(number)}", *map(str, error.args)])
        with suppress(OSError):  # at SIGHUP the terminal is gone
            sys.stderr.write(f"{said}\n")
        return 128 + number


def _run(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        print("usage: shardwise TOOL …; shardwise TOOL --help says what follows\n")
        print("\n".join(f"  {name:<12}{does}" for name, does in TOOLS.items()))
        return 0
    if words[0] not in TOOLS:
        near = did_you_mean(words[0], TOOLS)
        raise ConfigError(f"shardwise {words[0]}: there is no such tool{near}; there is {', '.join(TOOLS)}")
    root = str(Path(__file__).resolve().parents[3])
    if root not in sys.path:
        sys.path.append(root)  # where recipes are
    with needs_packages():
        tool: Any = import_module(f"shardwise.tools.{words[0].replace('-', '_')}")
    if {"--help", "-h"} & set(words[1:]):
        print(tool.HELP)
        return 0
    return tool.run(words[1:]) or 0


def _write_nothing_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_words(words: list[str], kind: type[_T]) -> tuple[list[str], _T]:
    """Split words into those without a key, and those of the form `key=value`, which become `kind`, a dataclass.

    Raises:
        ConfigError: a key is unknown or given twice, or a value has the wrong type.
    """
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"{word}: there is no such flag; words look like key=value, and --help lists them")
    alone, values = take_options(words, str.isidentifier)
    types = get_type_hints(kind)
    typed = {key: _TRUTHS.get(value, value) if types.get(key) is bool else value for key, value in values.items()}
    config: _T = bind(kind, typed)
    return alone, config


def take_options(words: list[str], is_ours: Callable[[str], bool]) -> tuple[list[str], dict[str, str]]:
    """Split words into those that are left, and the values of those of the form `key=value` whose key is ours.

    Raises:
        ConfigError: a key of ours is given twice.
    """
    rest: list[str] = []
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not is_ours(key):
            rest.append(word)
        elif key in values:
            raise ConfigError(f"{word}: {key}={values[key]} is given already; give it once")
        else:
            values[key] = value
    return rest, values
