"""docs/checkpointing.md: what a save costs, and what a run that goes on has in common with one that never stopped."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.harness.results import read
from benchmarks.pages.markdown import device_of, table, torch_and_commit

SAVING = ["", "step, ms", "training waits for the first save, ms", "for later ones, ms",
          "steps while a save is written", "size, GB", "written at, GB/s", "loaded at, GB/s"]  # fmt: skip


def saving() -> list[str]:
    """How long a save holds the training, and what it costs the steps that are made while it is written."""
    lines: list[str] = []
    for result in read("saving"):
        environment = result["environment"]
        lines += [
            f"{result['ranks']} × {environment['gpus'][0]}, {torch_and_commit(environment)}. `{result['command']}`",
            "",
            *table(SAVING, map(saved, result["cells"])),
            "",
        ]
    return lines


def saved(cell: dict[str, Any]) -> list[str]:
    if "error" in cell:
        return [cell["name"], f"not measured: {cell['error'][:200]}", *[""] * (len(SAVING) - 2)]
    gigabytes, quiet = cell["bytes"] / 1e9, cell["step_seconds"]
    before = cell.get("quiet_seconds", [quiet] * len(cell["behind_seconds"]))
    behind = zip(cell["behind_seconds"], before, strict=True)
    slower = [f"{seconds / quiet - 1:+.1%}" for seconds, quiet in behind if seconds is not None]
    return [
        cell["name"],
        f"{1e3 * quiet:,.1f}",
        f"{1e3 * cell['held_seconds'][0]:,.0f}",
        ", ".join(f"{1e3 * seconds:,.0f}" for seconds in cell["held_seconds"][1:]),
        ", ".join(slower) or "none",
        f"{gigabytes:,.1f}",
        f"{gigabytes / median(cell['write_seconds']):,.2f}",
        f"{gigabytes / cell['load_seconds']:,.2f} ({cell['loaded_ranks']} ranks)",
    ]


def exact() -> list[str]:
    """A run that was stopped and resumed, compared with the one that was not."""
    lines: list[str] = []
    for result in read("exact"):
        settings = result["settings"]
        rows = [
            [name, "the same bits" if not other else "other: " + ", ".join(other)[:200]]
            for name, other in result["unlike"].items()
        ]
        lines += [
            f"{result['ranks']} × {device_of(result, 'CPU ranks', default='cuda')}, "
            f"{torch_and_commit(result['environment'])}. `{result['command']}`: {settings['steps']} steps, stopped "
            f"after {settings['stopped_after']}.",
            "",
            *table(["", "losses, norms, weights, buffers"], rows),
            "",
        ]
    return lines


def resumed() -> list[str]:
    """What was saved under one strategy and resumed under another: the largest deviation of a loss."""
    lines = []
    for result in read("resume"):
        pairs, optimizers = result["pairs"], result["settings"]["optimizers"]
        found: dict[tuple[str, str], list[Any]] = {}
        for pair in pairs:
            found.setdefault((side_of(pair["saved"]), side_of(pair["resumed"])), []).append(pair)
        names = [side_of(side) for side in result["sides"]]
        rows = [[name, *(deviation(found.get((name, other), [])) for other in names)] for name in names]
        lines += [
            f"{device_of(result, 'CPU, gloo', default='cpu')}, {torch_and_commit(result['environment'])}. "
            f"`{result['command']}`. {', '.join(optimizers)}; {len(pairs)} cells; update: at most "
            f"{max(pair['update'] for pair in pairs if 'update' in pair):.1e}.",
            "",
            *table(["saved under ↓, resumed under →", *names], rows),
            "",
        ]
    return lines


def layouts() -> list[str]:
    """Both ways between each layout of tensor, context and pipeline axes and what has none of them."""
    lines = []
    for result in read("layouts"):
        pairs, settings = result["pairs"], result["settings"]
        axes = list(dict.fromkeys(pair["saved"] for pair in pairs if "unlike_straight" in pair))
        without = [name for name in dict.fromkeys(pair["resumed"] for pair in pairs) if name not in axes]
        read_well = sum("error" not in pair and not pair["read_otherwise"] for pair in pairs)
        rows = []
        for name in axes:
            mine = [pair for pair in pairs if pair["saved"] == name]
            others = [pair for pair in mine if pair["resumed"] in axes and pair["resumed"] != name]
            rows.append([
                name,
                of_pairs([pair for pair in mine if pair["resumed"] == name]),
                of_pairs(others),
                *(of_pairs([pair for pair in mine if pair["resumed"] == other]) for other in without),
                *(of_pairs([pair for pair in pairs if (pair["saved"], pair["resumed"]) == (other, name)])
                  for other in without),
            ])  # fmt: skip
        words = [SAYS.get(name, name) for name in without]
        lines += [
            f"{device_of(result, 'CPU, gloo', default='cpu')}, {torch_and_commit(result['environment'])}. "
            f"`{result['command']}`. Saved after {settings['saved_after']} of {settings['steps']} steps; "
            f"{len(pairs)} pairs. In {read_well} of them every weight and every tensor of the optimizer were read to "
            f"the bit.",
            "",
            *table(["", "itself", "two others", *(f"→ {w}" for w in words), *(f"{w} →" for w in words)], rows),
            "",
        ]
    return lines


SAYS = {"one": "one process", "ddp": "ddp 2", "fsdp": "fsdp 2", "zero2": "zero2 2"}


def of_pairs(pairs: list[dict[str, Any]]) -> str:
    """The largest deviation; of a run that went on under its own layout, what has other bits."""
    if not pairs:
        return ""
    if any("error" in pair for pair in pairs):
        return "failed"
    if any(pair["read_otherwise"] for pair in pairs):
        return "read otherwise"
    if "unlike_straight" in pairs[0]:
        return "the same bits" if not pairs[0]["unlike_straight"] else "other bits"
    return f"{max(pair['deviation'] for pair in pairs):.0e}"


def side_of(side: dict[str, Any]) -> str:
    return f"{side['strategy']} {side['ranks']}"


def deviation(pairs: list[Any]) -> str:
    if not pairs:
        return ""
    return "failed" if any("error" in pair for pair in pairs) else f"{max(pair['loss'] for pair in pairs):.0e}"


def direct_storage() -> list[str]:
    """results/direct-storage-<gpu>.json: both ways from a GPU to a file."""
    rows = []
    for result in read("direct-storage"):
        for name in ("through pinned host memory", "cuFile"):
            row = result["rows"][name]
            speeds = [f"{row[key]:.1f}" for key in ("write_gb_per_second", "read_gb_per_second") if key in row]
            rows.append([name, *(speeds or [row["error"], None])])
    return table(["one GPU, its local disk", "writes, GB/s", "reads, GB/s"], rows)


TABLES = {"direct_storage": direct_storage, "saving": saving, "exact": exact, "layouts": layouts, "resumed": resumed}
