"""What telemetry's thread takes from a step that the host holds up: blocks of steps with it and without, in turns.

    python benchmarks/telemetry.py                     some 80 s; NVML's answers are made up (tests/harness/nvml.py)
    python benchmarks/telemetry.py --blocks 4 --seconds 1

Steps run under Python's lock, which the thread needs too. The made-up NVML answers in Python, so that the thread holds
the lock longer than with the real one, which answers without it. Prints the median step of both by the clock and by
processor time, which other work on the machine changes less, and the processor time of one look; writes
benchmarks/results/telemetry-cpu.json.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from shardwise.metrics.nvml import Nvml, Reading  # noqa: E402
from shardwise.metrics.telemetry import Host, Telemetry  # noqa: E402
from tests.harness.nvml import PCI, UUID, FakeNvml, answering  # noqa: E402


@dataclass(frozen=True)
class Cost:
    """Of a step."""

    seconds: float
    processor_seconds: float


class Timed(Nvml):
    """Adds up the processor time of the looks."""

    def __init__(self) -> None:
        super().__init__(UUID, PCI)
        self.looks, self.seconds = 0, 0.0

    def read(self) -> Reading:
        begin = time.thread_time()
        try:
            return super().read()
        finally:
            self.looks, self.seconds = self.looks + 1, self.seconds + time.thread_time() - begin


def block(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, seconds: float) -> Cost:
    """Steps for so many seconds. The processor time is that of all threads of this process."""
    steps, begin, processor = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() < begin + seconds:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return Cost((time.perf_counter() - begin) / steps, (time.process_time() - processor) / steps)


def main() -> int:
    parser = results.command_line(__doc__, accelerator=None)
    parser.add_argument("--blocks", type=int, default=16, help="of each kind")
    parser.add_argument("--seconds", type=float, default=2.5, help="of a block")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(4, 8)
    block(model, optimizer, batch, 1.0)
    costs: dict[bool, list[Cost]] = {True: [], False: []}
    reader = Timed()
    for number in range(2 * arguments.blocks):
        is_on = number % 4 in (0, 3)  # neither of the two is always the first
        with answering(FakeNvml()):
            telemetry = Telemetry([Host(), reader] if is_on else [], 1.0, print)
            telemetry.start()
            costs[is_on].append(block(model, optimizer, batch, arguments.seconds))
            telemetry.stop()
    content: dict[str, float] = {"looks": reader.looks, "processor_seconds_a_look": reader.seconds / reader.looks}
    for name in ("seconds", "processor_seconds"):
        on, off = (statistics.median(getattr(cost, name) for cost in costs[is_on]) for is_on in (True, False))
        content |= {f"{name}_a_step_on": on, f"{name}_a_step_off": off, f"{name}_more": on / off - 1}
        print(f"{name.replace('_', ' ')} a step: {on:.6f} with telemetry, {off:.6f} without, {on / off - 1:+.2%}")
    environment, device = results.measured_on("cpu", arguments.commit)
    results.write(arguments.out / f"telemetry-{device}.json", {"environment": environment, **content})
    print(f"a look takes {content['processor_seconds_a_look'] * 1e3:.3f} ms of a core, once a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
