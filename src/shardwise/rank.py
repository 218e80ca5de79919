"""Runs one rank: builds module, data and Trainer, runs the stage, rolls back, prints the results."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import warnings
from typing import Literal

import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from shardwise import accelerator
from shardwise.callbacks.guard import RollBack
from shardwise.callbacks.out_of_memory import OutOfMemoryWatch, start_history
from shardwise.callbacks.predict import Predictions
from shardwise.callbacks.steps import digits, validation_metrics
from shardwise.callbacks.summary import print_table, words
from shardwise.checkpoint.files import verify_resume
from shardwise.config.targets import newly_used
from shardwise.distributed.mesh import init_process_group
from shardwise.errors import count
from shardwise.parallel.precision import set_matmul_mode
from shardwise.plan import Plan
from shardwise.process.watchdog import progress
from shardwise.protocols import optional
from shardwise.run_dir.checkpoints import list_checkpoints, step_of
from shardwise.run_dir.files import PREDICTIONS_TABLE, stage_results, write_whole
from shardwise.trainer import build_data, build_module, build_trainer

_OTHER_STAGES: tuple[Literal["test", "predict"], ...] = ("test", "predict")


def run(plan: Plan) -> None:
    """Run one rank of `plan`. RANK, LOCAL_RANK and WORLD_SIZE are in the environment; one process needs none.

    Raises:
        ConfigError: the user's own code or data cannot work.
        OutOfMemoryError: the rank has run out of memory; the message says what to change.
    """
    quiet_lightning()
    if plan.topology.world_size == 1:  # one rank has a process group too, so Lightning would give this advice
        warnings.filterwarnings("ignore", ".*sync_dist=True.*")
    set_matmul_mode(plan.precision)
    with OutOfMemoryWatch(plan) as watch:
        init_process_group(plan)
        start_history(plan)
        goes_on: Plan | None = verify_resume(plan)
        while goes_on is not None:
            goes_on = run_until_rolled_back(goes_on, watch)
        progress.end()
    # The ranks end together, after the last has written its part: srun kills those that are left after a minute. After
    # a failure there is no barrier: the peers would fail in turn, and NCCL might wait for them.
    dist.barrier()
    dist.destroy_process_group()


def run_until_rolled_back(plan: Plan, *more: Callback) -> Plan | None:
    """Run `plan`. If the guard rolls it back, return the Plan to go on with in the same processes."""
    try:
        run_stage(plan, *more)
        return None
    except RollBack as back:
        start = back.start
    progress.begin_setup()
    collect_garbage(plan)
    # A damaged checkpoint of a later step, which was passed over, may still be there.
    before = [path for path in list_checkpoints(plan.run_dir) if step_of(path) <= start // plan.global_batch_size]
    resume = str(before[-1]) if before else plan.resume
    return verify_resume(plan.going_on_from(resume, may_fall_back=True, pass_over=start))


def run_stage(plan: Plan, *more: Callback) -> None:
    module, data = build_module(plan), build_data(plan)
    for notice in newly_used() if dist.get_rank() == 0 else ():
        print(notice, flush=True)
    predictions = Predictions(plan)
    trainer = build_trainer(plan, module, *more, *([predictions] if plan.stage == "predict" else []))
    # Lightning prints no results: the table below has those of validation, and `predictions` writes its own.
    quiet = {"fit": {}, "predict": {"return_predictions": False}}.get(plan.stage, {"verbose": False})
    getattr(trainer, plan.stage)(module, datamodule=data, ckpt_path=plan.resume, weights_only=True, **quiet)
    if plan.stage == "fit":
        if plan.quick_check:
            lacking = {stage: lacks(stage, module, data) for stage in _OTHER_STAGES}
            del trainer, module, data  # the other stages have a model of their own in memory
            for stage in _OTHER_STAGES:
                check_stage(plan, stage, lacking[stage])
        return
    lines = {"weights": plan.resume or plan.init_from or "as constructed"}
    if plan.stage == "predict":
        lines["predictions"] = f"{count(predictions.rows, 'row')}, in {predictions.path}"
        if (table := predictions.path.with_name(PREDICTIONS_TABLE)).exists():
            lines["as a table"] = str(table)
    elif trainer.is_global_zero:
        measured = validation_metrics(trainer)
        write_whole(stage_results(plan.run_dir, plan.stage), json.dumps({**lines, **measured}, indent=2) + "\n")
        lines |= {words(key): digits(value) for key, value in measured.items()}
    if trainer.is_global_zero:
        print_table(lines)


def lacks(stage: str, module: LightningModule, data: LightningDataModule | None) -> str | None:
    """Why a stage cannot run, in words: of what it needs module and data lack something; None: it can."""
    loader = f"{stage}_dataloader"
    if not is_overridden(f"{stage}_step", module) or not (is_overridden(loader, data) or is_overridden(loader, module)):
        return "is not defined"
    has_data = optional(data, "has_held_out_data")
    return None if has_data is None or has_data else "has no data, since none were held out from training"


def check_stage(plan: Plan, stage: Literal["test", "predict"], lacking: str | None) -> None:
    """Run a few batches of test or predict with a module made anew: a strategy cannot shard one a second time."""
    if lacking is None:
        collect_garbage(plan)
        plan = dataclasses.replace(plan, stage=stage)
        module = build_module(plan)
        more = {"verbose": False} if stage == "test" else {"return_predictions": False}
        getattr(build_trainer(plan, module), stage)(module, datamodule=build_data(plan), **more)
    if dist.get_rank() == 0:
        print(f"quick check: {stage} {lacking or 'runs'}", flush=True)


def collect_garbage(plan: Plan) -> None:
    """Free a module and its optimizer that nobody needs any more."""
    gc.collect()
    accelerator.empty_cache(plan.accelerator)


def quiet_lightning() -> None:
    """Keep out of the log what the headline has said already, and advice that does not apply here."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.callbacks").setLevel(logging.INFO)  # the user has asked for these
    for message in (
        ".*does not have many workers.*",
        ".*isinstance.treespec, LeafSpec.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*GPU available but not used.*",
        ".*number of training batches .* is smaller than the logging interval.*",  # StepLog has its own interval
        ".*callbacks used to create the checkpoint need to be provided.*",  # see checkpoint/optimizers.py
        ".*predict returned None.*",  # a padding batch has no predictions
        ".*`IterableDataset` has `__len__` defined.*",  # if the data end earlier, they do so on all ranks
        ".*RNN module weights are not part of single contiguous chunk.*",  # under fsdp they cannot be
        ".*wandb run already in progress.*",  # a run that was rolled back goes on in the same wandb run
        ".*barrier.*: using the device under current context.*",
        ".*torch.distributed.* is deprecated. Please use.*",  # DeepSpeed causes this on torch 2.13
        ".*when there are global hooks on modules.*",  # what is compiled in a hook, see strategies/weights_in_hooks.py
        ".*torch.distributed is disabled, unavailable.*",  # DCP says this when there is one rank
    ):
        warnings.filterwarnings("ignore", message)
