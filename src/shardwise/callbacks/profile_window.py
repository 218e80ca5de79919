"""One window of profiled steps on one rank: it records, writes, and on rank 0 has the traces read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shardwise.after_run import ProfileReading, has_tools
from shardwise.callbacks.saving import Saving
from shardwise.config.groups import ProfileConfig
from shardwise.metrics.memory_profile import Span
from shardwise.metrics.memory_recorder import MemoryRecorder
from shardwise.metrics.phases import PREFIX, STEP, Marks, Phases
from shardwise.metrics.profiler import NsightRecorder, Recorder, TorchRecorder
from shardwise.plan import Plan
from shardwise.run_dir.files import profile_folder
from shardwise.strategies.base import PlannedStrategy


class ProfileWindow:
    """Prepared, open, over: in this order. A rank that is not profiled has one too, which records nothing."""

    def __init__(self, plan: Plan, profile: ProfileConfig, strategy: PlannedStrategy, saving: Saving) -> None:
        self.plan, self.profile, self.strategy, self.saving = plan, profile, strategy, saving
        self.rank = strategy.global_rank
        self.is_open = self.is_over = self.is_prepared = False
        self.first = self.last = 0
        nsight = profile.tool != "torch"
        self.marks = Marks(nvtx=nsight, silent=not profile.has(self.rank))
        self._phases = Phases(self.marks)
        self._recorder: Recorder | None = None
        if profile.has(self.rank):
            device = strategy.root_device
            self._recorder = NsightRecorder(device) if nsight else TorchRecorder(device, stacks=profile.stacks)
        self._when_read: Callable[[str, Exception | None], None] | None = None
        self._memory: MemoryRecorder | None = None
        if profile.has(self.rank) and profile.memory:
            self._memory = MemoryRecorder(strategy.root_device, keeps_history=plan.memory_history)
        self._work: threading.Thread | None = None
        self._reading: ProfileReading | None = None
        self._is_stopped = False

    @property
    def folder(self) -> Path:
        return profile_folder(self.plan.run_dir, self.first)

    @property
    def disturbed(self) -> range:
        """The steps that take longer: those of the window, the one before if it was prepared, and the one after."""
        return range(self.first - self.is_prepared, self.last + 2)

    def prepare(self) -> None:
        self.is_prepared = True
        if self._recorder is not None:
            self._recorder.prepare()

    def open(self, first: int, when_read: Callable[[str, Exception | None], None]) -> Path:
        """Begin to record with step `first`. Returns the folder of the profile.

        `when_read(text, error)` is called in a thread with the table of rank 0, or with what could not be done.
        """
        self._when_read = when_read
        self.first, self.last, self.is_open = first, first + self.profile.steps - 1, True
        if self._recorder is not None or self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        if self._recorder is None:
            return self.folder
        self._phases.mark(self.strategy, "training_step", "forward")
        self._phases.mark(self.strategy, "backward", "backward")
        self._phases.mark_after_closure(self.strategy.planned_precision, "optimizer", self._note_gradients)
        self._phases.mark(self.saving, "save_step", "save")
        if self.marks.nvtx:
            self._phases.mark_units(dict(self.strategy.units.modules))
        if self._memory is not None:
            self._memory.start(self.strategy.module, self.strategy.optimizers, self.strategy.sharded.held_memory())
        self._recorder.start()
        self.begin_step(first)
        return self.folder

    def _note_gradients(self) -> None:
        if self._memory is not None:
            self._memory.note_gradients(self.strategy.module)

    def begin_step(self, step: int) -> None:
        self.marks.close_all()
        self.marks.open(STEP.format(step))
        self.marks.open(PREFIX + "data")

    def close(self, last: int) -> None:
        """Stop after step `last`, and write and read beside the training."""
        self.last, self.is_open, self.is_over = last, False, True
        self._phases.remove()
        if self._recorder is not None:
            self._recorder.stop()
        if self._memory is not None:
            self._memory.stop()
        if self._recorder is not None or self.rank == 0:
            self._work = threading.Thread(target=self._write_and_read, name="profile", daemon=True)
            self._work.start()
            self.strategy.closing.add(self._stop_reading)

    def abandon(self) -> None:
        """Throw away what was recorded."""
        self._phases.remove()
        if self.is_open and self._recorder is not None:
            self._recorder.stop()
            if self._memory is not None:
                self._memory.stop()
        if self.is_open:
            with suppress(OSError):  # another rank may be quicker
                self.folder.rmdir()
        self.is_open, self.is_over = False, True

    def wait(self) -> None:
        """Wait until the profile is written and read."""
        if self._work is not None:
            self._work.join()

    def _write_and_read(self) -> None:
        assert self._when_read is not None
        doing, text, memory = "written", "", ""
        try:
            if self._recorder is not None:
                self._recorder.write(self.folder, self.rank)
            if self._memory is not None:
                spans = [Span(name, begin / 1e3, end / 1e3) for name, begin, end in self.marks.spans]
                memory = self._memory.write(self.folder, self.rank, spans)
            if self.rank == 0 and self.profile.tool == "torch" and has_tools():
                doing = "read"
                everyone = range(self.plan.topology.world_size)
                self._reading = ProfileReading(self.folder, [rank for rank in everyone if self.profile.has(rank)])
                text = self._reading.wait()
        except Exception as error:  # nobody else would tell of it
            if not self._is_stopped:
                self._when_read(doing, error)
            return
        if text:
            self._when_read(f"{text}\n{memory}\n" if memory else text, None)

    def _stop_reading(self) -> None:
        self._is_stopped = True
        if self._reading is not None:
            self._reading.stop()
