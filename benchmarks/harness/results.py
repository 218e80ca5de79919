"""The files in benchmarks/results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def read(kind: str) -> list[dict[str, Any]]:
    """The results of one benchmark, one for each file; none where it has not been run."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{kind}-*.json"))]
