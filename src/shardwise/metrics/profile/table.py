"""A summary as text: where the step goes, kinds of kernels, idle time, the costliest kernels, phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwise.metrics.profile.idle import CAUSES
from shardwise.metrics.profile.kinds import short_name
from shardwise.metrics.profile.summary import ProfileSummary

BAR = 30  # letters that stand for the whole step


def table(summary: ProfileSummary) -> str:
    """Several small tables, one below the other, at most 110 letters wide."""
    sections = [
        _head(summary), _parts(summary), _kinds(summary), _idle(summary), _kernels(summary), _phases(summary),
        [f"note: {note}" for note in summary.notes],
    ]  # fmt: skip
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section))) + "\n"


def _head(summary: ProfileSummary) -> Iterator[str]:
    steps = summary.steps
    numbers = f"step {steps[0].number}" if len(steps) == 1 else f"steps {steps[0].number} to {steps[-1].number}"
    where = ", ".join(filter(None, (summary.device_name or ("CPU" if summary.is_cpu else ""), summary.host_name)))
    yield f"{numbers} of rank {summary.rank}{f' ({where})' if where else ''}: {summary.step.span_ms:.1f} ms a step"
    if len(steps) > 1:
        spans = [f"{step.span_ms:.1f}" for step in steps]
        yield f"each step: {', '.join(spans[:12])}{' …' if len(spans) > 12 else ''} ms"


def _parts(summary: ProfileSummary) -> Iterator[str]:
    step = summary.step
    rows = [
        ("compute", step.compute_ms), ("exposed communication", step.exposed_communication_ms),
        ("copies alone", step.copies_alone_ms), ("idle", step.idle_ms),
    ]  # fmt: skip
    yield from _shares("where the step goes", rows, step.span_ms)
    if step.communication_ms:
        hidden = 1 - step.exposed_communication_ms / step.communication_ms
        yield f"  (communication in all: {step.communication_ms:.2f} ms, {hidden:.0%} of it beside compute)"


def _kinds(summary: ProfileSummary) -> Iterator[str]:
    rows = sorted(((kind, ms) for kind, ms in summary.kinds_ms.items() if ms > 0), key=lambda row: -row[1])
    return _shares("compute by kind of kernel", rows, summary.step.span_ms)


def _idle(summary: ProfileSummary) -> Iterator[str]:
    rows = [(cause.replace("_", " "), getattr(summary.step, f"{cause}_ms")) for cause in CAUSES]
    yield from _shares("idle, by what the host did", rows, summary.step.span_ms)
    for place in summary.idle_places[:6]:
        yield f"  {place.ms:9.2f} ms  {place.cause.replace('_', ' ')}: {_cut(place.place, 70)}"


def _shares(title: str, rows: Iterable[tuple[str, float]], whole: float) -> Iterator[str]:
    rows = list(rows)
    if rows:
        yield f"{title:32}{'ms':>10}{'share':>9}"
    for name, ms in rows:
        share = ms / whole if whole else 0.0
        yield f"  {name:30}{ms:10.2f}{share:9.1%}  {'#' * round(BAR * share)}".rstrip()


def _kernels(summary: ProfileSummary) -> Iterator[str]:
    if summary.kernels:
        title = "costliest operators" if summary.is_cpu else "costliest kernels"
        yield f"{title:20}{'ms':>9}{'calls':>8}{'mean µs':>10}"
    for kernel in summary.kernels:
        figures = f"{kernel.total_ms:9.2f}{calls_of(kernel.calls):>8}{kernel.mean_us:10.1f}"
        yield f"  {kernel.kind:18}{figures}  {short_name(kernel.name)}"


def _phases(summary: ProfileSummary) -> Iterator[str]:
    if summary.phases:
        yield f"{'phases (they overlap)':32}{'host ms':>10}{'device ms':>11}{'calls':>8}"
    for phase in summary.phases:
        yield f"  {phase.name:30}{phase.host_ms:10.2f}{phase.device_ms:11.2f}{calls_of(phase.calls):>8}"


def calls_of(calls: float) -> str:
    """How often in a step: a whole number, or one that several steps have as their mean."""
    return f"{calls:,.0f}" if calls == round(calls) else f"{calls:,.1f}"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else "…" + text[1 - longest :]
