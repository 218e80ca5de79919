"""Shows how far the work is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

from shardwise.data.prepare.work import Totals

_LINE_SECONDS = 15.0


def magnitude(value: float, unit: str = "") -> str:
    """`12.3 MB`: with three digits."""
    for letter in ("", "k", "M", "G", "T"):
        if value < 999.5 or letter == "T":
            break
        value /= 1000
    digits = f"{value:.3g}" if value < 100 or letter else f"{value:.0f}"
    return f"{digits} {letter}{unit}".rstrip()


def say(line: str) -> None:
    """Show a line, unless nobody reads it any more: the work goes on without, after `2>&1 | head` for example."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class Progress:
    """`size`: bytes of all input files. `begin`: what earlier starts had done."""

    def __init__(self, size: int, begin: Totals, quiet: bool) -> None:
        self.size, self.quiet = size, quiet
        self._read, self._tokens = begin.read, sum(begin.tokens.values())
        self._start = self._told = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty() and not quiet:
            from tqdm import tqdm

            self._bar = tqdm(total=size, initial=begin.read, unit="B", unit_scale=True, desc="prepare")

    def show(self, totals: Totals) -> None:
        now = time.monotonic()
        seconds = max(now - self._start, 1e-6)
        rate = (totals.read - self._read) / seconds
        documents, tokens = sum(totals.documents.values()), sum(totals.tokens.values())
        words = f"{documents:,} documents, {magnitude((tokens - self._tokens) / seconds)} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update(totals.read - self._bar.n)
        elif not self.quiet and now - self._told > _LINE_SECONDS:
            self._told = now
            left = (self.size - totals.read) / max(rate, 1e-6)
            share = f"{totals.read / max(self.size, 1):.0%}"
            say(f"{share}: {words}, {magnitude(rate, 'B/s')}, {clock(left)} left")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def clock(seconds: float) -> str:
    """`8.4 s`, `2:05`, `1:00:00`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
