"""Writes a page about a run, or about several side by side: `shardwise report runs/a [runs/b …]`.

A page is one HTML file with everything that a run's folder says, the verdict first.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, count
from shardwise.run_dir.events import Event, redact, redact_text
from shardwise.run_dir.files import REPORT, write_whole
from shardwise_tools import read_words
from shardwise_tools.viewer.background import classes, command, config_of, environment, plan, profile
from shardwise_tools.viewer.chart import (
    BINS,
    COLORS,
    COLUMNS,
    Axis,
    Chart,
    Curve,
    Mark,
    charts_of,
    draw,
    draw_heat,
    is_speed,
    loss_name,
    parts_of,
    range_of_steps,
    words,
)
from shardwise_tools.viewer.page import as_text, flatten, fold, make_page, paragraph, section, table
from shardwise_tools.viewer.record import RunRecord, Series, find_run, log_tails, read_ranks, read_run
from shardwise_tools.viewer.state import State, duration, errors_of, one_line, state_of

_ALARM_SECONDS = 120  # twice what a run waits for its report
_MOST_CHARTS = 60
# With more pictures than these each gets fewer points, so that the page stays small
_FULL_CHARTS, _FULL_HEATS = 16, 12
_MOST_ROWS = 200  # of a table of events
STATES = {"ended": "good", "died": "bad", "silent": "warn", "stopped": "warn"}


def write_report(run_dir: str | Path, output: Path | None = None) -> Path:
    """Write the report of a run, whole or not at all. Returns its path.

    Raises:
        ConfigError: the folder is no run's.
        OSError: the file cannot be written.
    """
    run = read_run(run_dir)
    path = run.path / REPORT if output is None else output
    write_whole(path, make_report(run))
    return path


def make_report(run: RunRecord) -> str:
    """The page. The same folder gives the same text."""
    state = state_of(run)
    x = range_of_steps(run.table.series.values(), run.steps)
    marks = marks_of(run)
    charts = charts_of(run.table.series)
    shown = [chart for chart in charts[:_MOST_CHARTS] if chart.section != "Telemetry" or not _is_zero(chart)]
    columns = COLUMNS * _FULL_CHARTS // max(_FULL_CHARTS, len(shown))
    heats = _heats(run, x)

    def drawn(name: str) -> str:
        of_section = [chart for chart in shown if chart.section == name]
        pictures = "".join(draw(chart.title, chart.curves, x, marks, columns=columns) for chart in of_section)
        return f'<div class="charts">{pictures}{heats if name == "Telemetry" else ""}</div>\n'

    body = [
        _head(run, state),
        section("Verdict", _ending(run, state), _verdicts(run, state), _numbers(run)),
        section("Loss", drawn("Loss"), _legend(marks)) if run.table.series else "",
        *(section(name, drawn(name)) for name in ("Speed", "Memory") if _has(charts, name)),
        section("Telemetry", drawn("Telemetry"), _zeros(charts)) if heats or _has(charts, "Telemetry") else "",
        section("Other values", drawn("Other values"), _left_out(charts)) if _has(charts, "Other values") else "",
        section("Classes", classes(run)),
        section("What happened", _events(run)),
        section("Profile", *(profile(*found) for found in run.profiles)),
        section("Environment", environment(run)),
        section("Plan", plan(run)),
        section("Command", command(run)),
    ]
    return make_page(f"{run.name}: {state.text}", "".join(body))


def _has(charts: Sequence[Chart], name: str) -> bool:
    return any(chart.section == name for chart in charts)


def _head(run: RunRecord, state: State) -> str:
    return (
        f"<h1>{escape(run.name)}</h1>\n"
        + paragraph(state.text, f"state {STATES.get(state.name, '')}")
        + paragraph(" · ".join(headline_of(run)), "soft")
    )


def headline_of(run: RunRecord) -> list[str]:
    """What kind of run it is, in a few words each."""
    decided = run.plan
    topology = decided.get("topology") or {}
    ranks = topology.get("world_size") or (topology.get("nodes") or 1) * (topology.get("devices") or 0)
    named = [_name(decided.get(key)) for key in ("strategy", "precision")] + [_name(decided.get("module"), "_target_")]
    found = [name for name in named if name]
    if ranks:
        found.append(count(int(ranks), f"{decided.get('accelerator', '')} rank".strip()))
    if isinstance(parameters := run.summary.get("parameters"), int):
        found.append(f"{parameters:,} parameters, {run.summary.get('trained_parameters', parameters):,} trained")
    if run.starts:
        found.append(f"started {_date(run.starts[0])}")
    gpus = run.environment.get("gpus")
    if isinstance(gpus, list) and gpus:
        found.append(str(gpus[0]))
    return found


def _name(node: Any, key: str = "name") -> str:
    return str(node.get(key, "")) if isinstance(node, dict) else ""


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _ending(run: RunRecord, state: State) -> str:
    html = ""
    if state.name in ("died", "silent"):
        first, *others = [redact_text(error.text[-6000:]) for error in errors_of(run)[:8]] or [""]
        html += f"<pre>{escape(first)}</pre>\n" if len(first.splitlines()) > 1 else ""
        html += "".join(fold(one_line(text), text) for text in others)
        html += "".join(
            fold(f"the last lines of {name}", redact_text(text[-20_000:])) for name, text in log_tails(run.path)[:4]
        )
    stop = run.summary.get("stopped_early")
    if isinstance(stop, dict):
        why = f": {stop.get('reason')}" if stop.get("reason") else ""
        html += paragraph(f"stopped early at step {stop.get('step')} by {stop.get('by')}{why}")
    return html


def _verdicts(run: RunRecord, state: State) -> str:
    found = [f"<li>{_at(event)}{escape(redact_text(event.text))}</li>\n" for event in run.verdicts[-40:]]
    if run.guard:
        kinds = sorted({str(row.get("what")) for row in run.guard})
        steps = ", ".join(str(row["step"]) for row in run.guard[:10]) + (", …" if len(run.guard) > 10 else "")
        text = f"the guard objected to {count(len(run.guard), 'step')} ({', '.join(kinds)}): {steps}"
        found.append(f'<li class="bad">{escape(text)}</li>\n')
    if not found:
        return "" if state.name in ("died", "silent") else paragraph("No fault was recorded.", "soft")
    return f'<ul class="verdicts">{"".join(found)}</ul>\n'


def _at(event: Event) -> str:
    return "" if event.step is None else f'<span class="soft">step {event.step:,}: </span>'


_FINAL = {
    "steps": "steps", "training_seconds": "seconds of training", "step_seconds": "seconds a step",
    "mfu": "MFU", "data_wait": "waiting for data", "goodput": "goodput", "peak_memory_gib": "peak memory, GiB",
    "memory_allocated_gib": "allocated at most, GiB",
}  # fmt: skip
_SHARES = ("mfu", "data_wait", "goodput")
_SECONDS = "train/step_seconds"


def final_numbers(run: RunRecord) -> dict[str, Any]:
    """The numbers that a run came to: from its summary, else from its rows, of the speeds the means as there."""
    found: dict[str, Any] = {"steps": run.steps}
    last = run.table.last | _mean_speeds(run.table.series)
    for key, word in _FINAL.items():
        value = run.summary.get(key, last.get(f"train/{key}"))
        if isinstance(value, (int, float)):
            found[word] = f"{value:.1%}" if key in _SHARES else value
    loss = last.get(loss_name(run.table.series))
    if loss is not None:
        found["training loss"] = loss
    found |= {words(key): value for key, value in last.items() if key.startswith("validation/")}
    rates = {key: value for key, value in run.summary.items() if key.endswith("_per_second")} or {
        key.removeprefix("train/"): value for key, value in last.items() if is_speed(key)
    }
    found |= {words(key): value for key, value in rates.items() if isinstance(value, (int, float))}
    more = {key: value for key, value in run.summary.items() if "energy" in key or "joules" in key or "kwh" in key}
    return found | {words(key): value for key, value in more.items() if isinstance(value, (int, float))}


def _mean_speeds(series: dict[str, Series]) -> dict[str, float]:
    """The means over the time of a run's rows, without the first row if there are others: that of step 1 is slow."""
    timed = series.get(_SECONDS, Series())
    rows = list(zip(timed.steps, timed.values, strict=True))
    seconds = {step: value for step, value in rows[min(1, len(rows) - 1) :] if 0 < value < math.inf}
    means = {_SECONDS: sum(seconds.values()) / len(seconds)} if seconds else {}
    for name, column in series.items():
        if is_speed(name) or name in ("train/data_wait", "train/mfu"):
            values = dict(zip(column.steps, column.values, strict=True))
            steps = [step for step in seconds if math.isfinite(values.get(step, math.nan))]
            if steps:
                means[name] = sum(values[step] * seconds[step] for step in steps) / sum(seconds[step] for step in steps)
    return means


def _numbers(run: RunRecord) -> str:
    return table(final_numbers(run).items())


def marks_of(run: RunRecord) -> list[Mark]:
    """Saves, restarts and verdicts, at the steps where they happened."""
    marks = []
    starts = 0
    for event in run.events:
        starts += event.kind == "start"
        if event.step is None:
            continue
        if event.kind == "start" and starts > 1:
            marks.append(Mark("restart", event.step, f"goes on from step {event.step}"))
        elif event.kind in ("save", "verdict"):
            marks.append(Mark(event.kind, event.step, redact_text(event.text)))
    saved = {mark.step for mark in marks if mark.kind == "save"}
    return marks + [Mark("save", step, "a checkpoint") for step in run.checkpoints if step not in saved]


def _legend(marks: Sequence[Mark]) -> str:
    kinds = {mark.kind for mark in marks}
    texts = {"restart": "dashed lines: restarts", "save": "green ticks: checkpoints", "verdict": "triangles: verdicts"}
    return paragraph("; ".join(text for kind, text in texts.items() if kind in kinds), "soft")


def _heats(run: RunRecord, x: Axis) -> str:
    ranks = read_ranks(run.path)
    if ranks.ranks < 2:
        return ""
    changing = {name: values for name, values in ranks.values.items() if len({value for *_, value in values}) > 1}
    bins = BINS * _FULL_HEATS // max(_FULL_HEATS, len(changing))
    return "".join(draw_heat(words(name), values, ranks.ranks, x, bins) for name, values in changing.items())


def _is_zero(chart: Chart) -> bool:
    return not any(value for curve in chart.curves for part in parts_of(curve) for value in part.values)


def _zeros(charts: Sequence[Chart]) -> str:
    """One line for all that was zero at every row, such as errors that did not come."""
    names = [chart.title for chart in charts if chart.section == "Telemetry" and _is_zero(chart)]
    return paragraph(f"always 0: {', '.join(names)}" if names else "", "soft")


def _left_out(charts: Sequence[Chart]) -> str:
    rest = [chart.title for chart in charts[_MOST_CHARTS:]]
    return paragraph(f"{count(len(rest), 'more column')} of metrics.csv: {', '.join(rest)}" if rest else "", "soft")


def _events(run: RunRecord) -> str:
    events = [event for event in run.events if event.kind != "verdict"]
    rows: list[list[Any]] = [
        [_date(event.time), event.kind, "" if event.step is None else event.step, redact_text(event.text[:2000])]
        for event in events[-_MOST_ROWS:]
    ]
    if run.last_event("start") is None:  # a run of an earlier version
        rows = [[_date(start), "start", "", ""] for start in run.starts] + rows
    html = table(rows, ["time", "", "step", ""])
    if len(events) > _MOST_ROWS:
        html = paragraph(f"the last {_MOST_ROWS} of {len(events):,}", "soft") + html
    steps = run.checkpoints
    kept = ", ".join(f"{step:,}" for step in steps[-10:])
    html += paragraph(f"{count(len(steps), 'checkpoint')} in the folder, at step {kept}" if steps else "no checkpoint")
    if len(run.starts) > 1:
        first, last = run.starts[0], run.starts[-1]
        html += paragraph(f"{count(len(run.starts), 'start')}, the last {duration(last - first)} after the first")
    return html


_SECTIONS = ("Loss", "Speed", "Memory", "Telemetry", "Other values")
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
        section("What they came to", table(_numbers_side_by_side(runs), ["", *names])),
        section("Verdicts", _verdicts_side_by_side(runs, names)),
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


def _numbers_side_by_side(runs: Sequence[RunRecord]) -> list[list[Any]]:
    values = [final_numbers(run) for run in runs]
    words = dict.fromkeys(word for found in values for word in found)
    return [[word, *(found.get(word, "") for found in values)] for word in words]


def _verdicts_side_by_side(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
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


HELP = """\
usage: shardwise report RUN [RUN …] [output=FILE]

RUN: a run's folder, runs/<id>, also of a run that goes on or has died.

Writes one HTML file that asks nothing of a network: how the run ended and its verdicts, loss, speed, memory, telemetry
of every rank over time, restarts and saves, profiles, environment, Plan, and the command. Of several runs: what differs
in their configurations, their final numbers and verdicts, and their curves in one picture.

  output=FILE     where it is written (RUN/report.html; of several runs, report.html beside the first one's folder)
"""


@dataclass
class ReportConfig:
    output: str | None = None


def run(words: list[str]) -> None:
    """Write what `words` ask for, and print its path.

    Raises:
        ConfigError: a folder is no run's, or the file cannot be written.
    """
    words = _with_output(words)
    folders, config = read_words(words, ReportConfig)
    if not folders:
        raise ConfigError("report takes one run or several: shardwise report runs/<id>; --help shows how")
    paths = [find_run(folder) for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"{' '.join(folders)}: a run is given twice; name each once")
    standard = paths[0] / REPORT if len(paths) == 1 else paths[0].parent / REPORT
    output = standard if config.output is None else Path(config.output).expanduser().absolute()
    if output.is_dir():
        raise ConfigError(f"output={output} is a folder: give the name of a file in it, such as {output / REPORT}")
    try:
        if len(paths) == 1:
            write_report(paths[0], output)
        else:
            write_comparison([read_run(path) for path in paths], output)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}; give another output=") from None
    print(output)


def _with_output(words: list[str]) -> list[str]:
    """The words, with `--output FILE` and `--output=FILE` as `output=FILE`."""
    found: list[str] = []
    for word in words:
        if found and found[-1] == "--output":
            found[-1] = f"output={word}"
        else:
            found.append(word.removeprefix("--") if word.startswith("--output=") else word)
    if found and found[-1] == "--output":
        raise ConfigError("--output: no file follows; write output=FILE")
    return found


def main(run_dir: str) -> None:
    """At the end of a run: in a process of its own, which ends by itself if the one that waits for it is gone."""
    signal.alarm(_ALARM_SECONDS)
    try:
        write_report(run_dir)
    except (ConfigError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1])
