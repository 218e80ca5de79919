"""Reports a sweep: a table of its runs, and their curves in one picture."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import ExitCode
from shardwise.plan import Plan
from shardwise.run_dir.events import read_events
from shardwise.run_dir.files import METRICS, SUMMARY, read_json, read_rows, write_whole


def swept(jobs: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """For each job, the keys and values in which the jobs differ. `jobs`: each job's overrides."""
    values = [{key.lstrip("+"): value for key, _, value in (word.partition("=") for word in job)} for job in jobs]
    keys = [key for key in values[0] if len({job_values.get(key) for job_values in values}) > 1]
    return [{key: job_values.get(key, "") for key in keys} for job_values in values]


def ended(plan: Plan) -> int | None:
    """The exit code with which a run has ended, by its events; None: it is not over, or will go on."""
    last = next((e for e in reversed(read_events(plan.run_dir)) if e.kind in ("start", "end")), None)
    code = last.data.get("exit_code") if last is not None and last.kind == "end" else None
    return code if isinstance(code, int) and code != ExitCode.saved else None


def report_sweep(jobs: Sequence[Sequence[str]], plans: Sequence[Plan], codes: Sequence[int | None]) -> str:
    """A table of all runs with their values, scores and folders: the best first, failed ones last.

    `codes`: exit codes; None: the run is not over. A picture of the curves is written beside the runs. The score is the
    best of `checkpoint.monitor`, else the last validation loss, else the last training loss.
    """
    rows = []
    for values, plan, code in zip(swept(jobs), plans, codes, strict=True):
        name, score = _score(plan) if code == 0 else ("", None)
        lacking = f"failed, exit code {code}" if code else "no loss was logged"
        lacking = "no end is recorded" if code is None else lacking
        result = lacking if score is None else f"{name} {score:.4g}"
        label = " ".join(f"{key}={value}" for key, value in values.items())
        rows.append((code != 0, score is None, 0.0 if score is None else score, label, result, plan.run_dir))
    sign = -1 if plans[0].checkpoint.monitor and plans[0].checkpoint.mode == "max" else 1
    rows.sort(key=lambda row: (row[0], row[1], sign * row[2]))
    width, result_width = max(len(row[3]) for row in rows), max(len(row[4]) for row in rows)
    lines = [f"{label:<{width}}  {result:<{result_width}}  {run_dir}" for *_, label, result, run_dir in rows]
    if picture := _plot(swept(jobs), plans, codes):
        lines.append(f"curves: {picture}")
    return "\n".join(["", f"the sweep{' so far' * (None in codes)}, best first:", *lines])


def _summary(plan: Plan) -> dict[str, object]:
    try:
        found: dict[str, object] = read_json(Path(plan.run_dir) / SUMMARY)
    except (OSError, ValueError):
        return {}
    return found


def _score(plan: Plan) -> tuple[str, float | None]:
    summary, monitor = _summary(plan), plan.checkpoint.monitor
    best = summary.get("best")
    if monitor and isinstance(best, dict) and isinstance(best.get(monitor), (int, float)):
        return monitor, float(best[monitor])
    for key in ("validation/loss", "val_loss", "val/loss", "train/loss"):
        if isinstance(value := summary.get(key), (int, float)):
            return key, float(value)
    return "", None


def _curve(plan: Plan) -> tuple[str, list[tuple[int, float]]]:
    """The name and points of the curve of the run's score, or of the training loss if that has under two points."""
    rows = read_rows(Path(plan.run_dir) / METRICS)
    curves = {
        key: [(int(row["step"]), float(row[key])) for row in rows if row.get(key)]
        for key in (plan.checkpoint.monitor or "validation/loss", "train/global_batch_loss", "train/loss")
    }
    return next(((key, points) for key, points in curves.items() if len(points) > 1), ("", []))


def _plot(values: list[dict[str, str]], plans: Sequence[Plan], codes: Sequence[int | None]) -> Path | None:
    curves = [(own, *_curve(plan)) for own, plan, code in zip(values, plans, codes, strict=True) if code == 0]
    if not any(points for _, _, points in curves):
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for own, _, points in curves:
        if points:
            axes.plot(*zip(*points, strict=True), label=" ".join(f"{key}={value}" for key, value in own.items()))
    names = sorted({name for _, name, _ in curves if name})
    run_id = re.sub(r"[-_]\d+$", "", plans[0].run_id)
    axes.set(xlabel="step", ylabel=", ".join(names), title=run_id)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path = Path(plans[0].run_dir).parent / f"{run_id}.png"
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    write_whole(path, drawn.getvalue())  # members of an array may end together
    plt.close(figure)
    return path
