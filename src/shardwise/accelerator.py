"""The device that a rank computes on: memory, streams, random numbers.

No other file says `torch.cuda`. A run computes on the CPU or on CUDA, which is also what torch calls AMD's GPUs. Each
function is a call of torch.cuda: torch.accelerator has no random state, no snapshot of memory and no event whose
waiting thread sleeps, and its `set_device_index` opens no context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

Stream = torch.Stream
Event = torch.Event
OutOfMemory = torch.OutOfMemoryError
# What errors say that are not of that class: those of a driver, and those that another error quotes
OUT_OF_MEMORY_TEXTS = (
    "CUDA out of memory", "CUDA error: out of memory", "HIP out of memory", "HIP error: out of memory",
)  # fmt: skip
PinError = torch.cuda.CudaError  # what register_pinned raises


def backend(kind: str) -> str:
    """The backend of process groups, for a Plan's `accelerator`."""
    return "nccl" if kind == "cuda" else "gloo"


def is_present(kind: str) -> bool:
    """Whether torch can compute on a device of this kind."""
    return kind == "cpu" or torch.cuda.is_available()


def device_of_rank(kind: str, local_rank: int) -> torch.device:
    """The device of the rank with this number on its node."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, local_rank)


def device_named(word: str) -> torch.device:
    """The device of a tool that was told `word`: auto is CUDA where there is a GPU, else the CPU."""
    return torch.device(("cuda" if is_present("cuda") else "cpu") if word == "auto" else word)


def set_device(device: torch.device) -> None:
    """Make `device` the one that this thread computes on."""
    if has_streams(device):
        torch.cuda.set_device(device)


def current_device() -> torch.device | None:
    """The device that this thread computes on; None: this process has used none but the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if cuda_is_initialized() else None


def cuda_is_initialized() -> bool:
    """Whether this process has used CUDA. Does not begin to."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work; on the CPU, which has, do nothing."""
    if has_streams(device):
        torch.cuda.synchronize(device)


# ---- Streams and events


def has_streams(device: torch.device) -> bool:
    """Whether the device works in streams beside each other, which `Event`s can mark and time."""
    return device.type == "cuda"


def new_stream(device: torch.device) -> Stream:
    """A stream of a device that `has_streams`."""
    stream: Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def current_stream(device: torch.device) -> Stream:
    """The stream that this thread's work goes to. The device `has_streams`."""
    stream: Stream = torch.cuda.current_stream(device)
    return stream


def in_stream(stream: Stream) -> Any:
    """A context in which this thread's work goes to `stream`."""
    return torch.cuda.stream(stream)  # type: ignore[arg-type]


def new_event(device: torch.device, *, timed: bool = False, sleeps: bool = False) -> Event:
    """An event for the streams above. `sleeps`: a thread that waits for it leaves its core to others."""
    event: Event = torch.cuda.Event(enable_timing=timed, blocking=sleeps)  # type: ignore[no-untyped-call]
    return event


# ---- Memory


def free_and_total(device: torch.device) -> tuple[int, int]:
    """The bytes of the device's memory that nobody uses, and all of them."""
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def allocated(device: torch.device) -> int:
    """The bytes that this process's tensors hold."""
    return int(torch.cuda.memory_allocated(device))


def reserved(device: torch.device) -> int:
    """The bytes that this process's allocator holds, those of tensors included."""
    return int(torch.cuda.memory_reserved(device))


class MemoryCounts(NamedTuple):
    """What the allocator of a device has counted, in bytes. `retries`: how often it gave back what it kept first."""

    allocated: int
    allocated_peak: int
    reserved_peak: int
    retries: int


def memory_counts(device: torch.device) -> MemoryCounts:
    """All of them in one read: each row calls this. 0 on the CPU."""
    if device.type == "cpu":
        return MemoryCounts(0, 0, 0, 0)
    found = torch.cuda.memory_stats_as_nested_dict(device)
    tensors, kept = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
    return MemoryCounts(tensors["current"], tensors["peak"], kept["peak"], found.get("num_alloc_retries", 0))


def empty_cache(kind: str) -> None:
    """Give back what the allocator of a Plan's `accelerator` keeps for later."""
    if kind != "cpu":
        torch.cuda.empty_cache()


def record_memory_history(entries: int) -> None:
    """Record, on CUDA, which lines of Python allocate each block: the newest `entries` allocations."""
    torch.cuda.memory._record_memory_history(max_entries=entries, stacks="python")


def end_memory_history() -> None:
    """Record no allocations any more."""
    torch.cuda.memory._record_memory_history(enabled=None)


def memory_snapshot() -> Any:
    """What CUDA's allocator holds, and the history of it that was recorded."""
    return torch.cuda.memory._snapshot()


def dump_memory_snapshot(path: str) -> None:
    """Write every block that CUDA's allocator holds to a file."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


def pins_memory() -> bool:
    """Whether copies to the device are faster from pinned memory of the host: on CUDA."""
    return torch.cuda.is_available()


def register_pinned(address: int, bytes_: int) -> None:
    """Pin memory of the host that exists already, for CUDA.

    Raises:
        PinError: the driver refuses.
    """
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, bytes_, 0)))  # type: ignore[no-untyped-call]


def unregister_pinned(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


# ---- Random numbers


def random_state(device: torch.device) -> Tensor:
    """The state of the device's random stream."""
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    torch.get_device_module(device).set_rng_state(state, device)


def generator(device: torch.device) -> torch.Generator:
    """What torch draws from on the device where a call names no other generator."""
    if device.type == "cpu":
        return torch.default_generator
    found: torch.Generator = torch.cuda.default_generators[device.index]
    return found


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Put the random streams of the host and of the device back at the end."""
    has_its_own = device.type != "cpu"
    with torch.random.fork_rng([device] if has_its_own else [], device_type=device.type if has_its_own else "cuda"):
        yield


# ---- Libraries of the vendor


def allow_tf32_convolutions(allowed: bool) -> None:
    """Let cuDNN round the inputs of convolutions in fp32 to TF32."""
    torch.backends.cudnn.allow_tf32 = allowed


def versions() -> dict[str, str | None]:
    """The versions of what torch was built with, and of NCCL where a device can use it."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    return {"cuda": torch.version.cuda, "hip": torch.version.hip, "xpu": torch.version.xpu, "nccl": nccl}


def device_names() -> list[str]:
    """The names of the devices that torch sees."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def uuid_and_pci_address(device: torch.device) -> tuple[str, str] | None:
    """How the driver knows a GPU: a UUID without a prefix, and 00000000:1b:00.0; None: it is the CPU."""
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    address = f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    return str(found.uuid), address


def begin_range(name: str) -> None:
    """Begin a range of that name in a profile of Nsight; without CUDA, do nothing."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]


def end_range() -> None:
    """End the range that began last."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def start_capture() -> None:
    """Let a profiler of NVIDIA's that was started before this program record from here on."""
    if torch.cuda.is_available():
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]


def stop_capture() -> None:
    """Let it stop."""
    if torch.cuda.is_available():
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def look_for_synchronizing(mode: str) -> None:
    """On CUDA: "warn" of operations that let the host wait for the device, stop at them ("error"), or "default"."""
    torch.cuda.set_sync_debug_mode(mode)


def profiled_activities(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    """What torch's profiler records: the host, and the device where it can."""
    of_device = [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [torch.profiler.ProfilerActivity.CPU, *of_device]
