"""Runs `shardwise <tool> …`: tools for before and after a run, with words of the form key=value.

A tool may import shardwise and what tools share; shardwise imports none of this, but in after_run.py.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from enum import Enum
from importlib import import_module
from typing import Any, TypeVar, get_type_hints

from shardwise.config.paths import ROOT
from shardwise.config.schema import bind, take_options
from shardwise.errors import ConfigError, did_you_mean, needs_packages

TOOLS = {  # name → the function that runs it, beside which HELP stands, and what it is for
    "bench-data": (
        "shardwise_tools.bench_data.run",
        "is a run's data fast enough for its model, and with how many workers?",
    ),
    "chat": ("shardwise_tools.generate.chat", "a run's model continues what you type, line by line"),
    "doctor": (
        "shardwise_tools.doctor.run",
        "what is this machine, what is installed, and what keeps a run from training?",
    ),
    "export": ("shardwise_tools.export.run", "a run's weights for others to read: safetensors, Hugging Face, torch"),
    "generate": ("shardwise_tools.generate.run", "text that a run's model writes, from a prompt or a file of them"),
    "prepare": ("shardwise_tools.prepare.run.run", "text into token shards, for data=token_shards"),
    "preflight": (
        "shardwise.preflight.run.run",
        "are the machines that a run would be on what they should be, and do they work together?",
    ),
    "profile": ("shardwise_tools.profile.run", "where the time of a step goes, in a run that is under way"),
    "report": (
        "shardwise_tools.viewer.report.run",
        "a page about a run, or about several side by side, also where they died",
    ),
    "schedule": ("shardwise_tools.schedule.run", "how long each rank of a pipeline waits, and what it keeps"),
    "submit": ("shardwise.launch.submit.run", "a run to Slurm, once it is known that it can work"),
    "watch": ("shardwise_tools.viewer.watch.run", "how is a run, now and as it goes on?"),
}

_TRUTHS = {"true": True, "false": False}
_T = TypeVar("_T")


class Weights(Enum):
    """Which of a checkpoint's weights a tool takes."""

    model = "model"
    average = "average"


def main(argv: list[str] | None = None) -> int:
    """Run a tool. Returns 0 for done, 2 for a user's mistake (one message on stderr), or the tool's own exit code."""
    # Here, since a run imports this package at its end too, and these take as long as its whole report
    from shardwise.process.report import report, show_anything
    from shardwise.process.signals import Stopped, in_words

    show_anything()
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return report(error)
    except BrokenPipeError:  # who reads our output, such as `head`, has enough; Python would flush it once more
        _write_nothing_more()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _write_nothing_more()
        return report(ConfigError(f"the output cannot be written: {error.strerror}; write it somewhere else"))
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Stopped) else signal.SIGINT
        said = ": ".join([f"shardwise: stopped by {in_words(number)}", *map(str, error.args)])
        with suppress(OSError):  # at SIGHUP the terminal is gone
            sys.stderr.write(f"{said}\n")
        return 128 + number


def _run(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        print("usage: shardwise TOOL …; shardwise TOOL --help says what follows\n")
        print("\n".join(f"  {name:<12}{does}" for name, (_, does) in TOOLS.items()))
        return 0
    if words[0] not in TOOLS:
        near = did_you_mean(words[0], TOOLS)
        raise ConfigError(f"shardwise {words[0]}: there is no such tool{near}; there is {', '.join(TOOLS)}")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # where recipes are
    module, _, function = TOOLS[words[0]][0].rpartition(".")
    with needs_packages():
        tool: Any = import_module(module)
    if {"--help", "-h"} & set(words[1:]):
        print(tool.HELP)
        return 0
    return getattr(tool, function)(words[1:]) or 0


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
