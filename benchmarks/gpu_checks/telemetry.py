"""What only a GPU can show of `metrics.telemetry`: every value, what each call costs, GPM's rights, energy, the step.

    python benchmarks/gpu_checks/telemetry.py                    all, some four minutes on one GPU
    python benchmarks/gpu_checks/telemetry.py --only 'values|energy'

Prints a line for each check, writes benchmarks/results/telemetry-gpu-checks.json, and ends with 1 if one fails.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.trainers import TINY_LANGUAGE_MODEL, on_all, our_trainer, resolve  # noqa: E402
from recipes.language_modeling.model import Transformer  # noqa: E402
from shardwise.config.groups import MetricsConfig  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.metrics.nvml import GPU_VALUES, Nvml, Reading  # noqa: E402
from shardwise.metrics.telemetry import Telemetry, build_readers, gpu_of  # noqa: E402
from shardwise.trainer import build_data, build_module  # noqa: E402

DEVICE = torch.device("cuda", 0)
SECONDS = MetricsConfig.telemetry_seconds  # between two looks
BLOCKS = 12
NEEDED = {"gpu/power_watts", "gpu/energy_joules", "gpu/sm_clock_mhz", "gpu/temperature_celsius", "gpu/utilization",
          "gpu/held_down_by_power", "gpu/held_down_by_heat", "gpu/xid_errors"}  # fmt: skip
ENERGY_BOUND, MODEL_BOUND, HOST_BOUND = 0.02, 0.002, 0.02
Found = tuple[bool, dict[str, Any]]


def work(seconds: float) -> None:
    """Keep the GPU busy with matrix products."""
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize()


def reader() -> Nvml:
    gpu = gpu_of(DEVICE)
    assert gpu is not None
    found = Nvml(gpu.uuid, gpu.pci_address)
    found.open()
    return found


def values() -> Found:
    """Every value under load, and what the GPU does not give."""
    telemetry = Telemetry(build_readers(gpu_of(DEVICE)), 0.5, print)
    telemetry.start()
    work(5.0)
    telemetry.stop()
    taken, notices = telemetry.take(), telemetry.take_notices()
    return taken.keys() >= NEEDED, taken | {"notices": notices, "missing": sorted(GPU_VALUES.keys() - taken.keys())}


def calls() -> Found:
    """Milliseconds of each group of calls under load; a whole look must be far below its second."""
    nvml, costs = reader(), dict[str, float]()
    names = [name for name in dir(nvml) if name.startswith("_read_")]
    for name in names:
        times = []
        for _ in range(20):
            work(0.11)  # GPM's samples are 100 ms apart
            begin = time.perf_counter()
            nvml.calls(name, getattr(nvml, name), Reading())
            times.append(time.perf_counter() - begin)
        costs[name.removeprefix("_read_") + "_ms"] = statistics.median(times) * 1e3
    nvml.close()
    return sum(costs.values()) < 100, costs | {"failed": dict(nvml.calls.failed)}


def gpm() -> Found:
    """Whether this user may read GPM. A refusal is a finding and no failure."""
    nvml = reader()
    nvml.read()
    work(0.5)
    found = nvml.read().levels
    nvml.close()
    return True, {"root": os.geteuid() == 0, "may": "gpu/sm_active" in found, "why": nvml.calls.failed.get("GPM", ""),
                  "tensor_active": found.get("gpu/tensor_active", -1.0)}  # fmt: skip


def at_once() -> Found:
    """Four threads, each with a reader of its own, in a process that must not crash."""
    done = subprocess.run([sys.executable, "-X", "faulthandler", __file__, "--readers", "4"], capture_output=True,
                          text=True, timeout=60, check=False)  # fmt: skip
    return done.returncode == 0, {"exit_code": done.returncode, "said": done.stderr[-300:]}


def read_in_threads(count: int) -> int:
    """A hundred looks of each reader, all of them at once. GPM wants 100 ms between two."""
    ready = threading.Barrier(count)

    def look(number: int) -> None:
        gpu = gpu_of(torch.device("cuda", number % torch.cuda.device_count()))
        assert gpu is not None
        nvml = Nvml(gpu.uuid, gpu.pci_address)
        nvml.open()
        for _ in range(100):
            ready.wait(60)
            nvml.read()
            time.sleep(0.11)
        nvml.close()

    threads = [threading.Thread(target=look, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


def energy() -> Found:
    """The energy counter beside the integral of power over 20 s of changing load.

    A thread of its own samples every 10 ms: samples that come between two blocks of work see the GPU at rest too often.
    """
    nvml, samples, is_over = reader(), list[tuple[float, float, float]](), threading.Event()

    def sample() -> None:
        while not is_over.wait(0.01):
            levels = Reading()
            nvml.calls("fields", nvml._read_fields, levels)
            nvml.calls("energy", nvml._read_energy, levels)
            samples.append((time.perf_counter(), levels.levels["gpu/power_watts"], levels.sums["gpu/energy_joules"]))

    thread = threading.Thread(target=sample)
    thread.start()
    for _ in range(10):
        work(1.5)
        time.sleep(0.5)
    is_over.set()
    thread.join()
    nvml.close()
    integral = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(samples))
    counted = samples[-1][2] - samples[0][2]
    return abs(integral / counted - 1) <= ENERGY_BOUND, {"counted_j": counted, "integral_j": integral, "samples":
                                                         len(samples), "off_by": integral / counted - 1}  # fmt: skip


def in_turns(step: Callable[[], None], steps: int, bound: float) -> Found:
    """Blocks of steps of some five seconds, as far apart as two looks are, with telemetry and without."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(BLOCKS):
        is_on = number % 2 == 0
        telemetry = Telemetry(build_readers(gpu_of(DEVICE)) if is_on else [], SECONDS, print)
        telemetry.start()
        time.sleep(1.0)  # its thread opens NVML, which a run does once
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times[is_on].append((time.perf_counter() - begin) / steps)
        telemetry.stop()
    on, off = statistics.median(times[True][1:]), statistics.median(times[False][1:])
    return on / off - 1 <= bound, {"on_ms": on * 1e3, "off_ms": off * 1e3, "more": on / off - 1}


def model_step() -> Found:
    """A language model of a billion parameters."""
    model = Transformer(vocab_size=32_000, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192,
                        max_seq_len=2048).to(DEVICE, torch.bfloat16)  # fmt: skip
    tokens = torch.randint(0, 32_000, (4, 2048), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(tokens).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return in_turns(step, 46, MODEL_BOUND)


def host_step() -> Found:
    """A step of hardly any arithmetic: Python's lock is always held."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))).to(DEVICE)
    optimizer, batch = torch.optim.AdamW(model.parameters(), fused=True), torch.randn(4, 8, device=DEVICE)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return in_turns(step, 2600, HOST_BOUND)


def synchronizations() -> Found:
    """How often the host waits for the device in a run of ours, with telemetry and Prometheus and without."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29511",
    }
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, words in enumerate((["metrics.telemetry=false"], ["metrics.prometheus=textfile"])):
            more = ["checkpoint=none", "max_steps=30", "log_every_n_steps=5", "schedule=none", "module.sample_tokens=0"]
            plan = resolve(
                on_all([*TINY_LANGUAGE_MODEL, "model.vocab_size=256", *more, *words], 1),
                "cuda",
                Path(folder),
                f"run{number}",
            )
            if not torch.distributed.is_initialized():
                init_process_group(plan)
            module = build_module(plan)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                our_trainer(plan, module).fit(module, datamodule=build_data(plan))
            counts[words[0]] = sum(e.count for e in profile.key_averages() if "Synchronize" in e.key)
    off, on = counts.values()
    return on == off, {"off": off, "on": on}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a pattern of names")
    parser.add_argument("--readers", type=int, default=0, help="threads that read and do nothing else")
    arguments = parser.parse_args()
    only = arguments.only
    if arguments.readers:
        return read_in_threads(arguments.readers)
    if not torch.cuda.is_available():
        print("no GPU: nothing was checked")
        return 1
    checks: dict[str, Callable[[], Found]] = {
        "values": values, "calls": calls, "gpm": gpm, "at once": at_once, "energy": energy, "model step": model_step,
        "host-bound step": host_step, "synchronizations": synchronizations,
    }  # fmt: skip
    content: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "checks": {}}
    failed = 0
    for name, check in checks.items():
        if not re.search(only, name):
            continue
        try:
            holds, numbers = check()
        except Exception as error:
            holds, numbers = False, {"error": f"{type(error).__name__}: {error}"[:600]}
        failed += not holds
        content["checks"][name] = {"holds": holds, **numbers}
        results.write(ROOT / "benchmarks/results/telemetry-gpu-checks.json", content)
        shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
        print(f"{'ok    ' if holds else 'FAILED'} {name}: {shown}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
