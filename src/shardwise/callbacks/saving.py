"""Saves checkpoints every N steps, and keeps the last K, the best by a metric, and one every M steps for good."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.callbacks.steps import validation_metrics
from shardwise.checkpoint.plain import Packed
from shardwise.checkpoint.publish import (
    catch_up_on_best,
    is_better,
    note_best,
    publish_again,
    read_best,
    remove_left_over,
    remove_superseded,
)
from shardwise.checkpoint.writer import Outcome, Writer
from shardwise.data.tokenizer import FILE, Tokenizer, same_tokens, tokenizer_beside
from shardwise.distributed.mesh import group_timeout
from shardwise.errors import CheckpointError, ConfigError
from shardwise.lightning_internals.loops import validate_now
from shardwise.lightning_internals.results import step_logging
from shardwise.plan import Plan
from shardwise.process.watchdog import progress
from shardwise.protocols import optional
from shardwise.run_dir.checkpoints import newest_whole, step_of
from shardwise.run_dir.events import append_event, write_job_file
from shardwise.run_dir.files import (
    BEST,
    CHECKPOINTS,
    best_checkpoint_path,
    checkpoint_path,
    tokenizer_folder,
    write_whole,
)
from shardwise.strategies.base import strategy_of


class Naming:
    """Names the best checkpoint, on rank 0. The writer's thread calls it."""

    def __init__(self) -> None:
        # A best checkpoint that could not be named so far, the checkpoint that has its content, and what names it
        self.due: tuple[Path, Path, Callable[[], None]] | None = None

    def name(self, path: Path, written: Path, work: Callable[[], None], *, last: bool = False) -> None:
        """Name `path` as the best by `work`. `written` stays until that has worked."""
        self.due = path, written, work
        try:
            work()
            self.due = None
        except OSError as error:
            goes_on = f"{written.name} stays, and {BEST} is as it was" if last else "it is tried again at the next save"
            print(f"{path} could not be kept as the best: {error}; {goes_on}", flush=True)

    @property
    def source(self) -> Path | None:
        """The checkpoint that is to be the best and has not been named so far."""
        return self.due[1] if self.due else None

    def again(self, *, last: bool = False) -> None:
        """Try what did not work."""
        if self.due is not None:
            self.name(*self.due, last=last)


class Saving(Callback):
    """Decides when a checkpoint is saved. Saving is collective; rank 0 removes old ones once the new one is published.

    The best score is in `best.json` beside its checkpoint, not in the checkpoints: those of the same step are written
    before validation has found it, and another run that goes on from one has a best of its own.
    """

    ends_step = True  # it is called after every other callback and the module: see lightning_internals/hooks.py

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.folder = Path(plan.run_dir) / CHECKPOINTS
        self.best_score: float | None = None
        self.best_path: str | None = None
        self.naming = Naming()
        self.saved_step = self.due_step = -1  # the last step after which a save was made, and was due
        self.writer: Writer | None = None
        self.saves = 0  # the steps that this process has saved; rank 0 counts them
        self.failures = 0  # in a row
        self._handled: Outcome | None = None  # the last outcome that all ranks have acted on
        self._announced: Outcome | None = None  # the last failure that was logged and printed
        self.validated_step = -1
        self.score: dict[str, float] = {}  # of the last validation, by the name of the monitored metric
        self.finished_step = -1  # the step after which nothing was left to do but to end the epoch
        # The content of a checkpoint just before validation, and this rank's own state
        self.before_validation: tuple[Packed, dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"validated_step": self.validated_step, "finished_step": self.finished_step, "score": self.score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validated_step = state_dict["validated_step"]
        self.finished_step, self.score = state_dict.get("finished_step", -1), state_dict.get("score", {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.plan.resume == str(checkpoint_path(self.plan.run_dir, trainer.global_step)):
            self.saved_step = trainer.global_step
            if trainer.is_global_zero:
                self._catch_up_on_best(trainer.global_step)
        self.best_score, self.best_path = trainer.strategy.broadcast(
            read_best(self.folder, self.plan.checkpoint.monitor, keeps=trainer.is_global_zero)
        )
        if trainer.is_global_zero:
            remove_left_over(self.folder)
        if self.plan.resume is not None:
            strategy = strategy_of(trainer)
            strategy.state.take_up_logged()
            strategy.step.call_before_first(partial(self._finish_step, trainer))

    def _finish_step(self, trainer: Trainer) -> None:
        """Catch up on what comes after a step, validation and ReduceLROnPlateau: a checkpoint is written before it."""
        loop = trainer.fit_loop.epoch_loop
        if self.validated_step != trainer.global_step and self._is_due(trainer):
            validate_now(trainer)
        if not trainer.fit_loop.restarted_mid_epoch or self.finished_step == trainer.global_step:
            return
        plateaus = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "step"]
        if {config.monitor for config in plateaus} <= trainer.callback_metrics.keys():  # old checkpoints lack these
            loop.update_lr_schedulers("step", update_plateau_schedulers=True)

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether validation comes after the step that has just ended."""
        if self.plan.max_validation_batches == 0:
            return False
        counted, every = trainer.fit_loop.epoch_loop.batch_progress, self.plan.validate_every_n_steps
        if every is None:
            is_last = counted.current.ready >= trainer.num_training_batches
            return is_last and (trainer.current_epoch + 1) % (self.plan.validate_every_n_epochs or 1) == 0
        # Lightning counts windows: a window may have had its step skipped, or have made several steps
        windows = counted.total.ready // self.plan.accumulate_grad_batches
        return windows > 0 and windows % every == 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if trainer.is_global_zero and self.writer is not None and (ended := self.writer.ended) and ended.error:
            self._announce(trainer, ended, self.failures + ended.is_of_step)
        ends_window = (batch_idx + 1) % self.plan.accumulate_grad_batches == 0
        if ends_window:
            strategy_of(trainer).state.rehearse_after_step()
        self.before_validation = None
        validates = ends_window and self._is_due(trainer)
        # At the last step validation comes first: a run that is resumed there would not validate any more.
        if ends_window and self._saves_after(trainer, step):
            self.due_step = step
        is_last = validates and step in (self.plan.max_steps, step_logging(trainer).last)
        now = ends_window and self.due_step == step and not is_last
        if now and 0 < step != self.saved_step:  # the step is saved already if every step since then was skipped
            self.save_step(trainer)
        if validates:
            self.before_validation = strategy_of(trainer).state.dump(), strategy_of(trainer).state.own_state()

    def _saves_after(self, trainer: Trainer, step: int) -> bool:
        """Whether save_every_n_steps or save_every_n_epochs asks for a save after the window that has just ended."""
        steps, epochs = self.plan.checkpoint.save_every_n_steps, self.plan.checkpoint.save_every_n_epochs
        if epochs is None:
            return steps is not None and step % steps == 0
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        return is_last and (trainer.current_epoch + 1) % epochs == 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        monitor, measured = self.plan.checkpoint.monitor, validation_metrics(trainer)
        if monitor and strategy_of(trainer).reduce_boolean_decision(monitor not in measured, all=False):
            raise wrong_monitor(self.plan, monitor, measured, lambda: self.save_now(trainer, leaves=True))
        self.validated_step, self.before_validation = trainer.global_step, None
        self.score = {monitor: measured[monitor]} if monitor else {}
        if trainer.global_step == self.plan.max_steps:  # this save had to wait for validation
            self._save_at_end(trainer)
        if monitor is None or self.plan.quick_check:
            return
        # Rank 0 decides for all: a metric that its module has not synchronised differs between ranks.
        busy = self.writer is not None and self.writer.busy
        score, busy = trainer.strategy.broadcast((measured[monitor], busy))
        if not busy:
            self.wait_for_save(trainer)  # a checkpoint that could not be written must not count as the best
        if not is_better(self.plan, score, self.best_score):
            return
        step, path = trainer.global_step, best_checkpoint_path(self.plan.run_dir, trainer.global_step)
        # The writer that has this step's checkpoint, or is writing it
        with_step = self.writer if self.saved_step == step else None
        if with_step is None:
            if self._leaves_out(trainer, path):
                return
            self.wait_for_save(trainer)
        self.best_score, self.best_path = score, str(path)
        written = path if with_step is None else checkpoint_path(self.plan.run_dir, step)

        def name_best() -> None:
            if written != path:
                publish_again(written, path)
            note_best(self.plan, path, score)

        published = partial(self.naming.name, path, written, name_best)
        if with_step is not None:
            with_step.also(published)
        else:
            self._save(trainer, path, published)

    def _catch_up_on_best(self, step: int) -> None:
        """The checkpoint of the last step is written after its validation, and has its score. Rank 0 calls this."""
        score = self.score.get(str(self.plan.checkpoint.monitor)) if self.validated_step == step else None
        if score is not None:
            catch_up_on_best(self.plan, step, score)

    def forget_state_before_validation(self) -> None:
        """Forget the state before validation: the guard has taken the run back to an earlier step."""
        self.before_validation = None

    def save_within_epoch(self, trainer: Trainer) -> None:
        """Save the last step while the epoch, which training stops in, does not count as whole yet."""
        self.finished_step = trainer.global_step
        self._save_at_end(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_at_end(trainer)
        self.wait_for_save(trainer, last=True)
        if self.naming.due is not None:
            self.naming.again(last=True)
            self.best_score, self.best_path = read_best(self.folder, self.plan.checkpoint.monitor)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do what an earlier process was killed before it did: after the last step nothing else does."""
        newest = checkpoint_path(self.plan.run_dir, trainer.global_step)
        if trainer.is_global_zero and newest_whole(self.plan.run_dir) == newest:
            self._catch_up_on_best(trainer.global_step)
            remove_left_over(self.folder)
            remove_superseded(self.plan, trainer.global_step, but=self.naming.source)

    def _save_at_end(self, trainer: Trainer) -> None:
        """Save the last step. What fails is tried once more here, as no later save does it."""
        due = self.plan.checkpoint.save_at_end or self.due_step == trainer.global_step
        for _ in range(2):
            if due and 0 < trainer.global_step != self.saved_step:
                self.save_step(trainer)
                self.wait_for_save(trainer)

    def save_now(self, trainer: Trainer, *, leaves: bool) -> str:
        """Save the current step, unless it is saved already, and wait until it is written. Collective.

        Returns:
            What is saved now, in words.

        Raises:
            CheckpointError: the step could not be written, and the run `leaves`, or too many saves have failed.
        """
        step = trainer.global_step
        if not self.plan.checkpoint.saves:
            return "nothing is saved, as checkpoint=none asks for"
        if step == 0:
            return "before the first step there is nothing to save"
        if step != self.saved_step:
            self.save_step(trainer, must=True)
        self.wait_for_save(trainer, last=leaves)
        if self.saved_step != step:
            return f"step {step} could not be saved"
        return f"step {step} is saved as {checkpoint_path(self.plan.run_dir, step)}"

    def save_step(self, trainer: Trainer, *, must: bool = False) -> None:
        """Save the current step. `must`: also while the save before is still being written. Collective."""
        step = trainer.global_step

        def published() -> None:
            self.saves += 1
            write_job_file("saved", str(step))
            append_event(self.plan.run_dir, "save", step, f"{path.name} is saved", path=str(path))
            self.naming.again()
            remove_superseded(self.plan, step, but=self.naming.source)

        path = checkpoint_path(self.plan.run_dir, step)
        if not self._leaves_out(trainer, path, must):
            self._save(trainer, path, published, step)

    def _leaves_out(self, trainer: Trainer, path: Path, must: bool = False) -> bool:
        """Whether to leave a save out since the one before is still being written. Collective.

        The last step, and one that `must` be saved, are never left out.
        """
        if self.writer is None or must or trainer.global_step == self.plan.max_steps:
            return False
        if self.plan.checkpoint.when_busy != "skip" or not trainer.strategy.broadcast(self.writer.busy):
            return False
        if trainer.is_global_zero:
            print(f"checkpoint {path.name} is left out: the one before is still being written", flush=True)
        return True

    def _save(self, trainer: Trainer, path: Path, published: Callable[[], None], step: int | None = None) -> None:
        """Write a checkpoint to `path`. `step`: the step whose regular checkpoint this is, if it is one. Collective."""
        strategy = strategy_of(trainer)
        if self.writer is None:
            self.writer = Writer(
                bool(self.plan.checkpoint.asynchronous), strategy.root_device, group_timeout(self.plan)
            )
            strategy.closing.add(self.writer.close)
        progress.doing(f"saving {path.name}")
        self.wait_for_save(trainer)
        if step is not None:
            self.saved_step = step
        if self.before_validation is not None and trainer.validating:
            snapshot = strategy.state.snapshot(*self.before_validation)
        else:
            snapshot = strategy.state.snapshot(strategy.state.dump())
        strategy.planned_precision.begin_checkpoint_copy(self.writer.save(path, snapshot, published))
        if not self.plan.checkpoint.asynchronous:
            self.wait_for_save(trainer)
        strategy.step.recorder.restart_clock()

    def wait_for_save(self, trainer: Trainer, *, last: bool = False) -> None:
        """Wait for the save under way, and act on a failure. Collective, so that all ranks act at the same point.

        Raises:
            CheckpointError: the save of a step has failed, and it is the `last`, or too many have failed.
        """
        outcome = None if self.writer is None else self.writer.wait()
        if outcome is None or (outcome is self._handled and not (last and outcome.error)):
            return
        if outcome is not self._handled:
            self.failures = self.failures + outcome.is_of_step if outcome.error else 0
        self._handled = outcome
        if outcome.error is None:
            return
        if outcome.path == checkpoint_path(self.plan.run_dir, self.saved_step):
            self.saved_step = -1
        if self.best_path is not None and step_of(Path(self.best_path)) == step_of(outcome.path):
            dropped = self.best_path
            best = read_best(self.folder, self.plan.checkpoint.monitor)
            self.best_score, self.best_path = trainer.strategy.broadcast(best)
            if outcome.is_of_step and dropped != self.best_path and trainer.is_global_zero:
                print(f"{dropped} was to share its files: the best stays the one of before", flush=True)
        stops = outcome.is_of_step and (last or self.failures > self.plan.checkpoint.max_failures)
        self._announce(trainer, outcome, self.failures, raised=stops)
        if stops:
            row = f", {self.failures} in a row" if self.failures > 1 else ""
            may = self.plan.checkpoint.max_failures
            limit = f"; checkpoint.max_failures={may} may fail" if self.failures > may else ""
            raise CheckpointError(
                f"{outcome.path} could not be written: {outcome.error}{row}; make room or give another runs_dir=, then "
                f"{self.plan.goes_on_by} goes on from the last that is whole{limit}"
            )

    def _announce(self, trainer: Trainer, outcome: Outcome, failures: int, *, raised: bool = False) -> None:
        """Log and print a failure once: rank 0 does so as soon as it knows; all ranks act on it at the next save.

        `raised`: an error follows, so nothing is printed.
        """
        if outcome is self._announced:
            return
        self._announced = outcome
        for logger in trainer.loggers:
            logger.log_metrics({"checkpoint/failures": float(failures)}, trainer.global_step)
        if trainer.is_global_zero:
            failed = f"{outcome.path} could not be written: {outcome.error}"
            append_event(self.plan.run_dir, "save failed", None, failed)
        if trainer.is_global_zero and not raised:
            does = "stops" if failures > self.plan.checkpoint.max_failures else "goes on, and tries again"
            does = f"{does} at the next save" if outcome.is_of_step else "goes on, and the best stays the one of before"
            print(f"checkpoint {failed}; the run {does}", flush=True)


# What ends a run whose `checkpoint.monitor` is not among the metrics of its validation.


def wrong_monitor(plan: Plan, monitor: str, measured: Mapping[str, float], save: Callable[[], str]) -> ConfigError:
    """The error, after `save` has saved what was trained and said so. Collective, as `save` is.

    `measured`: the metrics of this rank; another one may lack the one to monitor.
    """
    why = "validation does not log it on every rank; log it on all"
    if monitor not in measured:
        why = f"validation logs {', '.join(measured) or 'nothing'}; monitor one of these"
    saved = ""
    if plan.checkpoint.saves:
        try:
            saved = f"; {save()}"  # and `process/report.py` says how the run goes on
        except CheckpointError as error:  # the first mistake is the one to mend
            saved = f"; {error}"
    return ConfigError(f"checkpoint.monitor={monitor}: {why}, or give checkpoint.monitor=null{saved}")


# Keeps the files of the data's tokenizer in the run's folder, from where each checkpoint gets them.


class KeepTokenizer(Callback):
    """Refuses weights that were trained with another tokenizer than the data's."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        tokenizer: Tokenizer | None = optional(getattr(trainer, "datamodule", None), "tokenizer")
        if tokenizer is None:
            return
        if "tokenizer" not in self.plan.resume_allow:
            _check_same(tokenizer, self.plan)
        if stage == "fit" and trainer.is_global_zero:
            _write(tokenizer, tokenizer_folder(self.plan.run_dir))


def _check_same(tokenizer: Tokenizer, plan: Plan) -> None:
    option = "resume" if plan.resume is not None else "init_from"
    weights = plan.resume or plan.init_from
    before = None if weights is None else tokenizer_beside(Path(weights))
    if before is not None and not same_tokens(before.read_text(encoding="utf-8"), tokenizer.files()[FILE]):
        raise ConfigError(
            f"{option}={weights} was trained with the tokenizer {before}, and the data's tokens are those of "
            f"{tokenizer.name}, where a number stands for another text: prepare the data with "
            f"tokenizer={before.parent}, or give resume_allow=[tokenizer] if this is meant"
        )


def _write(tokenizer: Tokenizer, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # that of an earlier start, which may have had other files
    folder.mkdir(parents=True)
    for name, content in tokenizer.files().items():
        write_whole(folder / name, content)
