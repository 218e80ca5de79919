"""Sums over intervals of time: unions, overlaps, and who was active when. Times are ns; an interval has its begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.metrics.profile.trace import Times


@dataclass(frozen=True)
class Union:
    """Intervals that neither overlap nor touch, in order."""

    begin: Times
    end: Times

    @staticmethod
    def of(begin: Times, end: Times) -> Union:
        keep = end > begin
        begin, end = begin[keep], end[keep]
        if not len(begin):
            return Union(begin, end)
        order = np.argsort(begin, kind="stable")
        begin, reached = begin[order], np.maximum.accumulate(end[order])
        is_first = np.append(True, begin[1:] > reached[:-1])
        is_last = np.append(is_first[1:], True)
        return Union(begin[is_first], reached[is_last])

    def clipped(self, begin: int, end: int) -> Union:
        return Union.of(np.clip(self.begin, begin, end), np.clip(self.end, begin, end))

    def gaps(self, begin: int, end: int) -> Union:
        """What of [begin, end) is in no interval."""
        inside = self.clipped(begin, end)
        return Union.of(np.append(begin, inside.end), np.append(inside.begin, end))

    def overlap(self, begin: Times, end: Times) -> Times:
        """ns of each [begin, end) that lie in the intervals."""
        return np.asarray(np.maximum(self._until(np.maximum(end, begin)) - self._until(begin), 0), dtype=np.int64)

    def has(self, times: Times) -> NDArray[np.bool_]:
        """Which times lie in an interval."""
        at = np.searchsorted(self.begin, times, side="right") - 1
        return (at >= 0) & (times < self.end[np.maximum(at, 0)]) if len(self.begin) else np.zeros(len(times), bool)

    @property
    def total(self) -> int:
        return int((self.end - self.begin).sum())

    def _until(self, times: Times) -> Times:
        """ns of the intervals that lie before each time."""
        lengths = self.end - self.begin
        at = np.searchsorted(self.begin, times, side="right")
        before = np.append(0, np.cumsum(lengths))[at]
        last = np.maximum(at - 1, 0)
        beyond = self.end[last] - np.minimum(times, self.end[last]) if len(lengths) else np.zeros(len(times), np.int64)
        return np.asarray(before - np.where(at > 0, beyond, 0), dtype=np.int64)


@dataclass(frozen=True)
class Activity:
    """Between two neighbouring edges nothing begins or ends: how many events of each kind were under way there."""

    lengths: Times  # ns, m
    active: NDArray[np.int64]  # kinds x m

    @staticmethod
    def of(begin: Times, end: Times, kind: Times, kinds: int, window: tuple[int, int]) -> Activity:
        begin, end = np.clip(begin, *window), np.clip(end, *window)
        edges = np.unique(np.concatenate([begin, end, np.array(window, dtype=np.int64)]))
        change = np.zeros((kinds, len(edges)), dtype=np.int64)
        np.add.at(change, (kind, np.searchsorted(edges, begin)), 1)
        np.add.at(change, (kind, np.searchsorted(edges, end)), -1)
        return Activity(np.diff(edges), np.cumsum(change, axis=1)[:, :-1])

    def total(self, mask: NDArray[np.bool_]) -> int:
        return int(self.lengths[mask].sum())

    def shares(self, rows: list[int]) -> NDArray[np.float64]:
        """ns of each of these kinds. Where several run at once, each gets its part of that time, so that the sum is
        that of the union."""
        active = self.active[rows]
        running = active.sum(axis=0)
        weight = np.divide(self.lengths, running, out=np.zeros(len(running)), where=running > 0)
        return np.asarray((active * weight).sum(axis=1))
