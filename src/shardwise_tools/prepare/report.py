"""Shows how far the work is, and at its end what came out: report.json and report.md beside the shards."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.data.shard_index import ENDS_DTYPE
from shardwise.errors import count
from shardwise_tools.prepare.work import INPUTS, LONE, SKIPPED, Totals

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


REPORT, PAGE = "report.json", "report.md"
_BAR = 40  # characters of the longest bar
_SHOWN = 20  # of what was skipped

Histogram = list[tuple[int, int, int]]  # (from, below, documents)


def write_report(folder: Path, report: dict[str, Any], splits: dict[str, list[dict[str, Any]]]) -> None:
    """Write both files. `report` gets the histogram of lengths."""
    histogram = length_histogram(folder, splits)
    report["lengths_in_tokens"] = [{"from": a, "below": b, "documents": n} for a, b, n in histogram]
    (folder / REPORT).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", "utf-8", LONE)
    (folder / PAGE).write_text("\n".join(_page(report, folder)) + "\n", "utf-8", LONE)


def length_histogram(folder: Path, splits: dict[str, list[dict[str, Any]]]) -> Histogram:
    """Documents of all splits by their length in tokens, in powers of two."""
    counts = np.zeros(64, np.int64)
    for shards in splits.values():
        open_since = 0  # tokens of a document that the shards before have begun
        for shard in shards:
            ends = np.fromfile(folder / shard["ends"], ENDS_DTYPE).astype(np.int64)
            if not len(ends):
                open_since += shard["tokens"]
                continue
            lengths = np.diff(ends, prepend=-open_since)
            counts += _by_power(lengths)
            open_since = shard["tokens"] - int(ends[-1])
    used = np.flatnonzero(counts)
    return [(1 << n, 1 << n + 1, int(counts[n])) for n in range(used[0], used[-1] + 1)]


def _by_power(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    powers = np.frexp(lengths)[1] - 1  # floor(log2)
    return np.bincount(powers, minlength=64)


def bars(histogram: Histogram) -> list[str]:
    """The histogram as lines of text."""
    most = max(number for _, _, number in histogram)
    width = max(len(f"{below - 1:,}") for _, below, _ in histogram)
    lines = []
    for begin, below, number in histogram:
        bar = "█" * max(round(number * _BAR / most), number > 0)
        lines.append(f"{begin:>{width},} … {below - 1:>{width},}  {bar:<{_BAR}}  {number:,}")
    return lines


def summary(report: dict[str, Any], histogram: bool = True) -> list[str]:
    """What the terminal shows at the end."""
    documents, tokens, size = report["documents"], report["tokens"], report["text_bytes"]
    parts = [f"{name} {documents[name]:,} documents, {tokens[name]:,} tokens" for name in tokens if tokens[name]]
    lines = [
        "; ".join(parts),
        f"{sum(size.values()) / max(sum(tokens.values()), 1):.2f} bytes a token, vocabulary {report['vocab_size']:,}",
    ]
    if histogram:
        lengths = [(row["from"], row["below"], row["documents"]) for row in report["lengths_in_tokens"]]
        lines += ["", "documents by their tokens:", *bars(lengths), ""]
    lines.append(rate_line(report))
    lines += report["notes"]
    return lines


def rate_line(report: dict[str, Any]) -> str:
    rate = report["rate"]
    bare = rate["bare_tokenizer_bytes_per_second"]
    return (
        f"{clock(rate['seconds'])} with {count(rate['processes'], 'process')}: "
        f"{magnitude(rate['bytes_per_second'], 'B/s')} of text, {magnitude(rate['tokens_per_second'])} tokens/s"
        + (f"; the bare tokenizer in as many processes: {magnitude(bare, 'B/s')}" if bare else "")
    )


def _page(report: dict[str, Any], folder: Path) -> list[str]:
    lengths = [(row["from"], row["below"], row["documents"]) for row in report["lengths_in_tokens"]]
    lines = ["# Token shards", "", *(f"{line}  " for line in summary(report, histogram=False)), ""]
    lines += ["## Documents by their tokens", "", "```", *bars(lengths), "```", ""]
    lines += ["## Options", "", *(f"- `{key}={value}`" for key, value in report["options"].items()), ""]
    lines += [
        "## Inputs",
        "",
        f"{count(report['inputs']['files'], 'file')}, {report['inputs']['bytes']:,} bytes: {INPUTS}",
    ]
    lines += ["", "## What was left out", ""]
    if not report["skipped"] and not report["other_endings"]["files"]:
        return [*lines, "nothing"]
    if report["skipped"]:
        lines += [f"{count(report['skipped'], 'document or file')}: {SKIPPED}", ""]
        with (folder / SKIPPED).open(encoding="utf-8") as file:
            rows = [json.loads(line) for _, line in zip(range(_SHOWN), file, strict=False)]
        lines += [f"- `{row['path']}:{row['line']}`: {row['rule']}" for row in rows]
        lines += ["- …"] if report["skipped"] > _SHOWN else []
    if others := report["other_endings"]["files"]:
        lines += [f"- {count(others, 'file')} with other endings, such as `{report['other_endings']['first']}`"]
    return lines
