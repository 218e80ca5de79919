"""Sets the reports of several runs side by side: what differs between them, and their curves in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from shardwise.run_dir.files import write_whole
from shardwise.run_dir.secrets import redact, redact_text
from shardwise.viewer.background import config_of
from shardwise.viewer.chart import COLORS, Curve, draw, range_of_steps
from shardwise.viewer.columns import charts_of
from shardwise.viewer.follow import Series
from shardwise.viewer.page import as_text, flatten, make_page, paragraph, section, table
from shardwise.viewer.record import RunRecord
from shardwise.viewer.report import STATES, final_numbers, headline_of
from shardwise.viewer.state import state_of

_SECTIONS = ("Loss", "Speed", "Memory", "Telemetry", "Other values")
_MOST_CHARTS = 60
_ABSENT = "not there"


def write_comparison(runs: Sequence[RunRecord], output: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(output, make_comparison(runs))


def make_comparison(runs: Sequence[RunRecord]) -> str:
    """The page. The same folders give the same text."""
    names = unique_names(runs)
    differing = differences(runs)
    body = [
        f"<h1>{escape(' and '.join(names) if len(names) < 4 else f'{len(names)} runs')}</h1>\n",
        section("How they ended", _states(runs, names)),
        section(
            "What differs",
            table(differing, ["word", *names]) or paragraph("Their configurations are equal.", "soft"),
        ),
        section("What they came to", table(_numbers(runs), ["", *names])),
        section("Verdicts", _verdicts(runs, names)),
        *(section(name, charts) for name, charts in _charts(runs, names).items()),
    ]
    return make_page(" and ".join(names), "".join(body))


def unique_names(runs: Sequence[RunRecord]) -> list[str]:
    """The runs' names; their paths where two have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """A row for each word of the configurations whose value is not the same in all runs: the word, then its values."""
    values = [flatten(redact(config_of(run))) for run in runs]
    words = dict.fromkeys(word for found in values for word in found)
    rows = [[word, *(as_text(found[word]) if word in found else _ABSENT for found in values)] for word in words if word]
    return [row for row in rows if len(set(row[1:])) > 1]


def _states(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    lines = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        state = state_of(run)
        said = f'<span class="{STATES.get(state.name, "")}">{escape(state.text)}</span>'
        about = escape(" · ".join(headline_of(run)))
        lines.append(f'<p><span class="key c{number % COLORS}"><b>{escape(name)}</b></span> {said} '
                     f'<span class="soft">{about}</span></p>\n')  # fmt: skip
    return "".join(lines)


def _numbers(runs: Sequence[RunRecord]) -> list[list[Any]]:
    values = [final_numbers(run) for run in runs]
    words = dict.fromkeys(word for found in values for word in found)
    return [[word, *(found.get(word, "") for found in values)] for word in words]


def _verdicts(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    rows = [
        [name, "" if event.step is None else event.step, redact_text(event.text)]
        for run, name in zip(runs, names, strict=True)
        for event in run.verdicts[-20:]
    ]
    return table(rows, ["run", "step", ""]) or paragraph("No fault was recorded.", "soft")


def _charts(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, str]:
    """The charts of each section. A curve that all runs may have is one chart, in which each run has its colour."""
    x = range_of_steps([series for run in runs for series in run.table.series.values()])
    titles: dict[tuple[str, str], None] = {}
    curves: dict[tuple[str, str], list[Curve | None]] = {}
    for number, run in enumerate(runs):
        for chart in charts_of(run.table.series):
            for curve in chart.curves:
                place = (chart.section, curve.name)
                titles[place] = None
                found = curves.setdefault(place, [None] * len(runs))
                found[number] = Curve(names[number], curve.series, has_points=curve.has_points)
    pictures = dict.fromkeys(_SECTIONS, "")
    for place in list(titles)[:_MOST_CHARTS]:
        shown = [curve or Curve(name, Series()) for curve, name in zip(curves[place], names, strict=True)]
        pictures[place[0]] += draw(place[1], shown, x)
    return {name: f'<div class="charts">{html}</div>\n' if html else "" for name, html in pictures.items()}
