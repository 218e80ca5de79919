"""Shows how a run is, while it goes on and afterwards: `shardwise watch runs/<id>`.

It follows the run's files alone: it reads what is new, and writes nothing. In a terminal the view is drawn anew.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError, count
from shardwise.run_dir.events import Event
from shardwise.run_dir.files import (
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    GUARD,
    METRICS,
    PLAN,
    RANKS,
    STARTS,
    SUMMARY,
    open_regular,
    readable,
)
from shardwise_tools import read_words
from shardwise_tools.viewer.chart import is_speed, is_spread, is_telemetry, loss_name, short, words
from shardwise_tools.viewer.record import RunRecord, Series, Table, find_run, read_text
from shardwise_tools.viewer.state import State, duration, errors_of, last_sign, one_line, state_of, time_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


_RECORDS = (CONFIG, ENVIRONMENT, EVENTS, GUARD, PLAN, STARTS, SUMMARY)
_BARS = "▁▂▃▄▅▆▇█"
_SPARKS = 40
_RANK_BYTES = 2**18  # the end of ranks.csv that is read: the last step of some thousand ranks
_SHOWN = 3  # verdicts, and events
# What a rank does by itself. All ranks' steps take equally long, since they wait for the slow one.
_WAIT, _HOST, _COMPUTE, _STEP = "train/data_wait", "step/host_seconds", "step/compute_seconds", "step/seconds"
_NOISE = 0.01  # of the step: smaller differences say nothing
_HOST_BUSY = 0.8  # of the step: on a GPU, a host that does less is ahead of it
# What is zero where all is well: it is left out then
_QUIET = ("gpu/held_down_", "gpu/xid_", "gpu/ecc_", "gpu/remapped_")


@dataclass(frozen=True)
class Line:
    """A line of the view: what it is about, its text, and whether the text is good or bad."""

    label: str
    text: str
    style: str = ""


class Watch:
    """A run that is followed. Call `poll`, then read `state` and `lines`."""

    def __init__(self, folder: str | Path) -> None:
        """Raises `ConfigError` if the folder is no run's."""
        self.path = find_run(folder)
        self._table = Table(self.path / METRICS, lambda name: not name.endswith("_rank"))
        self._stamps: tuple[float, ...] = ()
        self.run = RunRecord(self.path, self._table)
        self._ranks: tuple[float, dict[str, dict[int, float]]] = (0.0, {})
        self.poll()

    def poll(self) -> None:
        """Read what is new."""
        self._table.poll()
        stamps = tuple(time_of(self.path / name) for name in _RECORDS)
        if stamps != self._stamps:
            self._stamps = stamps
            self.run = RunRecord(self.path, self._table)
        self.state: State = state_of(self.run)

    def lines(self, now: float | None = None) -> list[Line]:
        """The view. What the run does not log is left out. `now`: seconds since 1970."""
        now = time.time() if now is None else now
        style = {"ended": "good", "died": "bad", "silent": "warn", "stopped": "warn"}.get(self.state.name, "")
        written = last_sign(self.path)
        sign = f", wrote {_ago(written, now)}" if written and not self.state.is_over else ""
        found = [Line("state", self.state.text + sign, style)]
        found += [Line(label, text) for label, text in self._numbers(now) if text]
        found += [Line("verdict", _told(event, now), "warn") for event in self.run.verdicts[-_SHOWN:]]
        if self.run.guard:
            found.append(Line("guard", f"objected to {count(len(self.run.guard), 'step')}", "bad"))
        hidden = ("verdict", "command", "save", "best", "end")
        errors = errors_of(self.run)  # of the last start: what it has recovered from is over
        others = [one for one in self.run.events if one.kind not in hidden and (one.kind != "error" or one in errors)]
        return found + [Line(event.kind, _told(event, now)) for event in others[-_SHOWN:]]

    def _numbers(self, now: float) -> Iterator[tuple[str, str]]:
        last = self._table.last
        yield "step", self._progress()
        series = self._table.series
        for name in (loss_name(series), *(n for n in series if n.startswith("validation") and "loss" in n)):
            if name in series:
                yield words(name), f"{short(last[name])}  {sparkline(series[name])}"
        yield (
            "speed",
            ", ".join(f"{short(value)} {words(name)}" for name, value in last.items() if is_speed(name)),
        )
        yield "MFU", _share(last.get("train/mfu"))
        yield "memory", self._memory()
        yield "waiting for data", _share(last.get("train/data_wait"))
        yield "goodput", _share(last.get("train/goodput"))
        yield "slowest rank", self._slowest()
        yield from self._telemetry()
        yield "checkpoint", self._checkpoint(now)

    def _progress(self) -> str:
        """The step of all, and the time that the rest takes at the speed of the last row."""
        step, total = self.run.steps, self.run.plan.get("max_steps")
        if total is None:  # max_epochs: the ranks know it when they have the data
            total = next((one.data.get("steps") for one in reversed(self.run.events) if one.kind == "start"), None)
        if not isinstance(total, int) or total < 1:
            return f"{step:,}"
        text = f"{step:,} of {total:,} ({step / total:.0%})"
        seconds = self._table.last.get("train/step_seconds")
        if self.state.is_over or seconds is None or not math.isfinite(seconds) or step >= total:
            return text
        return f"{text}, {duration((total - step) * seconds)} to go"

    def _memory(self) -> str:
        last = self._table.last
        found = [(word, last.get(f"train/memory_{word}_gib")) for word in ("allocated", "reserved")]
        texts = [f"{value:.1f} GiB {word}" for word, value in found if value is not None]
        return f"at most {', '.join(texts)}" if texts else ""

    def _telemetry(self) -> Iterator[tuple[str, str]]:
        """What the GPUs report: each number's mean over the ranks, with the lowest and the highest."""
        last = self._table.last
        for name, value in last.items():
            if is_telemetry(name, last) and not is_spread(name, last) and (value or not name.startswith(_QUIET)):
                low, high = last.get(f"{name}_min"), last.get(f"{name}_max")
                ends = [] if low is None or high is None else [short(low), short(high)]
                yield words(name), short(value) + (f"  ({' to '.join(ends)})" if len(set(ends)) > 1 else "")

    def _slowest(self) -> str:
        """The rank that is farthest above the median in something, by the last step of ranks.csv."""
        return max(self._worst(name) for name in (_WAIT, _HOST, _COMPUTE))[1]

    def _worst(self, name: str) -> tuple[float, str]:
        """By what share of a step the worst rank is above the median, and that in words; 0 and empty: no rank is."""
        values = self._last_of_ranks().get(name, {})
        if len(values) < 2:
            return 0.0, ""
        rank, middle = max(values, key=lambda one: (values[one], -one)), median(values.values())
        step = 1.0 if name == _WAIT else self._last_of_ranks().get(_STEP, {}).get(rank, math.inf)
        is_ahead = name == _HOST and self.run.plan.get("accelerator") != "cpu" and values[rank] < _HOST_BUSY * step
        excess = (values[rank] - middle) / step
        if excess < _NOISE or is_ahead:
            return 0.0, ""
        text = f"rank {rank}: {words(name)} {short(values[rank])}, the median is {short(middle)}"
        if name == _WAIT:
            text = f"rank {rank} waits for data {values[rank]:.1%} of the time, the median is {middle:.1%}"
        return excess, text

    def _last_of_ranks(self) -> dict[str, dict[int, float]]:
        """Column → rank → its number in the last step of ranks.csv that is whole."""
        path = self.path / RANKS
        stamp = time_of(path)
        if stamp != self._ranks[0]:
            self._ranks = stamp, _last_step(path)
        return self._ranks[1]

    def _checkpoint(self, now: float) -> str:
        steps = self.run.checkpoints
        save = self.run.last_event("save")
        if not steps:
            return "none yet" if not self.state.is_over else "none"
        ago = f", {_ago(save.time, now)}" if save is not None and save.step == steps[-1] else ""
        return f"step {steps[-1]:,}{ago}" + (f"; {count(len(steps), 'checkpoint')} kept" if len(steps) > 1 else "")


def _last_step(path: Path) -> dict[str, dict[int, float]]:
    try:
        with open_regular(path) as file:
            fields = next(readable(csv.reader([file.readline(_RANK_BYTES).decode(errors="replace")])), [])
    except OSError:
        return {}
    if "step" not in fields or "rank" not in fields:
        return {}
    lines = read_text(path, last=_RANK_BYTES).split("\n")[1:-1]  # the first and the last may be cut
    rows = [row for row in readable(csv.reader(lines)) if len(row) == len(fields)]
    found: dict[str, dict[int, float]] = {}
    step, rank = fields.index("step"), fields.index("rank")
    for row in rows:
        if row[step] == rows[-1][step] and row[rank].isdigit():
            for name, text in zip(fields, row, strict=True):
                try:
                    found.setdefault(name, {})[int(row[rank])] = float(text)
                except ValueError:
                    continue
    return found


def _share(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.1%}"


def _told(event: Event, now: float) -> str:
    step = "" if event.step is None else f"step {event.step:,}: "
    return f"{step}{one_line(event.text)} ({_ago(event.time, now)})"


def _ago(seconds: float, now: float) -> str:
    return f"{duration(max(0.0, now - seconds))} ago"


def sparkline(series: Series, width: int = _SPARKS) -> str:
    """A curve in one line of text: the mean of each of so many stretches, from its lowest to its highest."""
    values = [value for value in series.values if math.isfinite(value)]
    if len(values) < 2:
        return ""
    parts = min(width, len(values))
    cuts = [number * len(values) // parts for number in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / ((high - low) or 1)
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


_STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "": ""}


def make_console() -> Console:
    """What is written to. Raises `ConfigError` where rich is not installed."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        raise ConfigError("shardwise watch needs a package: pip install rich") from None
    return Console(highlight=False)


def show_once(watch: Watch, console: Console) -> None:
    """Show the run as it is now."""
    if console.is_terminal:
        console.print(panel(watch, console.width))
    else:
        print(_plain(watch.lines()), flush=True)


def show_until_it_ends(watch: Watch, console: Console, seconds: float) -> None:
    """Show the run every so many seconds, until it is over."""
    if not console.is_terminal:
        _print_until_it_ends(watch, seconds)
        return
    from rich.live import Live

    # The terminal's other screen is not used, so that what was shown last stays when the view ends
    with Live(panel(watch, console.width), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while not watch.state.is_over:
            time.sleep(seconds)
            watch.poll()
            live.update(panel(watch, console.width), refresh=True)


def panel(watch: Watch, width: int) -> RenderableType:
    """The view as a frame with a line for each number, `width` letters wide.

    What is too long for the terminal goes on in the next line. In a narrow one labels are cut, so that half is left.
    """
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="cyan", no_wrap=True, max_width=max(4, width // 2 - 4))
    table.add_column(overflow="fold", ratio=1)
    for line in watch.lines():
        table.add_row(Text(line.label), Text(line.text, style=_STYLES[line.style]))
    return Panel(table, title=Text(watch.run.name), title_align="left", border_style="dim")


def _plain(lines: list[Line]) -> str:
    width = max(len(line.label) for line in lines)
    return "\n".join(f"{line.label:<{width}}  {line.text}" for line in lines)


def _print_until_it_ends(watch: Watch, seconds: float) -> None:
    """Without a terminal: everything once, then a line for each change."""
    print(_plain(watch.lines()), flush=True)
    shown = _key(watch)
    while not watch.state.is_over:
        time.sleep(seconds)
        watch.poll()
        if (key := _key(watch)) != shown:
            shown = key
            print("  ".join(f"{line.label} {line.text}" for line in watch.lines()[:4]), flush=True)


def _key(watch: Watch) -> tuple[str, int | None]:
    return watch.state.name, watch.run.table.step


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
