"""What only a GPU can show of shardwise/accelerator.py: each function beside the call of torch that it stands for.

    python benchmarks/gpu_checks/devices.py     on one GPU, in a few seconds

Prints a line for each check, and ends with 1 if one fails. Nothing is written.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

from shardwise import accelerator  # noqa: E402
from shardwise.checkpoint.writer import PinnedMemory  # noqa: E402
from shardwise.step.record import Readback, Tick  # noqa: E402

Check = Callable[[torch.device], bool]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


@check
def the_device_of_a_rank_is_the_current_one(device: torch.device) -> bool:
    accelerator.set_device(device)
    return accelerator.current_device() == device == accelerator.device_of_rank(device.type, device.index)


@check
def memory_is_counted_as_torch_counts_it(device: torch.device) -> bool:
    before = accelerator.allocated(device)
    held = torch.empty(2**26, dtype=torch.uint8, device=device)
    more = accelerator.allocated(device) - before
    free, total = accelerator.free_and_total(device)
    counts = accelerator.memory_counts(device)
    peak, peak_reserved = counts.allocated_peak, counts.reserved_peak
    counted = more == held.nbytes and accelerator.reserved(device) >= held.nbytes and 0 < free < total
    counted &= (peak, peak_reserved) == (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    counted &= counts.retries == torch.cuda.memory_stats(device)["num_alloc_retries"]
    return counted and peak >= held.nbytes and peak_reserved >= peak


@check
def a_logged_row_reads_memory_as_cheaply_as_torch(device: torch.device) -> bool:
    def seconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(300):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return sorted(times)[len(times) // 2]

    ours, torchs = seconds(lambda: accelerator.memory_counts(device)), seconds(torch.cuda.memory_stats_as_nested_dict)
    print(f"       {ours * 1e6:.1f} us, torch's own call {torchs * 1e6:.1f} us")
    return ours < 1.1 * torchs + 2e-6


@check
def a_stream_waits_and_an_event_is_timed(device: torch.device) -> bool:
    stream, computing = accelerator.new_stream(device), accelerator.current_stream(device)
    begin, end = (accelerator.new_event(device, timed=True) for _ in range(2))
    begin.record(computing)
    values = torch.ones(2**24, device=device)
    stream.wait_stream(computing)
    with accelerator.in_stream(stream):
        inside = accelerator.current_stream(device) == stream
        for _ in range(50):
            values = values + 1
    values.record_stream(computing)
    computing.wait_stream(stream)
    end.record(computing)
    end.synchronize()
    return inside and float(values[0]) == 51.0 and begin.elapsed_time(end) > 0


@check
def the_current_stream_waits_for_an_event_of_another(device: torch.device) -> bool:
    """As the optimizer's step waits for the copies of a checkpoint."""
    stream, values = accelerator.new_stream(device), torch.zeros(2**26, device=device)
    accelerator.synchronize(device)
    with accelerator.in_stream(stream):
        for _ in range(100):
            values.add_(1)
        copied = accelerator.new_event(device)
        copied.record(stream)
    copied.wait()
    return float(values.min()) == 100.0


@check
def a_thread_that_waits_leaves_its_core(device: torch.device) -> bool:
    event, values = accelerator.new_event(device, sleeps=True), torch.randn(8192, 8192, device=device)
    accelerator.synchronize(device)
    for _ in range(40):
        values = values @ values
    event.record(accelerator.current_stream(device))
    wall, cpu = time.perf_counter(), time.thread_time()
    event.synchronize()
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    print(f"       waited {wall:.3f} s, of which the core worked {cpu:.3f} s")
    return wall > 0.01 and cpu < 0.5 * wall


@check
def numbers_of_a_step_arrive(device: torch.device) -> bool:
    begin, values = Tick(device), torch.arange(4.0, device=device)
    for _ in range(20):
        values = values + 1
    numbers = Readback(values)
    return numbers.read() == [20.0, 21.0, 22.0, 23.0] and begin.until(numbers.end) > 0


@check
def random_numbers_are_taken_up_again(device: torch.device) -> bool:
    state = accelerator.random_state(device)
    first = torch.rand(8, device=device)
    with accelerator.random_state_kept(device):
        torch.manual_seed(7)
        torch.rand(100, device=device)
    second = torch.rand(8, device=device)
    accelerator.set_random_state(state, device)
    again = torch.rand(16, device=device)
    accelerator.set_random_state(state, device)
    return torch.equal(torch.rand(8, device=device), first) and not torch.equal(first, second) and again.numel() == 16


@check
def memory_of_the_host_is_pinned(device: torch.device) -> bool:
    slab = mmap.mmap(-1, 2**24)
    view = torch.frombuffer(slab, dtype=torch.uint8)
    accelerator.register_pinned(view.data_ptr(), 2**24)
    pinned = view.is_pinned()
    accelerator.unregister_pinned(view.data_ptr())
    memory, values = PinnedMemory(), torch.randn(1000, device=device)
    copy = memory.like(values).copy_(values, non_blocking=True)
    accelerator.synchronize(device)
    same = torch.equal(copy, values.cpu())
    del copy
    memory.close()
    return pinned and same and accelerator.pins_memory()


@check
def a_refusal_to_pin_is_an_error(device: torch.device) -> bool:
    try:
        accelerator.register_pinned(4096, 2**20)  # nothing is mapped there
    except accelerator.PinError as error:
        print(f"       {error}")
        return True
    return False


@check
def running_out_of_memory_is_known(device: torch.device) -> bool:
    try:
        torch.empty(2 * accelerator.free_and_total(device)[1], dtype=torch.uint8, device=device)
    except (accelerator.OutOfMemory, RuntimeError) as error:
        print(f"       {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        known = isinstance(error, accelerator.OutOfMemory)
        return known or any(text in str(error) for text in accelerator.OUT_OF_MEMORY_TEXTS)
    return False


@check
def the_history_and_a_snapshot_are_written(device: torch.device) -> bool:
    accelerator.record_memory_history(1000)
    held = torch.ones(2**20, device=device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.pickle"
        accelerator.dump_memory_snapshot(str(path))
        return held.numel() > 0 and path.stat().st_size > 1000


@check
def versions_and_names_are_known(device: torch.device) -> bool:
    versions, names = accelerator.versions(), accelerator.device_names()
    print(f"       {versions}, {names}")
    return bool(names) and versions["hip" if torch.version.hip else "cuda"] is not None


@check
def ranges_are_pushed_and_popped(device: torch.device) -> bool:
    accelerator.begin_range("outer")
    accelerator.end_range()
    return accelerator.cuda_is_initialized()


@check
def the_cache_is_emptied(device: torch.device) -> bool:
    torch.empty(2**28, dtype=torch.uint8, device=device)
    accelerator.synchronize(device)
    before = accelerator.reserved(device)
    accelerator.empty_cache(device.type)
    return accelerator.reserved(device) < before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not accelerator.is_present("cuda"):
        print(f"error: torch {torch.__version__} sees no GPU here")
        return 2
    device, failed = torch.device("cuda", 0), 0
    accelerator.set_device(device)
    for name, function in CHECKS.items():
        try:
            holds = function(device)
        except Exception as error:
            holds = False
            print(f"       {type(error).__name__}: {error}")
        failed += not holds
        print(f"{'ok    ' if holds else 'FAILED'} {name}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
