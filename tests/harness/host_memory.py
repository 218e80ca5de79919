"""How much of the host's memory a rank takes while its weights are made from the seed, or read from files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from shardwise.distributed.mesh import init_process_group
from shardwise.plan import Plan
from shardwise.rank import quiet_lightning
from shardwise.trainer import build_module, build_trainer
from shardwise.weights.safetensors import Entry, write_weights

_EVERY_SECONDS = 0.002
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h: larger pieces are mapped one by one


class HostPeak:
    """The largest memory of this process inside, beyond what it had before, in bytes.

    `own`: what no file backs. `mapped`: pages of files, which the host takes back where it needs them. `held`: what is
    left of `own` at the end.
    """

    def __enter__(self) -> HostPeak:
        _give_back()
        self._before = _resident()
        self.own = self.mapped = self.held = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        _give_back()
        self.held = _resident()[0] - self._before[0]

    def _sample(self) -> None:
        over = False
        while not over:
            over = self._over.wait(_EVERY_SECONDS)
            own, mapped = (now - before for now, before in zip(_resident(), self._before, strict=True))
            self.own, self.mapped = max(self.own, own), max(self.mapped, mapped)


def _resident() -> tuple[int, int]:
    """Bytes of this process that no file backs (pinned memory included), and of files that it has mapped."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, shared, mapped = (1024 * int(lines[key].split()[0]) for key in ("RssAnon", "RssShmem", "RssFile"))
    return own + shared, mapped


def _give_back() -> None:
    """Give the system what was freed, now and whenever a tensor is: else it would count, or hide later allocations."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 16)
    libc.malloc_trim(0)


class _ReadyError(Exception):
    """The weights are there, and nothing more is measured."""


class _StopBeforeTraining(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise _ReadyError


# Where a strategy gives the weights their memory, before an optimizer or an engine has any
_MAKES = {"zero1": "_make", "zero2": "_make", "zero3": "_make"}


def measure_setup(plan: Plan, data: LightningDataModule) -> dict[str, Any]:
    """In each rank: build what `plan` trains, up to its first step.

    Returns:
        Bytes: `whole`, of the model's parameters in fp32; and of this rank, the peaks while the weights are made
        (`made`) and while they are read (`read`), each with `own`, `mapped` and `held`.
    """
    quiet_lightning()
    if not torch.distributed.is_initialized():
        init_process_group(plan)
    module = build_module(plan)
    found: dict[str, Any] = {"whole": 4 * sum(parameter.numel() for parameter in module.parameters())}
    trainer = build_trainer(plan, module)
    strategy: Any = trainer.strategy
    if (kind := getattr(strategy, "sharding_class", None)) is not None:
        shard = _measured(found, "made")(kind.shard)
        strategy.sharding_class = type(kind.__name__, (kind,), {"shard": shard})
    else:
        method = _MAKES.get(plan.strategy.name, "setup")
        setattr(strategy, method, _measured(found, "made")(getattr(strategy, method)))
    strategy._end_setup = _measured(found, "read")(strategy._end_setup)
    strategy.teardown = lambda: None  # it copies weights to the CPU
    trainer.callbacks.append(_StopBeforeTraining())  # type: ignore[attr-defined]
    with contextlib.suppress(_ReadyError):
        trainer.fit(module, datamodule=data)
    return found


@contextlib.contextmanager
def _measured(found: dict[str, Any], name: str) -> Iterator[None]:
    with HostPeak() as peak:
        yield
    found[name] = {"own": peak.own, "mapped": peak.mapped, "held": peak.held}


def write_random_weights(plan: Plan, folder: Path, bytes_of_a_file: float) -> int:
    """Write safetensors for the module of `plan`, in bf16, one tensor at a time; the number of their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = [Entry(name, tuple(p.shape), "bfloat16", 2) for name, p in build_module(plan).named_parameters()]
    block = torch.empty(1 << 20, dtype=torch.bfloat16).normal_(0.0, 0.02).view(torch.uint8).numpy().tobytes()

    def read(entry: Entry) -> bytes:
        return (block * (entry.bytes // len(block) + 1))[: entry.bytes]

    write_weights(folder, entries, bytes_of_a_file, read)
    return sum(entry.bytes for entry in entries)
