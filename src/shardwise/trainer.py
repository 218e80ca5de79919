"""Builds the module, the data and Lightning's Trainer from a Plan."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from shardwise.callbacks.configured import leave_out_model_checkpoints
from shardwise.callbacks.order import build_run_callbacks
from shardwise.config.targets import build, locate, second_copy
from shardwise.distributed.rng import derived_seed, seed_streams
from shardwise.errors import ConfigError, a_or_an, count
from shardwise.lightning_internals.hooks import Unprofiled
from shardwise.lightning_internals.loops import run_length
from shardwise.lightning_internals.patches import StoppableTrainer, is_constructed, prepare_trainer
from shardwise.metrics.loggers import build_loggers
from shardwise.optim.matrices import choose_matrices, describe_choice
from shardwise.optim.optimizers import check_ownership, configure_optimizers, muon_matrices
from shardwise.parallel.hugging_face_models import hugging_face_models
from shardwise.parallel.parallelize import find_float8
from shardwise.parallel.precision import default_dtype, set_dtypes
from shardwise.parallel.tensor_parallel import find_division
from shardwise.parallel.units import find_units, units_for
from shardwise.plan import Plan
from shardwise.plan.kernel_choice import check_takes_attention, check_takes_loss
from shardwise.plan.parallel_axes import check_takes_context
from shardwise.plan.resolve import explain_warmup
from shardwise.protocols import initializes_itself, optional
from shardwise.run_dir.events import describe_environment
from shardwise.run_dir.files import ENVIRONMENT, keep_earlier, stage_file, write_whole
from shardwise.strategies import build_strategy
from shardwise.strategies.base import strategy_of
from shardwise.strategies.pipelined_checks import check_module
from shardwise.weights.initialize import freeze_for_good, parameters_on_meta


def check_layers(plan: Plan) -> None:
    """Refuse layers that the tensor or the pipeline axis cannot divide, or of which fp8 cannot take a rank's part,
    before a rank starts.

    The ranks do the same for a module that does not initialise itself: building it would take memory here.

    Raises:
        ConfigError
    """
    topology = plan.topology
    if not initializes_itself(locate(plan.module["_target_"], "module")):
        return
    module = build_module(plan)
    if not initializes_itself(module):
        return
    units, _ = units_for(module, plan)
    divided = find_division(module, topology.tensor).layers if topology.tensor > 1 else {}
    find_float8(module, plan, divided)
    if topology.pipeline > 1:
        check_module(module, units, plan, topology.pipeline * plan.strategy.pipeline_chunks)


def build_module(plan: Plan) -> LightningModule:
    """Build the LightningModule from the Plan's seed.

    If the module initialises itself, its parameters get no memory yet.
    """
    on_meta = initializes_itself(locate(plan.module["_target_"], "module"))
    module = _build(plan, on_meta=on_meta)
    if on_meta and not initializes_itself(module):  # its class does, but not with this model
        module = _build(plan, on_meta=False)
    if not isinstance(module, LightningModule):
        raise ConfigError(
            f"module._target_={plan.module['_target_']} is or returns {a_or_an(type(module).__name__)}: a "
            f"LightningModule is needed{second_copy()}"
        )
    _check_constructed(module, "LightningModule")
    freeze_for_good(plan, module)
    check_ownership(plan, module)
    check_takes_loss(plan, module)
    if (choose_loss := optional(module, "choose_loss")) is not None:
        choose_loss(plan.chosen_loss.name)
    set_dtypes(module, plan.precision)
    check_takes_attention(plan, module)
    check_takes_context(plan, module, has_models=bool(hugging_face_models(module)))
    if (choose_attention := optional(module, "choose_attention")) is not None:
        choose_attention(plan.chosen_attention.name)
    if plan.optimizer is not None:
        matrices = _muon_matrices(plan, module)
        module.configure_optimizers = lambda: configure_optimizers(  # type: ignore[method-assign]
            plan, module, matrices, steps_of_schedule(plan, module)
        )
    elif module.automatic_optimization:
        module.configure_optimizers = one_optimizer(module)  # type: ignore[method-assign]
    if not module.automatic_optimization:
        _check_by_hand(plan, type(module).__name__)
    return module


def _build(plan: Plan, *, on_meta: bool) -> Any:
    seed_streams(derived_seed(plan.seed, "build"))
    with default_dtype(plan.precision), parameters_on_meta() if on_meta else nullcontext():
        return build(plan.module, "module")


def steps_of_schedule(plan: Plan, module: LightningModule) -> int | None:
    """The number of steps that the Plan's schedule is made for. Under max_epochs the training data say it.

    Raises:
        ConfigError: they have no length that is known before they are read.
    """
    if plan.schedule is None:
        return None
    steps = run_length(module.trainer)
    if steps is None:
        raise ConfigError(
            f"schedule={plan.schedule['_target_']} needs the number of steps, and the training data have no length "
            f"that is known before they are read: give max_steps=N in place of max_epochs={plan.max_epochs}, or "
            f"schedule=none"
        )
    if plan.max_steps is None and os.environ["RANK"] == "0":
        epochs = f"max_epochs={plan.max_epochs} is {count(steps, 'step')}"
        print("\n".join([epochs, *explain_warmup(plan, steps)]), flush=True)
    return steps


def _muon_matrices(plan: Plan, module: LightningModule) -> set[str]:
    """The names of the parameters that Muon has, before a strategy shards the layers and changes their classes."""
    which = muon_matrices(plan)
    if which is None:
        return set()
    layers = [layer for _, layer in find_units(module, plan.units).modules]
    chosen = choose_matrices(module, layers, which)
    if os.environ["RANK"] == "0":
        print(describe_choice(module, chosen), flush=True)
    return chosen


def _check_by_hand(plan: Plan, name: str) -> None:
    """Refuse what a module that optimizes by hand cannot have, and options that it takes care of itself.

    Raises:
        ConfigError: a strategy that cannot, a pipeline, a tensor axis, or such an option is set.
    """
    if reason := plan.capabilities.manual_steps:  # before Lightning's own message, that it cannot clip
        raise ConfigError(f"{name} optimizes by hand, which {plan.strategy.name} cannot do: {reason}")
    for axis in ("pipeline", "tensor"):
        if getattr(plan.topology, axis) > 1:
            raise ConfigError(f"{name} optimizes by hand, which strategy.{axis}_parallel_size cannot do: leave it out")
    if plan.accumulate_grad_batches > 1:
        raise ConfigError(
            f"{name} optimizes by hand, so accumulation is its own: global_batch_size={plan.global_batch_size} would "
            f"need {plan.accumulate_grad_batches} micro-batches a step; use global_batch_size="
            f"{plan.micro_batch_size * plan.topology.data_parallel_size}"
            + (" gradient_clip_val=null, since clipping is its own as well" if plan.gradient_clip_val else "")
        )
    if plan.gradient_clip_val:
        raise ConfigError(
            f"{name} optimizes by hand, so clipping is its own: use gradient_clip_val=null instead of "
            f"{plan.gradient_clip_val}, and call self.clip_gradients in training_step"
        )


def one_optimizer(module: LightningModule) -> Callable[[], Any]:
    """The module's `configure_optimizers`, which then refuses several optimizers, of which Lightning steps one, and
    none, with which it trains nothing."""
    own, name = module.configure_optimizers, type(module).__name__

    def configure() -> Any:
        made: Any = own()
        if made is None:
            raise ConfigError(
                f"{name}.configure_optimizers returned None: a run without an optimizer trains nothing; return one, or "
                f"give optimizer=adamw optimizer_override=true"
            )
        optimizers = made[0] if isinstance(made, (list, tuple)) and made and isinstance(made[0], list) else made
        if isinstance(optimizers, (list, tuple)) and len(optimizers) > 1:
            raise ConfigError(
                f"{name} has {len(optimizers)} optimizers, and automatic optimization steps one: set "
                f"self.automatic_optimization = False and step them in training_step, or give one with several groups"
            )
        for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ConfigError(
                    f"{name} uses LBFGS, which asks for the loss several times a step: set "
                    f"self.automatic_optimization = False and step it in training_step, or use another optimizer"
                )
        return made

    return configure


def build_data(plan: Plan) -> LightningDataModule | None:
    """Build the LightningDataModule; None: the module has loaders of its own."""
    if plan.data is None:
        return None
    data = build(plan.data, "data")
    if not isinstance(data, LightningDataModule):
        raise ConfigError(
            f"data._target_={plan.data['_target_']} is or returns {a_or_an(type(data).__name__)}: a "
            f"LightningDataModule is needed{second_copy()}"
        )
    _check_constructed(data, "LightningDataModule")
    return data


def _check_constructed(made: LightningModule | LightningDataModule, kind: str) -> None:
    if not is_constructed(made):
        name = type(made).__name__
        raise ConfigError(
            f"{name} is no whole {kind}: its __init__ does not call super().__init__(); add that as its first line"
        )


def build_trainer(plan: Plan, module: LightningModule, *more: Callback) -> Trainer:
    """Build Lightning's Trainer with every option set, so that it infers nothing. `more` callbacks come first."""
    record = {"plan": dataclasses.asdict(plan)}
    if os.environ["RANK"] == "0":
        record["environment"] = describe_environment()
        path = Path(plan.run_dir) / stage_file(ENVIRONMENT, plan.stage)
        text = json.dumps(record["environment"], indent=2) + "\n"
        keep_earlier(path, text)
        write_whole(path, text)
    callbacks = build_run_callbacks(plan, *more)
    leave_out_model_checkpoints(module)
    accumulate = plan.accumulate_grad_batches
    validate_every = plan.validate_every_n_steps
    # We know who started the ranks. Lightning would look for srun, warn if it is there, and refuse SLURM_NTASKS.
    SLURMEnvironment.detect = staticmethod(lambda: False)  # type: ignore[method-assign]
    trainer = StoppableTrainer(
        accelerator=plan.accelerator,
        devices=plan.topology.devices,
        num_nodes=plan.topology.nodes,
        strategy=build_strategy(plan),
        plugins=[TorchElasticEnvironment()],
        logger=build_loggers(plan, record),
        callbacks=callbacks.all,
        max_steps=-1 if plan.max_steps is None else plan.max_steps,
        min_steps=plan.min_steps,
        min_epochs=plan.min_epochs,
        max_epochs=plan.max_epochs,  # None beside max_steps becomes -1 when training starts
        accumulate_grad_batches=accumulate,
        gradient_clip_val=plan.gradient_clip_val,
        # A module that clips by itself may choose another algorithm
        gradient_clip_algorithm=plan.gradient_clip_algorithm if plan.gradient_clip_val else None,
        # Lightning counts micro-batches here
        val_check_interval=1.0 if validate_every is None else validate_every * accumulate,
        check_val_every_n_epoch=(plan.validate_every_n_epochs or 1) if validate_every is None else None,
        log_every_n_steps=plan.log_every_n_steps,
        deterministic=plan.deterministic or None,  # False would undo what a module has chosen
        benchmark=plan.cudnn_benchmark or None,  # False would do so here as well
        detect_anomaly=plan.debug.anomaly,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        inference_mode=False,  # FSDP2 reuses gathered parameters between training and validation
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks.own),
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks.own),
        enable_model_summary=False,
        default_root_dir=plan.run_dir,
        profiler=build_profiler(plan),
        limit_train_batches=plan.max_train_batches,
        limit_val_batches=0 if plan.max_validation_batches == 0 else None,
    )
    prepare_trainer(
        trainer,
        module,
        plan,
        restoring=lambda: strategy_of(trainer).state.restoring(),
        before_epoch_ends=callbacks.before_epoch_ends,
    )
    return trainer


class TrainingStepProfiler(PyTorchProfiler):
    """Counts training batches alone: a validation that comes between two steps does not move the window on."""

    STEP_FUNCTIONS = {"training_step"}


def build_profiler(plan: Plan) -> Profiler:
    """Lightning's profiler of this name. Rank 0 writes its report into the run's folder."""
    kinds: dict[str, Callable[..., Profiler]] = {
        "simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler,
    }  # fmt: skip
    if plan.profiler == "none" or os.environ["RANK"] != "0":
        return Unprofiled()
    more: dict[str, Any] = {}
    if plan.profiler == "pytorch":
        # Names are hooks: divided layers refuse them, and a forward pass that is computed again does not end them
        more["record_module_names"] = plan.topology.tensor == 1 and plan.activation_checkpointing.name == "none"
    if plan.profiler == "pytorch" and plan.stage == "fit":
        kinds["pytorch"] = TrainingStepProfiler
        batches = plan.accumulate_grad_batches  # the profiler counts micro-batches
        more["schedule"] = torch.profiler.schedule(wait=batches, warmup=batches, active=3 * batches)
    return kinds[plan.profiler](dirpath=plan.run_dir, filename="profile", **more)
