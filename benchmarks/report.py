"""Writes docs/gpu.md from benchmarks/results/*.json. No number in it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    results = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("parity-*.json"))]
    lines = [
        "# On GPUs",
        "",
        "Made by `python benchmarks/report.py` from `benchmarks/results/`; measured by `make gpu-test`.",
        "",
    ]
    for result in results:
        lines += section(result)
    (ROOT / "docs" / "gpu.md").write_text("\n".join(lines).rstrip() + "\n")


def section(result: dict[str, Any]) -> list[str]:
    environment = result["environment"]
    packages = environment["packages"]
    lines = [
        f"## {result['ranks']} × {environment['gpus'][0]}",
        "",
        f"torch {packages['torch']}, Lightning {packages['lightning']}, NCCL {environment['nccl']}, Python "
        f"{environment['python']}, commit {(environment['commit'] or 'unknown')[:10]}. `{result['command']}`",
        "",
    ]
    if rows := result.get("parity"):
        lines += [
            f"**Parity**: {rows[0]['steps']} steps of SGD with momentum, accumulation 4, clipping that bites, masked "
            "targets, against a plain one-process loop over the global batch. Per tensor: norm of the difference of "
            "the update over the norm of the reference's update; the largest over all tensors.",
            "",
            "| strategy | precision | update | loss | gradient norm | bound |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['strategy']} | {r['precision']} | {r['largest_update_deviation']:.1e} "
            f"| {r['largest_loss_deviation']:.1e} | {r['largest_norm_deviation']:.1e} | {r['bound']:.0e} |"
            for r in rows
        ]
        lines.append("")
    if runs := finished(result.get("curves")):
        steps = [100, 200]
        lines += [
            "**fp32 and bf16 side by side**: the default recipe (a model too small to measure speed on).",
            "",
            "| run | validation loss at " + " | at ".join(map(str, steps)) + " |",
            "|---|" + "---|" * len(steps),
        ]
        for name, run in runs.items():
            at = dict(map(tuple, run["validation"]))
            lines.append(f"| {name} | " + " | ".join(f"{at[s]:.4f}" if s in at else "" for s in steps) + " |")
        sample = (runs.get("fsdp-bf16") or {}).get("sample")
        if sample:
            lines += ["", "Generated under `fsdp` in bf16, all ranks taking part:", "", "```", sample.strip(), "```"]
        lines.append("")
    if runs := finished(result.get("speed")):
        lines += [
            "**A first speed**: eager bf16, sequence 8,192, micro-batch 1, AdamW, no activation checkpointing, random "
            "tokens.",
            "",
            "| run | tokens/s/GPU | peak reserved GiB, rank 0 |",
            "|---|---|---|",
        ]
        lines += [
            f"| {name} | {run['tokens_per_second'][-1] / result['ranks']:,.0f} | {run['peak_memory_gib']} |"
            for name, run in runs.items()
        ]
        lines.append("")
    return lines


def finished(runs: dict[str, Any] | None) -> dict[str, Any]:
    return {name: run for name, run in (runs or {}).items() if run["exit_code"] == 0}


if __name__ == "__main__":
    main()
