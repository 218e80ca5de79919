"""A run that is timed, and then looked into: graphs, kernels, waiting for data, calls that synchronise."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import ROOT
from benchmarks.harness.clock import TurnsClock
from benchmarks.harness.data import Held, batch_of_images
from benchmarks.harness.device import free_memory, peaks_gib, wait_for
from shardwise.data.loaders import TrainLoader
from shardwise.parallel.precision import set_matmul_mode
from shardwise.plan import Plan
from shardwise.rank import quiet_lightning
from shardwise.trainer import build_data, build_module, build_trainer

LAST_COMPILATION = 5  # After so many steps everything is compiled. A run that still compiles would never be timed.
WATCHED = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaMemcpyAsync",
           "cudaMemsetAsync", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize",
           "aten::item", "aten::_local_scalar_dense", "aten::_to_copy", "aten::copy_")  # fmt: skip


def start_afresh(device: torch.device) -> None:
    """Nothing compiled, no memory reserved, counters at zero."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    free_memory(device)


def compiled_graphs() -> dict[str, Any]:
    """How many graphs dynamo has compiled, and why it split a graph. A step that is one graph has no breaks."""
    counters = torch._dynamo.utils.counters
    return {"unique_graphs": counters["stats"].get("unique_graphs", 0), "graph_breaks": dict(counters["graph_break"])}


def profiler(device: torch.device) -> profile:
    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])])


def profile_summary(trace: profile, steps: int) -> dict[str, Any]:
    """Per step: host calls that launch, copy or wait, the device's busy time, and what it is spent on."""
    events = trace.events() or []
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    calls = Counter(e.name for e in events if e.name in WATCHED)
    kinds: Counter[str] = Counter()
    for e in on_device:
        kinds[e.name[:90]] += e.time_range.elapsed_us()
    host: Counter[str] = Counter()
    for e in events:
        if e.device_type == torch.autograd.DeviceType.CPU:
            host[e.name[:90]] += e.self_cpu_time_total
    return {
        "steps": steps,
        "calls_per_step": {name: round(count / steps, 1) for name, count in calls.most_common()},
        "device_busy_ms_per_step": round(sum(kinds.values()) / 1e3 / steps, 3) if on_device else None,
        "device_operations_per_step": round(len(on_device) / steps, 1) if on_device else None,
        "device_ms_per_step": {name: round(us / 1e3 / steps, 3) for name, us in kinds.most_common(12)},
        "host_ms_per_step": {name: round(us / 1e3 / steps, 3) for name, us in host.most_common(12)},
    }


def speed(device: torch.device, seconds: float, steps: int, samples: int) -> dict[str, Any]:
    """What the timed steps reached, with `samples` images in each."""
    reserved = peaks_gib(device).get("peak_reserved_gib")
    return {
        "images_per_second": steps * samples / seconds,
        "ms_per_step": seconds / steps * 1e3,
        "peak_memory_gib": None if reserved is None else round(reserved, 2),
    }


def observe_plain(
    step: Callable[[], Tensor], device: torch.device, *, samples: int, warm_up: int, timed: int, profiled: int
) -> dict[str, Any]:
    """Times and profiles a step that is repeated by nothing but a loop."""
    started = time.perf_counter()
    first = float(step().detach())
    first_step_seconds = time.perf_counter() - started
    for _ in range(warm_up - 1):
        step()
    wait_for(device)
    started = time.perf_counter()
    for _ in range(timed):
        loss = step()
    wait_for(device)
    result = speed(device, time.perf_counter() - started, timed, samples) | {
        "first_step_seconds": first_step_seconds,
        "first_loss": first,
        "last_loss": float(loss.detach()),
        **compiled_graphs(),
    }
    with profiler(device) as trace:
        for _ in range(profiled):
            step()
        wait_for(device)
    return result | {"profile": profile_summary(trace, profiled)}


class ObservedSteps(Callback):
    """Synchronises at the first and the last timed step and nowhere between; then come the steps that are observed.

    Steps, in order: warm-up, timed, one to settle, those whose waiting is measured, those profiled, one whose
    synchronising calls are named.
    """

    def __init__(
        self, device: torch.device, *, samples: int, warm_up: int, timed: int, waiting: int, profiled: int
    ) -> None:
        self.device, self.samples = device, samples
        self.timed, self.waiting, self.profiled = timed, waiting, profiled
        self.start = warm_up
        self.stop = warm_up + timed
        self.wait_from = self.stop + 1
        self.profile_from = self.wait_from + waiting
        self.name_from = self.profile_from + profiled
        self.steps = self.name_from + 2
        self.graphs: list[int] = []  # compiled by dynamo, after each step
        self.waits: list[float] | None = None  # a list while waiting is measured
        self.result: dict[str, Any] = {}

    def on_train_start(self, *_: Any) -> None:
        self.mark = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = batch_idx + 1
        self.graphs.append(compiled_graphs()["unique_graphs"])
        self._refuse_endless_compilation(done)
        if done in (1, self.start, self.stop, self.wait_from, self.profile_from, self.name_from):
            wait_for(self.device)
        if done == 1:
            self.result["first_step_seconds"] = time.perf_counter() - self.mark
            self.result["first_loss"] = float(outputs["loss"])
        if done == self.start:
            self.mark = time.perf_counter()
        elif done == self.stop:
            self._end_timed(trainer, outputs)
        elif done == self.wait_from:
            self.waits, self.mark = [], time.perf_counter()
        elif done == self.profile_from:
            self._end_waiting()
            self.trace = profiler(self.device)
            self.trace.__enter__()
        elif done == self.name_from:
            self.trace.__exit__(None, None, None)
            self.result["profile"] = profile_summary(self.trace, self.profiled)
            self._begin_naming()
        elif done == self.name_from + 1:
            self._end_naming()

    def _refuse_endless_compilation(self, done: int) -> None:
        if done == LAST_COMPILATION and self.graphs[-1] > self.graphs[-2] > self.graphs[-3]:
            raise RuntimeError(
                f"every step is compiled anew: {self.graphs} graphs after each of the first {done} steps"
            )

    def _end_timed(self, trainer: Any, outputs: Any) -> None:
        seconds = time.perf_counter() - self.mark
        self.result |= speed(self.device, seconds, self.timed, self.samples) | {
            "last_loss": float(outputs["loss"]),
            "optimizer": describe_optimizer(trainer.optimizers[0]),
            **compiled_graphs(),
            "graphs_compiled_in_timed_steps": self.graphs[-1] - self.graphs[self.start - 1],
        }

    def _end_waiting(self) -> None:
        assert self.waits is not None
        seconds = time.perf_counter() - self.mark
        self.result["waiting"] = {
            "share": sum(self.waits) / seconds,
            "ms_per_step": sum(self.waits) / len(self.waits) * 1e3,
            "step_ms": seconds / self.waiting * 1e3,
            "steps": len(self.waits),
        }
        self.waits = None

    def _begin_naming(self) -> None:
        if self.device.type == "cuda":
            self.caught = warnings.catch_warnings(record=True)
            self.said = self.caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def _end_naming(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            self.caught.__exit__(None, None, None)
            self.result["synchronising_calls_in_a_step"] = dict(
                Counter(f"{short(w.filename)}:{w.lineno}" for w in self.said or [] if "synchroniz" in str(w.message))
            )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, `TrainLoader` measures how long each batch takes to come while `waits` is a list."""
        original = TrainLoader.__iter__
        clock = self

        def timed(loader: TrainLoader) -> Iterator[Any]:
            batches = original(loader)
            while True:
                waits = clock.waits
                if waits is not None:
                    wait_for(clock.device)
                asked = time.perf_counter()
                batch = next(batches, None)
                if waits is not None:
                    waits.append(time.perf_counter() - asked)
                if batch is None:
                    return
                yield batch

        TrainLoader.__iter__ = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            TrainLoader.__iter__ = original  # type: ignore[method-assign]


def through_trainer(plan: Plan, clock: ObservedSteps | TurnsClock, *, resident: bool = False) -> dict[str, Any]:
    """`python train.py …` from its Plan on, in this process. `resident`: the data are one batch that lies on the
    device: no workers, no collation, no copy; what is left of a step is the Trainer's and the recipe's."""
    quiet_lightning()
    set_matmul_mode(plan.precision)
    said = io.StringIO()
    try:
        watching = clock.watching() if isinstance(clock, ObservedSteps) else contextlib.nullcontext()
        with watching, contextlib.redirect_stdout(said):
            module = build_module(plan)
            images = batch_of_images(plan, clock.device) if resident else None
            data = Held(images, plan.micro_batch_size) if resident else build_data(plan)
            trainer = build_trainer(plan, module)
            trainer.callbacks.append(clock)  # type: ignore[attr-defined] # the last: it sees steps that are over
            trainer.fit(module, datamodule=data)
    except BaseException:
        print(said.getvalue(), flush=True)
        raise
    return clock.result


def short(path: str) -> str:
    """Without the machine's own folders."""
    return str(path).split("site-packages/")[-1].removeprefix(f"{ROOT}/")


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    defaults = optimizer.defaults
    return f"{type(optimizer).__name__}, " + ("fused" if defaults.get("fused") else "foreach where it is the default")
