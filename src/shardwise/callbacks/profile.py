"""Profiles some steps: those that the Plan names, and those that `shardwise profile` asks a run for.

All ranks learn of a request at the same step, as they learn of a signal (see process/signals.py), and all know the
window: each gives the ranks that are profiled time to write, and leaves the window out of its speeds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.after_run import ProfileReading, has_tools
from shardwise.callbacks.guard import Guard, RollBack
from shardwise.callbacks.saving import Saving
from shardwise.callbacks.steps import StepLog
from shardwise.callbacks.verdicts import Verdicts
from shardwise.config.groups import ProfileConfig
from shardwise.metrics.memory_profile import Span
from shardwise.metrics.profiler import (
    PREFIX,
    STEP,
    Marks,
    MemoryRecorder,
    NsightRecorder,
    Phases,
    Recorder,
    TorchRecorder,
)
from shardwise.plan import Plan
from shardwise.process.signals import signal_requests
from shardwise.process.watchdog import progress
from shardwise.run_dir.events import append_event
from shardwise.run_dir.files import SUMMARY, profile_folder
from shardwise.run_dir.profile_request import Answer, Request, RequestWatch, remove_request, write_answer
from shardwise.strategies.base import PlannedStrategy, strategy_of


@dataclass(frozen=True)
class Wanted:
    """A window that is to be profiled. `request`: who has asked for it; None: the Plan."""

    profile: ProfileConfig
    first: int  # the earliest first step
    request: Request | None = None


class _Between(Callback):
    """Marks data and validation. It is among the callbacks only while steps are profiled."""

    def __init__(self, window: Callable[[], ProfileWindow | None]) -> None:
        self.window = window

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (window := self.window()) is not None:
            window.marks.close(PREFIX + "data")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (window := self.window()) is not None:
            window.marks.close(PREFIX + "data")
            window.marks.open(PREFIX + "validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (window := self.window()) is not None:
            window.marks.close(PREFIX + "validation")
            window.marks.open(PREFIX + "data")


class Profile(Callback):
    """Opens a window between two steps, where no validation comes, and closes it after its last step."""

    ends_step = True  # it is called after every other callback and the module: see lightning_internals/hooks.py

    def __init__(self, plan: Plan, step_log: StepLog, guard: Guard, saving: Saving, verdicts: Verdicts) -> None:
        self.plan, self.step_log, self.guard, self.saving = plan, step_log, guard, saving
        self.verdicts = verdicts
        self.wanted: list[Wanted] = []
        self.window: ProfileWindow | None = None  # from one step before it is open
        self.watch: RequestWatch | None = None
        self.asked: Request | None = None  # what rank 0's thread has seen last
        self.earlier = False  # whether an earlier start of the run has taken the Plan's profile, or tried to
        self._between = _Between(lambda: self.window)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        start = self.plan.profile.start  # no rank can be profiled yet, so all see the same
        if start is not None and self.plan.profile.tool == "torch":  # the launcher makes the folder for the others
            self.earlier = profile_folder(self.plan.run_dir, start).exists()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        start = self.plan.profile.start
        if start is not None and self.earlier:
            folder = profile_folder(self.plan.run_dir, start)
            if not (folder / SUMMARY).exists():
                self._say(
                    trainer, f"none is taken: an earlier start of the run began one; remove {folder} to try again"
                )
        elif start is not None and start <= trainer.global_step:
            done = trainer.global_step
            self._say(trainer, f"none is taken: profile.start={start}, and the run goes on after step {done}")
        elif start is not None:
            self.wanted.append(Wanted(self.plan.profile, start))
        if trainer.is_global_zero and not self.plan.quick_check:
            self.watch = RequestWatch(Path(self.plan.run_dir), partial(self._ask, trainer))
            strategy_of(trainer).closing.add(self.watch.close)

    def _ask(self, trainer: Trainer, request: Request) -> None:
        """Hand on a request, in the thread of rank 0 that has seen it."""
        tool, profiler = self.plan.profile.tool, self.plan.profiler
        if tool != "torch" or profiler == "pytorch":
            word = f"profiler={profiler}" if tool == "torch" else f"profile.tool={tool}"
            self._answer(request, "failed", f"the run is profiled by {word} already")
            return
        self.asked = request
        signal_requests.ask_for_profile(request.number)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.window is not None and self.window.is_open:
            self.window.begin_step(trainer.global_step + 1)
        self._between_steps(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._between_steps(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        window = self.window
        if (batch_idx + 1) % self.plan.accumulate_grad_batches:
            if window is not None and window.is_open:
                window.marks.open(PREFIX + "data")
            return
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if number := self.guard.take_profile_request():
            self._accept(trainer, number)
        if window is not None and window.is_open:
            if trainer.global_step < window.last:
                window.marks.close_all()
                if not is_last:
                    window.begin_step(trainer.global_step + 1)
                return
            self._close(trainer)
        waits = self.saving.before_validation is not None or is_last
        if self.wanted and not waits:  # else there is more to come before the next step
            self._between_steps(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.window is not None and self.window.is_open:
            self._close(trainer)
        for wanted in self.wanted:
            self._say(trainer, f"none is taken: the run has ended with step {trainer.global_step}, before step "
                      f"{wanted.first}")  # fmt: skip
            self._answer(wanted.request, "failed", "the run has ended before it could be profiled")
        if self.window is not None:
            progress.doing("reading the profile")
            self.window.wait()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # After another error the device, or another rank, may never answer: then the profiler is left as it is.
        if isinstance(exception, RollBack) and self.window is not None:
            self.window.abandon()

    def _accept(self, trainer: Trainer, number: int) -> None:
        """Plan the window of a request. All ranks do so at the same step."""
        asked = Request.of_number(number)
        ranks: tuple[int, ...] | str = "all" if asked.all_ranks else (0,)
        profile = ProfileConfig(trainer.global_step + 2, asked.steps, ranks, stacks=asked.stacks)
        self.wanted.append(Wanted(profile, trainer.global_step + 2, self.asked))
        self.wanted.sort(key=lambda wanted: wanted.first)

    def _between_steps(self, trainer: Trainer) -> None:
        """Open a window that begins with the next step, or prepare one that begins with the step after it."""
        if not self.wanted or (self.window is not None and self.window.is_open):
            return
        wanted, step = self.wanted[0], trainer.global_step
        if step + 2 < wanted.first:
            return
        if self.window is None or self.window.is_over:
            if self.window is not None:
                self.window.wait()
            self.window = ProfileWindow(self.plan, wanted.profile, strategy_of(trainer), self.saving)
            if step + 2 == wanted.first:
                self.window.prepare()
                return
        del self.wanted[0]
        folder = self.window.open(step + 1, partial(self._read, trainer, wanted.request))
        self.step_log.meter.leave_out(self.window.disturbed)
        trainer.callbacks.append(self._between)  # type: ignore[attr-defined]
        self._answer(wanted.request, "begun", str(folder))

    def _close(self, trainer: Trainer) -> None:
        assert self.window is not None
        trainer.callbacks.remove(self._between)  # type: ignore[attr-defined]
        progress.begin_setup()  # the other ranks wait in the next step until this one has its trace
        progress.doing(f"the end of the profile of step {self.window.first}")
        self.window.close(trainer.global_step)
        strategy_of(trainer).step.recorder.restart_clock()

    def _read(self, trainer: Trainer, request: Request | None, text: str, error: Exception | None) -> None:
        """Tell the user, in the thread of rank 0 that has read the profile."""
        assert self.window is not None
        if error is not None:
            self._say(trainer, f"it could not be {text}: {error}; the run goes on")
            self._answer(request, "failed", f"it could not be {text}: {error}")
            return
        self.verdicts.read_profile()
        self.step_log.write(f"\n{text}profile: {self.window.folder} has the trace, the table and a picture")
        window = self.window
        append_event(
            self.plan.run_dir, "profile", window.last, text.splitlines()[0], folder=str(window.folder),
            first=window.first, last=window.last,
        )  # fmt: skip
        self._answer(request, "done", str(window.folder))

    def _answer(self, request: Request | None, state: Any, text: str) -> None:
        if request is None or not request.id:
            return
        run_dir = Path(self.plan.run_dir)
        if state in ("done", "failed"):
            remove_request(run_dir, request)
        write_answer(run_dir, Answer(request.id, state, text))

    def _say(self, trainer: Trainer, text: str) -> None:
        if trainer.is_global_zero:
            self.step_log.write(f"profile: {text}")


# One window of profiled steps on one rank: it records, writes, and on rank 0 has the traces read.


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
