"""Writes the report of a run: one HTML file with everything that its folder says, the verdict first."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from shardwise.errors import count
from shardwise.run_dir.events import Event
from shardwise.run_dir.files import REPORT, write_whole
from shardwise.run_dir.secrets import redact_text
from shardwise.viewer.background import command, environment, plan, profile
from shardwise.viewer.chart import COLUMNS, Mark, draw, parts_of, range_of_steps
from shardwise.viewer.classes import classes
from shardwise.viewer.columns import Chart, charts_of, is_speed, loss_name, words
from shardwise.viewer.follow import Series
from shardwise.viewer.heat import BINS, draw_heat
from shardwise.viewer.page import fold, make_page, paragraph, section, table
from shardwise.viewer.record import RunRecord, log_tails, read_ranks, read_run
from shardwise.viewer.scale import Axis
from shardwise.viewer.state import State, duration, errors_of, one_line, state_of

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
