"""Reads a run's folder: every file of it may be missing, cut short by a kill, or written at this moment."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, ExitCode
from shardwise.run_dir import files
from shardwise.run_dir.checkpoints import list_checkpoints, step_of
from shardwise.run_dir.events import Event, read_events
from shardwise.run_dir.files import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    GUARD,
    METRICS,
    MOST_IN_LINE,
    PLAN,
    RANKS,
    STARTS,
    SUMMARY,
    open_regular,
    parse_json,
    profile_summaries,
    rank_logs,
    read_whole,
    readable,
)

_CHUNK = 2**22  # bytes


class FollowedFile:
    """The whole lines of a file that grows at its end, and whose last line may be replaced.

    After every call of `poll` the next one reads from the last line on, so that a long file is read once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None  # the file's number, size and time at the last call
        self._last_offset = 0  # where the last whole line begins
        self._last_line = b""

    def poll(self) -> tuple[bool, Iterator[str]]:
        """Whether the file was written anew, so that all lines come again, and the lines that are new.

        The first new line may replace the last line of the call before: it comes again with more in it.
        """
        try:
            status = self.path.stat()
        except OSError:
            was_there, self._seen = self._seen is not None, None
            return was_there, iter(())
        seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        if seen == self._seen:
            return False, iter(())
        is_new = self._seen is None or seen[0] != self._seen[0] or seen[1] < self._seen[1]
        self._seen = seen
        if is_new:
            self._last_offset, self._last_line = 0, b""
        return is_new, self._lines()

    def _lines(self) -> Iterator[str]:
        try:
            with open_regular(self.path) as file:
                offset = file.seek(self._last_offset)
                repeated, before = self._last_line, b""
                while chunk := file.read(_CHUNK):
                    *lines, before = (before + chunk).split(b"\n")
                    if len(before) > MOST_IN_LINE:
                        return
                    for line in lines:
                        line += b"\n"
                        self._last_offset, self._last_line = offset, line
                        offset += len(line)
                        if line != repeated:
                            yield line.decode(errors="replace")
                        repeated = b""
        except OSError:
            return  # the file is gone; the next call sees that


@dataclass
class Series:
    """The numbers of one column, with the steps at which they were logged."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def drop(self, step: int) -> None:
        """Forget what was logged at this step, if that is the last."""
        if self.steps and self.steps[-1] == step:
            self.steps.pop()
            self.values.pop()


class Table:
    """The columns of a metrics.csv, as far as it is written. `wanted`: which columns are kept."""

    def __init__(self, path: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
        self._file, self._wanted = FollowedFile(path), wanted
        self.step: int | None = None  # of the last row
        self._columns: dict[str, tuple[int, Series]] = {}  # name → its place in a row, and its numbers
        self._step_place: int | None = None

    @property
    def series(self) -> dict[str, Series]:
        """The columns that have a number, in the file's order."""
        return {name: series for name, (_, series) in self._columns.items() if series.steps}

    @property
    def last(self) -> dict[str, float]:
        """The last number of each column."""
        return {name: series.values[-1] for name, series in self.series.items()}

    def poll(self) -> bool:
        """Read what is new. Returns whether anything was."""
        is_new, lines = self._file.poll()
        if is_new:
            self.step, self._step_place, self._columns = None, None, {}
        found = is_new
        rows = readable(csv.reader(lines))
        if self._step_place is None and (fields := next(rows, None)) is not None:
            self._step_place = fields.index("step") if "step" in fields else len(fields)
            kept = [(place, name) for place, name in enumerate(fields) if name != "step" and self._wanted(name)]
            self._columns = {name: (place, Series()) for place, name in kept}
        columns = list(self._columns.values())
        for row in rows:
            found = True
            self._take(row, columns)
        return found

    def _take(self, row: list[str], columns: list[tuple[int, Series]]) -> None:
        try:
            step = int(row[self._step_place])  # type: ignore[index]
        except (ValueError, IndexError):
            return
        if step == self.step:  # the last row has come again, with more in it
            for _, series in columns:
                series.drop(step)
        self.step = step
        try:
            for place, series in columns:
                if text := row[place]:
                    value = float(text)
                    series.steps.append(step)
                    series.values.append(value)
        except (ValueError, IndexError):
            return  # a row that is damaged: what stands before that place is kept


_LOG_LINES = 30


@dataclass
class RunRecord:
    """What a run's folder says, as far as it can be read."""

    path: Path
    table: Table  # metrics.csv

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def plan(self) -> dict[str, Any]:
        return _mapping(read_json(self.path / PLAN))

    @cached_property
    def environment(self) -> dict[str, Any]:
        return _mapping(read_json(self.path / ENVIRONMENT))

    @cached_property
    def config(self) -> str:
        return read_text(self.path / CONFIG)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return _mapping(read_json(self.path / SUMMARY))

    @cached_property
    def starts(self) -> list[float]:
        """When each process of the run was started, in seconds since 1970."""
        found = read_json(self.path / STARTS)
        times = found if isinstance(found, list) else []
        return sorted(float(time) for time in times if isinstance(time, (int, float)) and 0 <= time < 1e11)

    @cached_property
    def events(self) -> list[Event]:
        return said_once(without_refusals(read_events(self.path)))

    @cached_property
    def guard(self) -> list[dict[str, Any]]:
        """The steps that the guard objected to."""
        return [row for row in read_json_lines(self.path / GUARD) if isinstance(row.get("step"), int)]

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        try:
            return [step_of(path) for path in list_checkpoints(self.path)]
        except OSError:
            return []

    @cached_property
    def best(self) -> dict[str, Any]:
        return _mapping(read_json(self.path / CHECKPOINTS / BEST))

    @cached_property
    def profiles(self) -> list[tuple[Path, dict[str, Any]]]:
        """The folder and the summary of each profile, the earliest first."""
        read = [(path.parent, _mapping(read_json(path))) for path in profile_summaries(self.path)]
        return [(folder, summary) for folder, summary in read if summary]

    @property
    def steps(self) -> int:
        """The steps that the run has made, as far as is known."""
        made = [self.table.step or 0, *self.checkpoints[-1:], self.summary.get("steps")]
        return max(value for value in made if isinstance(value, int))

    @property
    def verdicts(self) -> list[Event]:
        return [event for event in self.events if event.kind == "verdict"]

    def last_event(self, *kinds: str) -> Event | None:
        return next((event for event in reversed(self.events) if event.kind in kinds), None)


def without_refusals(events: list[Event]) -> list[Event]:
    """The events of a run without later commands that were refused before they trained: they changed nothing."""
    kept: list[Event] = []
    command: int | None = None  # where the last command is that has not trained yet
    for event in events:
        if event.kind == "command":
            command = len(kept)
        elif event.kind == "start":
            command = None
        kept.append(event)
        if event.kind == "end" and event.data.get("exit_code") == ExitCode.user_error and command:
            del kept[command:]
    return kept


def said_once(events: list[Event]) -> list[Event]:
    """The events of a run without errors of ranks that the launcher has repeated, or another rank of the same start."""
    kept: list[Event] = []
    said: dict[str, int] = {}  # an error's text → its place
    for event in events:
        if event.kind in ("command", "restart"):
            said = {}
        if event.kind == "error":
            if event.text in said:
                before = kept[said[event.text]]
                kept[said[event.text]] = event if "rank" in before.data and "rank" not in event.data else before
                continue
            said[event.text] = len(kept)
        kept.append(event)
    return kept


def read_run(folder: str | Path) -> RunRecord:
    """A run's record, with all columns of its metrics.csv.

    Raises:
        ConfigError: the folder is no run's.
    """
    path = find_run(folder)
    record = RunRecord(path, Table(path / METRICS, lambda name: not name.endswith(("_min_rank", "_max_rank"))))
    record.table.poll()
    return record


def find_run(folder: str | Path) -> Path:
    """The path of a run's folder.

    Raises:
        ConfigError: there is no such folder, or it holds none of a run's files.
    """
    path = Path(folder).expanduser().absolute()
    if path.is_file():
        raise ConfigError(
            f"{folder} is a file: give the folders of runs, such as runs/<id>; runs/*/ means folders alone"
        )
    if not path.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; give runs/<id>")
    names = (CONFIG, PLAN, METRICS, SUMMARY, CHECKPOINTS)
    if not any((path / name).exists() for name in names):
        raise ConfigError(f"{folder} is no run's folder: it has none of {', '.join(names)}; give runs/<id>")
    return path


@dataclass
class RankTable:
    """The columns of ranks.csv: what each rank measured."""

    steps: list[int] = field(default_factory=list)  # in order, each once
    ranks: int = 0
    values: dict[str, list[tuple[int, int, float]]] = field(default_factory=dict)  # column → (step, rank, value)


def read_ranks(path: Path) -> RankTable:
    """The numbers of all ranks of a run; an empty table where there are none."""
    table, steps = RankTable(), dict[int, None]()
    _, lines = FollowedFile(path / RANKS).poll()
    rows = readable(csv.reader(lines))
    fields = next(rows, [])
    if "step" not in fields or "rank" not in fields:
        return table
    step_place, rank_place = fields.index("step"), fields.index("rank")
    kept = [(place, name) for place, name in enumerate(fields) if name not in ("step", "rank", "time", "")]
    columns: dict[str, list[tuple[int, int, float]]] = {name: [] for _, name in kept}
    for row in rows:
        try:
            step, rank = int(row[step_place]), int(row[rank_place])
            numbers = [(name, float(row[place])) for place, name in kept if row[place]]
        except (ValueError, IndexError):
            continue
        steps[step] = None
        table.ranks = max(table.ranks, rank + 1)
        for name, value in numbers:
            columns[name].append((step, rank, value))
    table.steps = sorted(steps)
    table.values = {name: found for name, found in columns.items() if found}
    return table


def log_tails(path: Path) -> list[tuple[str, str]]:
    """The name and the last lines of each rank's log that holds a traceback or a fatal error; rank 0's comes first."""
    found = []
    for log in sorted(rank_logs(path)):
        text = read_text(log, last=2**16)
        if "Traceback (most recent call last)" in text or "Fatal Python error" in text or "Error:" in text:
            found.append((log.name, "\n".join(text.splitlines()[-_LOG_LINES:])))
    return found


def read_text(path: Path, last: int | None = None) -> str:
    """A file's text, or its last bytes; empty where it cannot be read."""
    try:
        return read_whole(path, last).decode(errors="replace")
    except OSError:
        return ""


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where it is missing or damaged."""
    try:
        return files.read_json(path)
    except (OSError, ValueError):
        return None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The mappings of a file with one a line; damaged lines are left out."""
    rows = []
    for line in read_text(path).splitlines():
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
