"""What several benchmarks share: clocks, data, plain loops, limits and the files of results."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
