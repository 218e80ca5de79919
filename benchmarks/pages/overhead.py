"""docs/overhead.md: what the Trainer costs, on every machine where it was measured."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.results import read
from benchmarks.pages.markdown import commits_of, device_of, table, versions

QUIET = (
    " *Quiet*: a tenth of all stretches of ten steps was at least as fast, in the best round: what a step takes while "
    "no other program uses the machine. *CPU*: CPU time of one rank's process."
)


def page() -> list[str]:
    """No lines where nothing has been measured."""
    if not (results := read("overhead")):
        return []
    return [
        "# What the Trainer costs",
        "",
        "Made by `python benchmarks/report.py` from `benchmarks/results/overhead-*.json`; measured by `make overhead`. "
        "The same module on the same batch in a plain PyTorch loop (its own loader, clipping, DDP where there are "
        "several ranks, nothing logged), under stock Lightning, and here with everything that a run does: guard, "
        "meter, metrics.csv. The contenders take turns, round after round; a step's time is the median of the rounds. "
        "Where the rounds differ much, other programs were using the machine: compare *quiet* there.",
        "",
        *(line for result in results for line in machine(result)),
    ]


def machine(result: dict[str, Any]) -> list[str]:
    environment, parts = result["environment"], result["parts"]

    def begin_with(section: str) -> dict[str, Any]:
        return {name: part for name, part in parts.items() if name.startswith(section)}

    small = [name for name in parts if not name.startswith(("llm", "sync", "watching"))]
    return [
        f"## {result['ranks']} × {device_of(result, 'CPU', default='cuda')}",
        "",
        f"{versions(environment)}, {environment['cpus']} CPU cores, commits {commits_of(parts.values())}. "
        f"`{result['command']}`",
        "",
        *(line for name in small for line in small_steps(name, parts[name])),
        *language_models(begin_with("llm")),
        *deferred_sync(begin_with("sync")),
        *watching(begin_with("watching")),
    ]


def small_steps(name: str, part: dict[str, Any]) -> list[str]:
    """Steps that are all overhead, or short ones."""
    size, quiet = part["size"], name == "host"
    columns = ["", "µs per step", "lowest to highest round", "beyond plain"]
    rows = [small_row(who, row, part["contenders"]["plain loop"], quiet)
            for who, row in part["contenders"].items() if "seconds_per_step" in row]  # fmt: skip
    return [
        f"{what_is_small(name, part)}; {size['timed']} steps after {size['warm_up']}, {rounds_of(part)} rounds."
        + QUIET * quiet,
        "",
        *table([*columns, *["quiet, µs", "quiet, beyond plain", "CPU, µs"] * quiet], rows),
        "",
        *unmeasured({name: part}),
    ]


def what_is_small(name: str, part: dict[str, Any]) -> str:
    size = part["size"]
    layers = f"{size['layers'] + 1} layers of {size['width']}"
    if name == "host":
        return f"**A step bound by the host**: {layers}, fp32"
    precision = next(w.split("=")[1] for w in part["overrides"] if w.startswith("precision="))
    return (
        f"**A step of which the GPU needs 2 ms**, {name.removeprefix('gpu2ms ')}: {layers}, {precision}, "
        f"{part.get('rows', 0):,} rows; the host of the plain loop issues such a step in "
        f"{part.get('plain_host_ms', float('nan')):.2f} ms"
        + ". Stock Lightning's optimizer is not fused: in bf16 it refuses to clip with a fused one"
        * (precision == "bf16")
    )


def small_row(who: str, row: dict[str, Any], plain: dict[str, Any], quiet: bool) -> list[str]:
    mine, lowest, highest = (row[key] * 1e6 for key in ("seconds_per_step", "lowest", "highest"))
    cells = [who, f"{mine:,.0f}", f"{lowest:,.0f} to {highest:,.0f}", beyond(row, plain, "seconds_per_step")]
    if quiet:
        key = "quiet_seconds_per_step"
        cells += [f"{row[key] * 1e6:,.0f}", beyond(row, plain, key), f"{row['cpu_seconds_per_step'] * 1e6:,.0f}"]
    return cells


def beyond(row: dict[str, Any], plain: dict[str, Any], key: str) -> str:
    """How much longer than the plain loop, in microseconds and as a share."""
    if key not in plain or row is plain:
        return ""
    return f"{(row[key] - plain[key]) * 1e6:+,.0f} ({row[key] / plain[key] - 1:+.1%})"


def rounds_of(part: dict[str, Any]) -> int:
    return max(len(row.get("rounds", [])) for row in part["contenders"].values())


def language_models(parts: dict[str, dict[str, Any]]) -> list[str]:
    if not parts:
        return []
    size = next(iter(parts.values()))["size"]
    columns = ["", "plain loop, ms", "without clipping, ms", "shardwise, ms", "over plain", "spread of the rounds"]
    return [
        "**A step of a language model**: eager bf16, sequence 2,048, fused AdamW, accumulation 1, random tokens in "
        f"memory; {size['timed']} steps after {size['warm_up']}, {size['rounds']} rounds. The plain loop has the same "
        "model class, bf16 copies of fp32 masters per layer (`fsdp`: `fully_shard` under the same policies).",
        "",
        *table(columns, (language_model(name, part["contenders"]) for name, part in parts.items())),
        "",
        *unmeasured(parts),
    ]


def language_model(name: str, contenders: dict[str, Any]) -> list[str]:
    plain, bare, mine = (
        contenders[who] for who in ("plain loop", "plain loop, no clipping", "shardwise, logging every 10")
    )
    ms = [f"{r['seconds_per_step'] * 1e3:,.2f}" if "seconds_per_step" in r else "" for r in (plain, bare, mine)]
    over = spread = ""
    if ms[0] and ms[2]:
        over = f"{mine['seconds_per_step'] / plain['seconds_per_step'] - 1:+.2%}"
        spread = ", ".join(f"{(r['highest'] - r['lowest']) / r['lowest']:.2%}" for r in (plain, mine))
    return [name.removeprefix("llm "), *ms, over, spread]


def deferred_sync(parts: dict[str, dict[str, Any]]) -> list[str]:
    """Both settings of `strategy.defer_gradient_sync`: time and memory."""
    if not parts:
        return []
    size = next(iter(parts.values()))["size"]
    columns = ["", "every micro-batch, ms a step", "deferred, ms", "deferred over it", "peak allocated GiB", "deferred"]
    rows = []
    for name, part in parts.items():
        both = [part["contenders"][who] for who in ("every micro-batch", "deferred")]
        if all("seconds_per_step" in row for row in both):
            ms = [row["seconds_per_step"] * 4e3 for row in both]
            peaks = [f"{row['peak_allocated_gib']:.2f}" if "peak_allocated_gib" in row else "" for row in both]
            rows.append([name.split()[1], *(f"{x:,.1f}" for x in ms), f"{ms[1] / ms[0] - 1:+.1%}", *peaks])
    return [
        "**`strategy.defer_gradient_sync`**: these models under `fsdp`, accumulation 4, reduced in every micro-batch "
        f"(`false`) or at the window's end (`true`, which keeps unsharded gradients); {size['timed'] // 4} steps after "
        f"{size['warm_up'] // 4}, {size['rounds']} rounds.",
        "",
        *table(columns, rows),
        "",
        *unmeasured(parts),
    ]


def watching(parts: dict[str, dict[str, Any]]) -> list[str]:
    """What telemetry, verdicts and Prometheus take together."""
    if not parts:
        return []
    rows = []
    for name, part in parts.items():
        off, on = (part["contenders"].get(who, {}) for who in ("without", "with telemetry, verdicts and Prometheus"))
        if "seconds_per_step" in on and "seconds_per_step" in off:
            spread = ", ".join(f"{(r['highest'] - r['lowest']) / r['lowest']:.2%}" for r in (off, on))
            rows.append([
                name.removeprefix("watching llm ").replace("watching host", "the step bound by the host"),
                *(f"{r['seconds_per_step'] * 1e3:,.3f}" for r in (off, on)),
                f"{on['seconds_per_step'] / off['seconds_per_step'] - 1:+.2%}", spread,
            ])  # fmt: skip
    return [
        "**Telemetry, verdicts and `metrics.prometheus=textfile`**: the same steps here with all three and without, a "
        "row every 10 steps, in turns.",
        "",
        *table(["", "without, ms", "with, ms", "more", "spread of the rounds"], rows),
        "",
        *unmeasured(parts),
    ]


def unmeasured(parts: dict[str, dict[str, Any]]) -> list[str]:
    """What went wrong, a line each."""
    lines = [
        f"- {name}, {who}: {' '.join(str(row['error']).split())[:300]}"
        for name, part in parts.items()
        for who, row in [*part["contenders"].items(), ("the whole", part)]
        if "error" in row
    ]
    return ["Not measured, or not in every round:", "", *lines, ""] if lines else []
