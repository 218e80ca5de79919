"""Reads files that a run is still writing: only what is new, and nothing that is only half there."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.run_dir.reading import MOST_IN_LINE, open_regular
from shardwise.run_dir.rows import readable

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
