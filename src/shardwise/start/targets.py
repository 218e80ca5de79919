"""Checks what a Plan names: classes, data, packages and files, before any rank starts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from itertools import zip_longest

from shardwise.config.compose import Job
from shardwise.errors import ConfigError
from shardwise.launch.local import check_profiler
from shardwise.metrics import prometheus
from shardwise.plan import Plan
from shardwise.plan.kernel_choice import check_takes_attention, check_takes_loss
from shardwise.plan.parallel_axes import check_takes_context
from shardwise.plan.pipeline import check_stages
from shardwise.protocols import optional
from shardwise.weights.safetensors import check_weights


def check_targets(plans: list[Plan], jobs: Sequence[Job] = ()) -> list[Plan]:
    """Check what depends on the user's classes and data, before any rank starts.

    Returns:
        The Plans, with what follows from the module's class.
    """
    from importlib.util import find_spec

    from lightning.pytorch import LightningDataModule, LightningModule
    from torch.optim import Optimizer

    from shardwise.callbacks.configured import check_callbacks
    from shardwise.config.targets import build, check, locate
    from shardwise.metrics.loggers import check_loggers
    from shardwise.optim.optimizers import check_ownership, try_optimizer

    made = []
    for plan, job in zip_longest(plans, jobs):
        check_weights(plan)
        check_profiler(plan)
        if (package := plan.capabilities.package) and find_spec(package.lower()) is None:
            raise ConfigError(
                f"strategy={plan.strategy.name} needs {package}, which is not installed: "
                f"pip install -r requirements-{package.lower()}.txt"
            )
        if plan.precision.fp8 is not None and find_spec("torchao") is None:
            raise ConfigError("precision=fp8 needs torchao, which is not installed: pip install -e '.[torchao]'")
        if plan.data is not None:
            check(plan.data, "data", LightningDataModule)
        target, data = locate(plan.module["_target_"], "module"), build(plan.data, "data")
        is_given = job is not None and any(".vocab_size=" in word for word in job.overrides)
        if (link := optional(target, "link_arguments")) is not None and not is_given:
            plan = dataclasses.replace(plan, module=link(plan.module, data))
        check(plan.module, "module", LightningModule)
        check_callbacks(plan)
        check_loggers(plan)
        if plan.optimizer is not None:
            check(plan.optimizer, "optimizer", Optimizer, positional=1)  # the argument is the parameters
        if plan.schedule is not None:
            check(plan.schedule, "schedule", positional=1, supplied=("total_steps",))  # the argument is the step
        if isinstance(target, type):
            check_ownership(plan, target)
            plan, line = check_stages(plan, target)
            if line is not None and os.environ.get("RANK", "0") == "0":
                print(line, flush=True)
            plan = check_takes_loss(plan, target)
            plan = check_takes_attention(plan, target)
            check_takes_context(plan, target)
        made.append(plan)
        try_optimizer(plan)
        if os.environ.get("RANK", "0") == "0":
            prometheus.check_directory(plan)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            if plan.topology.tensor * plan.topology.pipeline > 1:
                from shardwise.trainer import check_layers

                check_layers(plan)
            if (check_data := optional(data, "check")) is not None:
                check_data()
            if (check_fit := optional(target, "check_data")) is not None:
                check_fit(plan.module, data)
    return made
