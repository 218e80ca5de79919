"""GPUDirect Storage beside the way through pinned host memory: bytes a second from a GPU to a file and back.

    python benchmarks/gpu_checks/direct_storage.py --folder /fast/disk           4 GiB, a minute

cuFile needs a driver in the kernel (nvidia-fs) and a file system that works with it. Without them it either fails or
falls back to copies through host memory of its own; the line says which. Writes
benchmarks/results/direct-storage-gpu-checks.json.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

from benchmarks.harness import results  # noqa: E402

CHUNK = 64 * 2**20


def direct(tensor: torch.Tensor, path: Path) -> tuple[float, float]:
    """Seconds of writing and reading by cuFile."""
    from torch.cuda.gds import GdsFile

    file = GdsFile(str(path), os.O_CREAT | os.O_RDWR)
    back = torch.empty_like(tensor)
    wrote = seconds(lambda: file.save_storage(tensor.untyped_storage()))
    read = seconds(lambda: file.load_storage(back.untyped_storage()))
    assert torch.equal(tensor, back), "what was read is not what was written"
    return wrote, read


def through_host(tensor: torch.Tensor, path: Path) -> tuple[float, float]:
    """Seconds of writing and reading past the page cache, through two pinned buffers that take turns."""
    buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    back = torch.empty_like(tensor)

    def write() -> None:
        for number, part in enumerate(tensor.split(CHUNK)):
            buffer = buffers[number % 2]
            buffer.copy_(part, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            os.write(descriptor, buffer.numpy())

    def read() -> None:
        for number, part in enumerate(back.split(CHUNK)):
            buffer = buffers[number % 2]
            torch.cuda.current_stream().synchronize()
            os.preadv(descriptor, [buffer.numpy()], number * CHUNK)
            part.copy_(buffer, non_blocking=True)

    found = seconds(write), seconds(read)
    os.close(descriptor)
    assert torch.equal(tensor, back), "what was read is not what was written"
    return found


def seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> int:
    parser = results.command_line(__doc__)
    parser.add_argument("--folder", type=Path, help="on the file system to measure; default: a temporary folder")
    parser.add_argument("--gib", type=int, default=4)
    arguments = parser.parse_args()
    environment, _ = results.measured_on("cuda", arguments.commit)
    tensor = torch.randint(0, 256, (arguments.gib * 2**30,), dtype=torch.uint8, device="cuda")
    driver = Path("/proc/driver/nvidia-fs/version")
    rows: dict[str, Any] = {"nvidia-fs": driver.read_text().strip() if driver.exists() else None}
    print(f"the driver nvidia-fs: {rows['nvidia-fs'] or 'is not loaded'}", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name, way in {"through pinned host memory": through_host, "cuFile": direct}.items():
            try:
                wrote, read = way(tensor, Path(folder) / name.replace(" ", "-"))
                rows[name] = {"write_gb_per_second": tensor.nbytes / wrote / 1e9,
                              "read_gb_per_second": tensor.nbytes / read / 1e9}  # fmt: skip
                print(f"{name}: writes {tensor.nbytes / wrote / 1e9:.2f} GB/s, reads {tensor.nbytes / read / 1e9:.2f}")
            except (RuntimeError, OSError) as error:
                rows[name] = {"error": str(error)[:500]}
                print(f"{name}: {str(error).splitlines()[0]}", flush=True)
    content = {"command": results.command(), "environment": environment, "gib": arguments.gib, "rows": rows}
    results.write(arguments.out / "direct-storage-gpu-checks.json", content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
