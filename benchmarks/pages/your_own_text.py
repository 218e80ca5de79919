"""docs/your-own-text.md: what its commands printed, and what the model wrote."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.harness.results import read

_LINES = 24  # of a text that is shown


def _result() -> dict[str, Any]:
    return read("your-own-text")[0]


def _printed(begin: str) -> list[str]:
    """The lines that the command with this beginning printed, without warnings of other packages; none: it has not
    been run."""
    found = (step["printed"] for step in _result()["steps"] if step["line"].startswith(begin))
    return [line.rstrip() for line in next(found, "").strip().splitlines() if "WARNING" not in line]


def _block(lines: list[str]) -> list[str]:
    return ["```text", *lines, "```"] if lines else []


def prepare_prints() -> list[str]:
    return _block(_printed("shardwise prepare"))


def train_prints() -> list[str]:
    """The table at the end, and the curve."""
    lines = _printed("python train.py")
    last = max((number for number, line in enumerate(lines) if line.startswith("step ")), default=0)
    return [*_block(lines[last + 1 :]), "", "![The loss](your-own-text-loss.png)"] if lines else []


def samples() -> list[str]:
    """The first and the last one."""
    found = re.split(r"^=== step (\d+)\n", _result()["samples"], flags=re.MULTILINE)[1:]
    pairs = list(zip(found[::2], found[1::2], strict=True))
    lines = []
    for step, text in (pairs[0], pairs[-1]):
        lines += [f"After {step} steps:", "", *_block(text.rstrip().splitlines()[:_LINES]), ""]
    return lines[:-1]


def generated() -> list[str]:
    return _block(_printed("shardwise generate")[:_LINES])


TABLES = {
    "prepare_prints": prepare_prints, "train_prints": train_prints, "samples": samples, "generated": generated
}  # fmt: skip
