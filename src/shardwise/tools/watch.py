"""Shows how a run is, while it goes on and afterwards: `shardwise watch runs/<id>`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.tools import read_words
from shardwise.viewer.screen import make_console, show_once, show_until_it_ends
from shardwise.viewer.watch import Watch

HELP = """\
usage: shardwise watch RUN [every=2] [--once]

RUN: a run's folder, runs/<id>. Its files alone are read, by a process of its own, which costs the run nothing.

Shows whether it runs, has ended or has died, its step and the time to go, loss, speed, memory, waiting for data,
goodput, the slowest rank, what the GPUs report, verdicts and events. In a terminal the view is drawn anew; elsewhere
lines are printed. It ends when the run does, or by Ctrl-C.

  every=2         seconds between two looks
  --once          look once

Exit code: 0, or 1 where the run has died.
"""


@dataclass
class WatchConfig:
    every: float = 2.0


def run(words: list[str]) -> int:
    """Watch what `words` ask for. Returns 1 if the run has died.

    Raises:
        ConfigError: the folder is no run's, or a word is wrong.
    """
    once = "--once" in words
    folders, config = read_words([word for word in words if word != "--once"], WatchConfig)
    if len(folders) != 1:
        raise ConfigError(f"watch takes one run, and got {' '.join(folders) or 'none'}: shardwise watch runs/<id>")
    if not 0.1 <= config.every <= 3600:
        raise ConfigError(f"every={config.every:g}: must be from 0.1 to 3600 seconds")
    watch = Watch(folders[0])
    console = make_console()
    if once:
        show_once(watch, console)
    else:
        with suppress(KeyboardInterrupt):  # the run goes on, and so may the user
            show_until_it_ends(watch, console, config.every)
    return watch.state.exit_code
