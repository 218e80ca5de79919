"""DeepSpeed, imported once and quietly, and its Adam for the CPU."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from shardwise.plan import Plan


def import_deepspeed(plan: Plan) -> Any:
    """The package, quiet, on the Plan's accelerator."""
    os.environ.setdefault("DS_ACCELERATOR", plan.accelerator)
    import deepspeed
    from deepspeed.runtime.zero import parameter_offload

    from shardwise.optim.deepspeed_operators import watch_builds

    # ZeRO-3 looks for tensors in what a layer returns, and an object with __slots__ has no __dict__ to look in.
    parameter_offload.vars = lambda output: getattr(output, "__dict__", {})
    watch_builds()
    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    return deepspeed


def cpu_adam(plan: Plan) -> Any:
    """DeepSpeed's Adam for offloaded state, or None where it cannot be compiled: torch's runs there too, slower."""
    import_deepspeed(plan)
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # whatever a compiler may say
        warnings.warn(f"DeepSpeedCPUAdam cannot be built ({str(error).splitlines()[0]}): torch's runs", stacklevel=2)
        return None
    return DeepSpeedCPUAdam
