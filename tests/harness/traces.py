"""Writes traces by hand, as torch.profiler would on a GPU: times in µs, so that every figure of the reader is known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

OFFSET = 4_580_942_840_000  # µs: torch's clock does not begin at 0
MAIN, BACKWARD = 100, 101  # threads


def packed(path: Path) -> bytes:
    """A recorded trace as tests/golden/traces keeps it: compressed, without the names of machine and file."""
    content = json.loads(path.read_text()) | {"host_name": "node0", "traceName": path.name}
    return gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0)


class TraceWriter:
    """Collects events; `write` makes the file."""

    def __init__(self, rank: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.rank = rank
        self._correlation = 0

    def step(self, number: int, begin: float, end: float) -> None:
        self.host("user_annotation", f"ProfilerStep#{number}", begin, end)

    def host(self, category: str, name: str, begin: float, end: float, thread: int = MAIN, **args: Any) -> None:
        self._add(category, name, begin, end, 1, thread, args)

    def kernel(
        self, name: str, begin: float, end: float, *, stream: int = 7, launched: float | None = None,
        thread: int = MAIN, category: str = "kernel", device: int = 0,
    ) -> None:  # fmt: skip
        """`launched` is when the host called cudaLaunchKernel; None: the trace does not have the call."""
        self._correlation += 1
        args = {"stream": stream, "device": device, "correlation": self._correlation}
        self._add(category, name, begin, end, device, stream, args)
        if launched is not None:
            self.host("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, thread, correlation=self._correlation)

    def graph(self, kernels: list[tuple[str, float, float]], launched: float) -> None:
        """A CUDA graph: one launch, many kernels."""
        self._correlation += 1
        self.host("cuda_runtime", "cudaGraphLaunch", launched, launched + 3, correlation=self._correlation)
        for name, begin, end in kernels:
            self._add("kernel", name, begin, end, 0, 7, {"stream": 7, "device": 0, "correlation": self._correlation})

    def content(self) -> dict[str, Any]:
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA Made By Hand"}],
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": 2},
            "host_name": "node7",
            "traceEvents": self.events,
        }

    def write(self, path: Path) -> Path:
        text = json.dumps(self.content())
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path

    def _add(
        self, category: str, name: str, begin: float, end: float, pid: int, tid: int, args: dict[str, Any]
    ) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": OFFSET + begin, "dur": end - begin,
             "args": args}
        )  # fmt: skip
