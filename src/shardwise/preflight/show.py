"""Shows what a preflight found: a table, JSON, and a picture of the rates between all pairs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.preflight.node_report import NodeReport
from shardwise.preflight.verdict import Found, Verdict

_COLUMNS = ("node", "GPUs", "ECC", "MHz", "W", "disk GiB", "skew ms", "in node GB/s", "between GB/s", "verdict")


def table(found: Found, verdict: Verdict) -> str:
    """A table with a row for each node. `between` has the median and the least rate with other nodes."""
    rows = [_COLUMNS, *(_row(found, verdict, node) for node in range(len(found.names)))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "─" * max(map(len, lines))
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def _row(found: Found, verdict: Verdict, node: int) -> tuple[str, ...]:
    report, rate = found.reports.get(node), found.in_node.get(node)
    met = [rate for pair, rate in found.pairs.items() if node in pair] if len(found.names) > 1 else []
    skew = found.skews.get(node)
    return (
        found.names[node],
        *(_of_gpus(report) if report and found.cuda else ("–",) * 4),
        f"{min(report.free_gib.values()):,.0f}" if report and report.free_gib else "–",
        f"{round(skew[0] * 1e3, 1) + 0:.1f}" if skew else "–",
        f"{rate:.3g}" if rate else "–",
        f"{median(met):.3g} / {min(met):.3g}" if met else "–",
        _verdict(verdict, node),
    )


def _verdict(verdict: Verdict, node: int) -> str:
    if node in verdict.bad:
        return "bad"
    return "see below" if any(problem.node is None for problem in verdict.problems) else "well"


def _of_gpus(report: NodeReport) -> tuple[str, str, str, str]:
    def each(attribute: str, words: dict[Any, str] | None = None) -> str:
        values = dict.fromkeys(getattr(gpu, attribute) for gpu in report.gpus)
        return " ".join((words or {}).get(v, "–" if v is None else f"{v:g}" if isinstance(v, float) else str(v))
                        for v in values) or "–"  # fmt: skip

    names = each("name").replace("NVIDIA ", "")
    return (f"{len(report.gpus)} × {names}", each("ecc", {True: "on", False: "off"}),
            each("max_clock_mhz"), each("power_limit_w"))  # fmt: skip


def save_json(found: Found, verdict: Verdict, seconds: float, path: Path) -> None:
    names = found.names
    record = {
        "seconds": round(seconds, 1),
        "exit_code": int(verdict.code),
        "bad_nodes": [names[node] for node in verdict.bad],
        "problems": [{"node": None if p.node is None else names[p.node], "text": p.text} for p in verdict.problems],
        "ranks_a_node": found.devices,
        "nodes": [
            {
                "name": name,
                "skew_seconds": found.skews.get(node, (None, None))[0],
                "in_node_gb_per_second": found.in_node.get(node),
                "look": dataclasses.asdict(found.reports[node]) if node in found.reports else None,
            }
            for node, name in enumerate(names)
        ],
        "pairs_are_of": "nodes" if len(names) > 1 else "GPUs" if found.cuda else "processes",
        "pairs_gb_per_second": [[a, b, rate] for (a, b), rate in sorted(found.pairs.items())],
    }
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def save_picture(found: Found, path: Path) -> None:
    """Draw the rates as a matrix: dark is slow, and white is a pair that was not measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    one = len(found.names) == 1
    unit = "GPU" if found.cuda else "process"
    labels = [f"{unit} {n}" for n in range(found.devices)] if one else found.names
    rates = [[float("nan")] * len(labels) for _ in labels]
    for (a, b), rate in found.pairs.items():
        rates[a][b] = rates[b][a] = rate
    side = max(4.0, min(16.0, 0.6 * len(labels) + 2))
    figure, axes = plt.subplots(figsize=(side + 1, side))
    image = axes.imshow(rates, vmin=0, cmap="viridis")
    axes.set_xticks(range(len(labels)), labels, rotation=90)
    axes.set_yticks(range(len(labels)), labels)
    if len(labels) <= 16:
        most = max(found.pairs.values(), default=0)
        for (a, b), rate in found.pairs.items():
            for x, y in ((a, b), (b, a)):
                axes.text(x, y, f"{rate:.3g}", ha="center", va="center", fontsize=8,
                          color="white" if rate < 0.6 * most else "black")  # fmt: skip
    axes.set_title(f"GB/s in one direction, between {'those of ' + found.names[0] if one else 'nodes'}")
    figure.colorbar(image)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
