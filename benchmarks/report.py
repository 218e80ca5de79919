"""Writes docs/gpu.md, docs/parity.md and docs/overhead.md from benchmarks/results/*.json, the tables of
the other pages in WITH_TABLES, and docs/floors.svg: see pages/.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.pages import (  # noqa: E402
    architecture,
    checkpointing,
    data,
    gpu,
    host_memory,
    large_models,
    lightning,
    metrics,
    numerics,
    overhead,
    parallelism,
    parity,
    performance,
    profiling,
    reliability,
    telemetry,
    watch,
    your_own_text,
)

WHOLE = {"gpu.md": gpu.page, "overhead.md": overhead.page, "parity.md": parity.page}
WITH_TABLES = {
    "checkpointing.md": checkpointing.TABLES,
    "data.md": data.TABLES,
    "large-models.md": large_models.TABLES | host_memory.TABLES,
    "lightning.md": lightning.TABLES,
    "metrics.md": metrics.TABLES,
    "numerics.md": numerics.TABLES,
    "parallelism.md": parallelism.TABLES,
    "performance.md": performance.TABLES,
    "profiling.md": profiling.TABLES,
    "reliability.md": reliability.TABLES,
    "telemetry.md": telemetry.TABLES,
    "watch.md": watch.TABLES,
    "your-own-text.md": your_own_text.TABLES,
}
TABLES: dict[str, Callable[[], list[str]]] = {name: made for own in WITH_TABLES.values() for name, made in own.items()}


def main() -> None:
    for name, made in WHOLE.items():
        if lines := made():
            (ROOT / "docs" / name).write_text("\n".join(lines).rstrip() + "\n")
    large_models.draw()
    (ROOT / "docs" / "floors.svg").write_text(architecture.picture())
    for name in WITH_TABLES:
        page = ROOT / "docs" / name
        page.write_text(with_tables(page.read_text()))


def with_tables(text: str) -> str:
    """The text with what stands between `<!-- table: NAME -->` and `<!-- end -->` made anew."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: found[1] + "\n".join(TABLES[found[2]]()) + "\n" + found[3],
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    main()
