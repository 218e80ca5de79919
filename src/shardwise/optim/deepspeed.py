"""Imports DeepSpeed without its log lines, and its Adam for the CPU."""

from __future__ import annotations

import logging
import os
import warnings
from importlib import import_module
from typing import Any

from shardwise.plan import Plan


def import_deepspeed(plan: Plan) -> Any:
    """Import DeepSpeed for the Plan's accelerator. Only its warnings are logged."""
    os.environ.setdefault("DS_ACCELERATOR", plan.accelerator)
    import deepspeed
    from deepspeed.runtime.zero import parameter_offload

    from shardwise.optim.deepspeed_operators import watch_builds

    # ZeRO-3 looks for tensors in what a layer returns, and an object with __slots__ has no __dict__ to look in.
    parameter_offload.vars = lambda output: getattr(output, "__dict__", {})
    watch_builds()
    # These print, by no log: that an operator is built, and how much memory is in use at each step of the set-up
    for name in ("deepspeed.comm.torch", "deepspeed.runtime.utils"):
        vars(import_module(name))["print"] = lambda *_, **__: None
    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    return deepspeed


def cpu_adam(plan: Plan) -> Any:
    """DeepSpeed's Adam for offloaded state, or None if it cannot be compiled. Then torch's slower Adam runs."""
    import_deepspeed(plan)
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # a compiler may fail in any way
        warnings.warn(f"DeepSpeedCPUAdam cannot be built ({str(error).splitlines()[0]}): torch's runs", stacklevel=2)
        return None
    return DeepSpeedCPUAdam
