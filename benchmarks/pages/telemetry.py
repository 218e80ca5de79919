"""docs/telemetry.md: what NVML's calls take, and what GPUs report of runs at their power limit."""

from __future__ import annotations

from statistics import mean
from typing import Any

from benchmarks.harness.results import read
from benchmarks.pages.markdown import table

POWER = "gpu/power_watts"
EVERY = 5  # steps between two rows: the first row after the profile has its step
FELT = {
    POWER: ("power, W", 1.0), "gpu/sm_clock_mhz": ("clock, MHz", 1.0),
    "gpu/held_down_by_power": ("held down by power, %", 100.0), "gpu/temperature_celsius": ("chip, °C", 1.0),
    "gpu/memory_temperature_celsius": ("memory, °C", 1.0), "gpu/sm_active": ("SMs active, %", 100.0),
    "gpu/tensor_active": ("tensor cores, %", 100.0), "gpu/dram_active": ("memory active, %", 100.0),
}  # fmt: skip


def calls() -> list[str]:
    """results/telemetry-<gpu>.json: milliseconds of each call, and the checks beside them."""
    lines = []
    for result in (one for one in read("telemetry") if "gpu" in one):
        checks = result["checks"]
        took = {name.removesuffix("_ms"): ms for name, ms in checks["calls"].items() if name.endswith("_ms")}
        longest, others = (names := sorted(took, key=lambda name: -took[name]))[:3], names[3:]
        energy, model, host = checks["energy"], checks["model step"], checks["host-bound step"]
        lines += [
            f"On one {result['gpu']} (`python benchmarks/gpu_checks/telemetry.py`):",
            "",
            f"- A look takes {sum(took.values()):.1f} ms in its thread; "
            + ", ".join(f"{name.replace('_', ' ')} {took[name]:.1f}" for name in longest)
            + f", each of the others at most {max(took[name] for name in others):.1f}. None failed; GPM could be read "
            + ("by root; an ordinary user was not tried." if checks["gpm"]["root"] else "by an ordinary user."),
            f"- The energy counter and the integral of {energy['samples']:,} samples of power over 20 s of changing "
            f"load are {abs(energy['off_by']):.1%} apart.",
            f"- A language model's step of {model['off_ms']:.0f} ms took {model['more']:+.2%} with telemetry; a step "
            f"of {host['off_ms']:.1f} ms that does nothing but launch tiny kernels {host['more']:+.1%}.",
        ]
    return lines or ["Not run yet."]


def power_limit() -> list[str]:
    """results/profiles-<gpu>-x<ranks>.json: means of the rows after the profile."""
    rows = []
    for result in read("profiles"):
        profiled = int(next(word for word in result["words"] if word.startswith("profile.start=")).split("=")[1])
        for name, card in result["cards"].items():
            after = [row for row in card.get("rows", []) if int(row["step"]) > profiled + EVERY]
            if after and all(key in row for row in after for key in FELT):
                watts, speed = (mean(float(row[key]) for row in after) for key in (POWER, "train/tokens_per_second"))
                joules = result["ranks"] * watts / speed
                rows.append([name.replace("-", " under "), result["ranks"], *_means(after), f"{joules * 1e3:.1f}"])
    heads = [words for words, _ in FELT.values()]
    return table(["", "GPUs", *heads, "mJ a token"], rows) if rows else ["Not run yet."]


def _means(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{factor * mean(float(row[key]) for row in rows):,.0f}" for key, (_, factor) in FELT.items()]


TABLES = {"telemetry_calls": calls, "power_limit": power_limit}
