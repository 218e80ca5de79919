"""Draws a pipeline's schedule, and the ranks of a mesh."""

from __future__ import annotations

from math import ceil, sqrt
from pathlib import Path
from typing import Any

from shardwise.plan.pipeline_schedule import Timeline
from shardwise.plan.schedule_text import stages_of
from shardwise.plan.topology import Topology

Box = tuple[float, float, float, float]  # x, y, width, height

_GAP = 0.008  # between boxes
_FORWARD = ("#4c72b0", "#8fb0d9", "#2b4a7a", "#b9cfea")  # of the stages of a rank, one after the other
_BACKWARD = ("#dd8452", "#f0b890", "#a85a2c", "#f7d9c4")
_NODES = ("#dbe6f4", "#fbe3d2", "#dcefdf", "#f4dbdc", "#e6e0f0", "#ececec")


def draw_schedule(name: str, timeline: Timeline, path: str | Path) -> None:
    """Write a PNG of time × rank. Raises OSError: it could not be written."""
    ranks = len(timeline.spans)
    chunks = 1 + max(action.stage for own in timeline.spans for action, _, _ in own) // ranks
    figure, axes = _figure(min(24.0, max(9.0, len(timeline.spans[0]) * 0.36)), 1.1 + 0.42 * ranks)
    for position, own in enumerate(timeline.spans):
        for action, begin, end in own:
            colors = _FORWARD if action.kind == "F" else _BACKWARD
            color = colors[action.stage // ranks % len(colors)]
            axes.barh(position, end - begin, left=begin, height=0.9, color=color, edgecolor="white", linewidth=0.6)
            if len(own) <= 120:
                axes.text((begin + end) / 2, position, str(action.micro_batch), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(ranks), [stages_of(position, ranks, chunks) for position in range(ranks)], fontsize=8)
    axes.set(xlim=(0, timeline.total), ylim=(ranks - 0.5, -0.5), xlabel="time")
    axes.set_title(
        f"{name}: blue forward, orange backward, white waiting ({timeline.idle:.1%} of the time)", fontsize=9
    )
    _save(figure, path)


def draw_mesh(topology: Topology, path: str | Path) -> None:
    """Write a PNG of all ranks in nested boxes, one level an axis; the color is that of the node.

    Raises OSError: it could not be written.
    """
    wide = ceil(sqrt(topology.world_size)) * 1.6
    figure, axes = _figure(max(6.0, min(14.0, wide * 1.5)), max(2.5, min(9.0, wide * 0.8)))
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(1, 0))
    in_use = [axis for axis, size in topology.mesh.items() if size > 1]
    axes.set_title(
        f"{' × '.join(f'{axis} {getattr(topology, axis)}' for axis in in_use)}; one color a node", fontsize=9
    )
    _boxes(axes, topology, in_use, list(range(topology.world_size)), (0.0, 0.0, 1.0, 1.0), across=True)
    _save(figure, path)


def _boxes(axes: Any, topology: Topology, left: list[str], ranks: list[int], box: Box, *, across: bool) -> None:
    """Divide a box along the outermost axis that is left, in the order of the layers where that is the pipeline."""
    x, y, width, height = box
    axis = left[0] if left else "shard"
    size = getattr(topology, axis) if left else 1
    for number in range(size):
        group = [rank for rank in ranks if size == 1 or _place(topology, rank, axis) == number]
        step = (width if across else height) / size
        corner = (x + number * step, y) if across else (x, y + number * step)
        part = (corner[0] + _GAP, corner[1] + _GAP, (step if across else width) - 2 * _GAP,
                (height if across else step) - 2 * _GAP)  # fmt: skip
        title = f"stage {number}" if axis == "pipeline" else f"{axis} {number}"
        if len(left) <= 1:
            _rectangle(axes, part, _NODES[group[0] // topology.devices % len(_NODES)])
            text = f"rank {group[0]}" + f"\n{title}" * bool(left)
            axes.text(part[0] + part[2] / 2, part[1] + part[3] / 2, text, ha="center", va="center", fontsize=8)
            continue
        _rectangle(axes, part, "none")
        axes.text(part[0] + _GAP, part[1] + _GAP, title, ha="left", va="top", fontsize=8, color="0.3")
        head = min(0.07, part[3] * 0.25)
        inner = (part[0], part[1] + head, part[2], part[3] - head)
        _boxes(axes, topology, left[1:], group, inner, across=len(left) == 2 or not across)


def _place(topology: Topology, rank: int, axis: str) -> int:
    return topology.pipeline_rank(rank) if axis == "pipeline" else topology.position(rank)[axis]


def _rectangle(axes: Any, box: Box, color: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(box[:2], box[2], box[3], facecolor=color, edgecolor="0.6", linewidth=0.8))


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _save(figure: Any, path: str | Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
