"""torchtitan beside us: its command line for the recipe of the race, and what its log says."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

LINE = re.compile(r"step:\s*(\d+)\s+loss:\s*(-?[\d.]+|nan).*?memory:\s*(-?[\d.]+)GiB.*?tps:\s*([\d,]+)")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# As ours: fp32 masters, bf16 compute, fp32 reduction (its defaults), fused AdamW with the same betas and weight decay,
# a constant rate
ALWAYS = [
    "--model.name", "race", "--experimental.custom_import", "benchmarks.harness.titan_spec",
    "--optimizer.name", "AdamW", "--optimizer.lr", "1e-4", "--optimizer.implementation", "fused",
    "--lr_scheduler.warmup_steps", "1", "--lr_scheduler.decay_ratio", "0.0",
    "--training.max_norm", "1.0", "--training.dtype", "float32",
    "--compile.enable", "--activation_checkpoint.selective_ac_option", "op",
    "--metrics.disable_color_printing",
]  # fmt: skip
FP8 = (
    "--model.converters quantize.linear.float8 --quantize.linear.float8.enable_fsdp_float8_all_gather "
    "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp --quantize.linear.float8.filter_fqns output"
)
# Its authors' advice for memory, and what NCCL needs on hosts that share NVLink switches
ENVIRONMENT = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}  # fmt: skip


def version() -> str | None:
    """None: it is not installed."""
    try:
        return importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return None


def command(ranks: int, flags: list[str], folder: Path) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    said = ["--local-ranks-filter", "0", "--role", "rank", "--tee", "3", "-m", "torchtitan.train"]
    return [sys.executable, *launcher, *said, "--job.dump_folder", str(folder), *ALWAYS, *flags]


def read_log(text: str, warm_up: int, tokens: float) -> dict[str, Any]:
    """What the lines of its steps say; `tokens`: of one GPU in one step. A line's speed is that of the steps since the
    line before."""
    found = [LINE.search(line) for line in COLOURS.sub("", text).splitlines()]
    rows = [(int(m[1]), float(m[2]), float(m[3]), float(m[4].replace(",", ""))) for m in found if m]
    timed = [row for row in rows if row[0] > warm_up and row[3] > 0]
    if not timed:
        return {}
    return {
        "steps_ms": [round(tokens / speed * 1e3, 3) for _, _, _, speed in timed],
        "peak_reserved_gib": max(gib for _, _, gib, _ in rows),
        "losses": [loss for _, loss, *_ in rows],
    }
