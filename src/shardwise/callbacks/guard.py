"""Watches every step for a loss or gradient that is not finite, and for a loss that leaps. See docs/guard.md.

The device itself decides in time and leaves the weights as they are (`step/verdict.py`). The host reads the verdict
`LAG` steps later, at the same step on every rank, and acts.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from copy import copy
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

from shardwise.callbacks.saving import Saving
from shardwise.callbacks.steps import StepLog
from shardwise.distributed.mesh import gather_objects
from shardwise.errors import ConfigError, NonFiniteError, class_name, count
from shardwise.plan import Plan
from shardwise.process.signals import signal_requests, to_leave, to_profile, to_save
from shardwise.run_dir.files import GUARD
from shardwise.step.record import LAG, StepRecord
from shardwise.step.verdict import SPIKE_MINIMUM, SPIKE_WINDOW, robust_z_of
from shardwise.strategies.base import PlannedStrategy, strategy_of

# After this many skipped steps in a row the loss scale has been halved from 65536 to 2**-16: it is not what is wrong
_SCALER_SKIPS = 32


class RollBack(Exception):
    """Raised to go on from the last checkpoint and to skip the window that begins after `start` samples."""

    def __init__(self, start: int) -> None:
        self.start = start


class Guard(Callback):
    """Reads every step's numbers, hands them on to the log, and stops, skips or rolls back where the Plan says so."""

    ends_step = True  # it is called after every other callback and the module: see lightning_internals/hooks.py

    def __init__(self, plan: Plan, step_log: StepLog, saving: Saving) -> None:
        self.plan, self.step_log, self.saving = plan, step_log, saving
        self.unread: deque[StepRecord] = deque()
        self.before: deque[float] = deque(maxlen=SPIKE_WINDOW)  # the losses of the last steps
        self.in_a_row = 0  # steps that were skipped
        self.scaler_skips = 0  # steps in a row that the loss scaler has skipped
        self.leave = self.save = False  # what a signal to any rank asks for: all ranks learn it at the same step
        self.profile = 0  # the profile that somebody asks for, see `take_profile_request`
        # The state of the schedules after each of the last steps: see `_stop`
        self.schedules: deque[tuple[int, Any]] = deque(maxlen=plan.guard.max_in_a_row + LAG + 2)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.plan.find_learning_rate:  # that takes the schedules away
            check_schedules_last(trainer, self.plan)
        self.schedules.append((trainer.global_step, state_of_schedules(trainer)))
        strategy_of(trainer).step.recorder.restart_clock()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.plan.accumulate_grad_batches:
            return
        strategy = strategy_of(trainer)
        if strategy.step.verdict.skipped_by_scaler:  # no step was made
            self._count_scaler_skip(trainer, strategy)
            return
        self.scaler_skips = 0
        loader, precision = strategy.train_loader, strategy.planned_precision
        assert loader is not None
        step = strategy.step.record(trainer.global_step, loader, precision, signal_requests.take_as_number())
        self.step_log.collect(trainer, step.number)
        self.unread.append(step)
        self.schedules.append((step.number, state_of_schedules(trainer)))
        known = step.step_skipped or self._must_know(trainer, step.number)
        while len(self.unread) > LAG:
            self._read(trainer, self.unread.popleft())
        if known:
            self.read_all(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.read_all(trainer)  # fp16 skips steps, so validation may come at a step that was not expected

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.read_all(trainer)  # data of unknown length end without a sign beforehand

    def read_all(self, trainer: Trainer) -> None:
        """Read and log every step up to the last one. Collective."""
        while self.unread:
            self._read(trainer, self.unread.popleft())
        strategy_of(trainer).step.recorder.times.device_was_awaited()
        self.step_log.flush(trainer)

    def add_signal_requests(self, requests: float) -> None:
        """Add what signals have asked of any rank. `requests`: the sum over the ranks."""
        self.leave, self.save = self.leave or to_leave(requests), self.save or to_save(requests)
        self.profile = to_profile(requests) or self.profile

    def end_save_request(self) -> None:
        """Forget the request to save: it is fulfilled."""
        self.save = False

    def take_profile_request(self) -> int:
        """The number of the profile that is asked for, at the same step on every rank, and 0 from then on."""
        number, self.profile = self.profile, 0
        return number

    def _must_know(self, trainer: Trainer, step: int) -> bool:
        """Whether the step has to be read now: a checkpoint, validation or the end comes before the next step."""
        plan = self.plan
        every = (plan.checkpoint.save_every_n_steps, plan.validate_every_n_steps)
        ends = step == plan.max_steps or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        return ends or any(n is not None and step % n == 0 for n in every)

    def _count_scaler_skip(self, trainer: Trainer, strategy: PlannedStrategy) -> None:
        self.scaler_skips += 1
        if self.scaler_skips > _SCALER_SKIPS:
            self.read_all(trainer)
            raise NonFiniteError(
                f"{self.scaler_skips} steps in a row had gradients that are not finite, and the loss scale is down to "
                f"{strategy.planned_precision.loss_scale:g}: it is not the scale; use precision=bf16, or start "
                f"a new run with a smaller optimizer.lr"
            )

    def _read(self, trainer: Trainer, step: StepRecord) -> None:
        numbers = strategy_of(trainer).step.recorder.read(step)
        loss, on_purpose, guard = numbers.loss, numbers.skipped_on_purpose, self.plan.guard
        self.add_signal_requests(numbers.signal_requests)
        if numbers.skipped and step.start in guard.pass_over:
            self.in_a_row += 1  # the device counts it too
            self._print(trainer, f"step {step.number}: its window is passed over")
        elif numbers.skipped:
            self.in_a_row += 1
            kind = "spike" if on_purpose else "non-finite loss" if not math.isfinite(loss) else "non-finite gradient"
            stops = (guard.on_nonfinite == "stop" and not on_purpose) or self.in_a_row > guard.max_in_a_row
            self._pass_over(trainer, step, kind, {"loss": loss, "gradient_norm": numbers.gradient_norm}, stops=stops)
        elif not math.isfinite(loss):
            self._stop_after_step(trainer, step, loss)
        else:
            self.in_a_row = 0
            self._look_for_spike(trainer, step, loss)
        self.before.append(loss)
        self.step_log.add_step(trainer, step, numbers)

    def _look_for_spike(self, trainer: Trainer, step: StepRecord, loss: float) -> None:
        guard = self.plan.guard
        action: str = guard.on_spike
        if not trainer.lightning_module.automatic_optimization and action != "ignore":
            action = "warn"  # the module has stepped already, and after a rollback would step on that window again
        if action in ("ignore", "skip") or len(self.before) < SPIKE_MINIMUM:
            return
        z = robust_z_of(loss, self.before)
        if z <= guard.spike_z:
            return
        message = f"step {step.number}: the loss leapt to {loss:.4g}, {z:.1f} robust standard deviations above the last"
        ranks = self._diagnose(trainer, step)
        self._write_row(trainer, step, "spike", action, {"loss": loss, "z": z, "ranks": ranks})
        if action == "warn":
            self._print(trainer, f"{message} {len(self.before)} (guard.jsonl names its samples)")
            return
        self.step_log.flush(trainer)
        if len(guard.pass_over) >= guard.max_in_a_row:
            raise NonFiniteError(
                f"{message} {len(self.before)}, after {count(len(guard.pass_over), 'window')} passed over: "
                f"guard.max_in_a_row={guard.max_in_a_row}; start a new run with a smaller optimizer.lr, or look at the "
                f"data (guard.jsonl names its samples)"
            )
        self.saving.wait_for_save(trainer)
        self._print(trainer, f"{message} {len(self.before)}: back to the last checkpoint, without its window")
        raise RollBack(step.start)

    def _pass_over(
        self, trainer: Trainer, step: StepRecord, kind: str, numbers: dict[str, float], *, stops: bool
    ) -> None:
        ranks = self._diagnose(trainer, step)
        self._write_row(trainer, step, kind, "stop" if stops else "skip", {**numbers, "ranks": ranks})
        message = f"step {step.number}: {_in_words(kind, ranks, numbers['loss'])}"
        if not stops:
            self._print(trainer, f"{message}; passed over, the weights are as they were")
            return
        saved = self._stop(trainer, step.number - self.in_a_row)
        row = f"; {self.in_a_row} in a row" if self.in_a_row > 1 else ""
        guard = self.plan.guard
        more = "guard.on_nonfinite=skip passes over such steps"
        if guard.on_nonfinite == "skip" or kind == "spike":  # the config asks for skipping already
            more = f"at most guard.max_in_a_row={guard.max_in_a_row} are passed over"
        raise NonFiniteError(
            f"{message}{row}. {saved} Every sample is named in {Path(self.plan.run_dir) / GUARD}. "
            f"{more}; gradient_clip_val=, precision=bf16 or a new run with a smaller optimizer.lr may avoid them"
        )

    def _stop_after_step(self, trainer: Trainer, step: StepRecord, loss: float) -> None:
        """Act on a loss that is not finite after a step that was made: by hand, or since all gradients are finite."""
        by_hand = not trainer.lightning_module.automatic_optimization
        why = "the module optimizes by hand" if by_hand else "all gradients are finite, as if no target counted"
        message = f"step {step.number}: the loss that training_step returned is {loss}, and {why}"
        stops = self.plan.guard.on_nonfinite == "stop"
        self._write_row(trainer, step, "non-finite loss", "stop" if stops else "none", {"loss": loss})
        if not stops:
            return self._print(trainer, f"{message}; nothing could be passed over")
        self.step_log.flush(trainer)
        remedy = "let loss_weight(batch) say how many targets count"
        remedy = "a smaller learning rate or precision=bf16 may avoid it" if by_hand else remedy
        message = f"{message}: weights may have changed by it. {self.plan.goes_on_by} goes on from the last checkpoint"
        raise NonFiniteError(f"{message}; {remedy}")

    def _stop(self, trainer: Trainer, good: int) -> str:
        """Restore the state after step `good`, the last that changed a weight, and save it. Returns what was done."""
        self.step_log.flush(trainer)
        self.saving.forget_state_before_validation()
        strategy = strategy_of(trainer)
        assert strategy.train_loader is not None
        if not strategy.step.rewind(trainer, strategy.train_loader, trainer.global_step - good):
            by = f"{self.plan.goes_on_by} goes on from the last checkpoint"
            return f"The last that changed a weight was in the epoch before; {by}."
        for number, schedules in self.schedules:
            if number == good:
                restore_schedules(trainer, schedules)
        checkpoint = self.plan.checkpoint
        if good == 0:
            return "No step had been made before."
        if not checkpoint.saves:
            return "No checkpoint was asked for."
        if good != self.saving.saved_step:
            self.saving.save_step(trainer)
        self.saving.wait_for_save(trainer, last=True)
        return f"The state before it is checkpoints/step-{good:08d}.ckpt."

    def _diagnose(self, trainer: Trainer, step: StepRecord) -> list[dict[str, Any]]:
        """Gather, on rank 0, what each rank knows of a bad step. Collective.

        That is the loss and the samples of each micro-batch, and the parameters whose gradient is not finite.
        """
        strategy = strategy_of(trainer)
        assert strategy.train_loader is not None and strategy.lightning_module is not None
        losses = step.losses if strategy.mesh.counts_samples else []  # peers of a rank would name the same samples
        samples: Any = (strategy.train_loader.samples_of(step.start) or [None] * len(step.losses))[: len(losses)]
        names = {id(p): name for name, p in strategy.lightning_module.named_parameters()}
        norms = {names.get(id(p), "?"): float(n) for p, n in step.gradients}
        own = {
            "rank": strategy.global_rank,
            "micro_batches": [{"loss": float(x), "samples": s} for x, s in zip(losses, samples, strict=True)],
            "parameters": [name for name, norm in norms.items() if not math.isfinite(norm)],
        }
        return gather_objects(strategy.mesh.group("world"), own)

    def _write_row(self, trainer: Trainer, step: StepRecord, kind: str, action: str, found: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            with (Path(self.plan.run_dir) / GUARD).open("a") as file:
                row = {"time": time.time(), "step": step.number, "what": kind, "action": action,
                       "samples_consumed_before": step.start, **found}  # fmt: skip
                file.write(json.dumps(_strict(row), allow_nan=False) + "\n")

    def _print(self, trainer: Trainer, text: str) -> None:
        if trainer.is_global_zero:
            self.step_log.write(f"guard: {text}")


def _in_words(kind: str, ranks: list[dict[str, Any]], loss: float) -> str:
    if kind == "spike":
        return f"the loss leapt to {loss:.4g}"
    if kind == "non-finite loss":
        found = [
            f"micro-batch {number} of rank {rank['rank']}"
            + (f", samples {_few(micro['samples'], 8, ', ')}" if micro["samples"] else "")
            for rank in ranks
            for number, micro in enumerate(rank["micro_batches"])
            if not math.isfinite(micro["loss"])
        ]
        return f"the loss is not finite ({_few(found, 3, '; ')})"
    names = sorted({name for rank in ranks for name in rank["parameters"]})
    return f"the gradients are not finite ({_few(names, 3, ', ') or 'of no parameter by itself'})"


def _strict(value: Any) -> Any:
    """Replace numbers that are not finite, which JSON lacks, by "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _few(values: list[Any], many: int, between: str) -> str:
    more = f" and {len(values) - many} more" if len(values) > many else ""
    return between.join(map(str, values[:many])) + more


# Notes where the schedules and the optimizers' options stand, and restores it; refuses a schedule that ends before the
# run does: see Guard.


def state_of_schedules(trainer: Trainer) -> Any:
    """The states of the schedules, and the options of the optimizers: a schedule may change a momentum, too."""
    states = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return states, [[_options(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else copy(value) for key, value in group.items()
            if key != "params"}  # fmt: skip


def restore_schedules(trainer: Trainer, schedules: Any) -> None:
    states, options = schedules
    for config, state in zip(trainer.lr_scheduler_configs, states, strict=True):
        config.scheduler.load_state_dict(state)
    for optimizer, saved in zip(trainer.optimizers, options, strict=True):
        for group, group_options in zip(optimizer.param_groups, saved, strict=True):
            group.update(group_options)


def check_schedules_last(trainer: Trainer, plan: Plan) -> None:
    """Refuse a OneCycleLR whose `total_steps` are over before the run is: torch raises in the step that comes next.

    A checkpoint brings the `total_steps` that the run had before.

    Raises:
        ConfigError
    """
    module = trainer.lightning_module
    if not module.automatic_optimization or type(module).lr_scheduler_step is not LightningModule.lr_scheduler_step:
        return  # the module itself decides when a schedule moves on
    if trainer.early_stopping_callbacks:
        return  # the run may end before the schedule does
    for config in trainer.lr_scheduler_configs:
        schedule = config.scheduler
        if type(schedule) is not OneCycleLR:
            continue
        end = trainer.estimated_stepping_batches  # -1 or infinite where no data say it
        last = _last_step(trainer, plan, config)
        if last is None or last >= end or end == float("inf"):
            continue
        lasts = f"OneCycleLR with total_steps={schedule.total_steps} lasts to step {last}, and this run to step {end}"
        give = f"give max_steps={last}" + (" max_epochs=null" if plan.max_steps is None else "")
        if plan.resume is None:
            raise ConfigError(
                f"{class_name(module)}.configure_optimizers: {lasts}; {give}, or "
                f"total_steps=self.trainer.estimated_stepping_batches there"
            )
        raise ConfigError(
            f"resume={plan.resume}: the checkpoint's {lasts}; {give}, with which it ends as it was to end, or begin a "
            f"new run, with a new schedule, from its weights: shardwise export {plan.resume} format=safetensors, then "
            f"init_from= and another name="
        )


def _last_step(trainer: Trainer, plan: Plan, config: Any) -> int | None:
    """The last step at which the run may end, since the next would move the schedule on once too often.

    None: it is not known beforehand; see WindowLoop.update_lr_schedulers.
    """
    left, frequency, batches = config.scheduler.total_steps - config.scheduler.last_epoch, config.frequency, 0
    if config.interval == "step":
        return int((trainer.global_step // frequency + left + 1) * frequency - 1)
    if plan.resume is None and trainer.num_training_batches != float("inf"):
        batches = int(trainer.num_training_batches)  # of an epoch
    return int((left + 1) * frequency * math.ceil(batches / plan.accumulate_grad_batches)) - 1 if batches else None
