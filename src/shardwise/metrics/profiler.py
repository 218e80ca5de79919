"""Records what a rank does in some steps, and writes it down beside the training."""

from __future__ import annotations

import gzip
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import profile

from shardwise.accelerator import profiled_activities, start_capture, stop_capture, synchronize
from shardwise.run_dir.files import partial_path, profile_trace, put_in_place


class Recorder(Protocol):
    """What records the profiled steps of this rank."""

    def prepare(self) -> None:
        """Called a step before, so that the first recorded step does not pay for the set-up."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """Waits until the device has done what the recorded steps have asked of it."""

    def write(self, folder: Path, rank: int) -> None:
        """Write what was recorded. Called in a thread of its own. Raises OSError."""


class TorchRecorder:
    """A trace of torch's profiler, as the Chrome format has it."""

    def __init__(self, device: torch.device, *, stacks: bool) -> None:
        self.device = device
        # torch 2.13 prints two lines for each profile, "USDT:…". Of a GPU its errors would be silenced with them
        if device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile: profile | None = profile(activities=profiled_activities(device), with_stack=stacks)
        self._prepared = False

    def prepare(self) -> None:
        assert self._profile is not None
        self._profile.prepare_trace()
        self._prepared = True

    def start(self) -> None:
        assert self._profile is not None
        if not self._prepared:
            self._profile.prepare_trace()
        self._profile.start_trace()

    def stop(self) -> None:
        assert self._profile is not None
        self._profile.stop_trace()

    def write(self, folder: Path, rank: int) -> None:
        recorded, self._profile = self._profile, None
        assert recorded is not None
        path = profile_trace(folder, rank)
        plain = partial_path(path.with_suffix(""))
        try:
            recorded.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(partial_path(path), "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target, 2**20)
            put_in_place(path)
        finally:
            with suppress(OSError):
                plain.unlink(missing_ok=True)


class NsightRecorder:
    """Tells Nsight, which was started before this program, when to record."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self) -> None: ...

    def start(self) -> None:
        synchronize(self.device)
        start_capture()

    def stop(self) -> None:
        synchronize(self.device)
        stop_capture()

    def write(self, folder: Path, rank: int) -> None: ...
