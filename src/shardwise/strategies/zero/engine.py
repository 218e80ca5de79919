"""Translates the Plan into DeepSpeed's config."""

from __future__ import annotations

import math
from typing import Any

from shardwise.plan import Plan
from shardwise.step.precision_plugin import LOSS_SCALE


def engine_config(plan: Plan, training: bool) -> dict[str, Any]:
    """Make DeepSpeed's config: a new dict for each call, since DeepSpeed writes into it."""
    strategy, precision, cuda = plan.strategy, plan.precision, plan.accelerator == "cuda"
    zero: dict[str, Any] = {
        "stage": plan.zero_stage,
        "reduce_bucket_size": strategy.reduce_bucket_elements,
        "overlap_comm": cuda and strategy.overlap_comm,  # there are no streams on the CPU
        "contiguous_gradients": True,
        "round_robin_gradients": False,  # where a parameter's master lies is the order of its group
    }
    if plan.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": strategy.prefetch_bucket_elements,
            "stage3_param_persistence_threshold": strategy.persistence_threshold_elements,
            "stage3_max_live_parameters": strategy.max_live_elements,
            "stage3_max_reuse_distance": strategy.max_reuse_distance_elements,
            "sub_group_size": strategy.sub_group_elements,
        }
    else:
        zero["allgather_bucket_size"] = strategy.allgather_bucket_elements
    if strategy.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
    if strategy.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": cuda}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulate_grad_batches,
        "gradient_clipping": plan.gradient_clip_val or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        # With this ZeRO-1 in bf16 uses DeepSpeed's BF16_Optimizer, which also accumulates gradients in fp32.
        "data_types": {"grad_accum_dtype": "bf16" if precision.parameter_dtype == "bfloat16" else "fp32"},
        "steps_per_print": None,
    }
    if training or plan.zero_stage == 3:
        config["zero_optimization"] = zero
    if precision.compute_dtype == "bfloat16":
        true = not precision.is_mixed
        config["bf16"] = {
            "enabled": True,
            "check_grad_overflow": False,  # see ZeroPrecision.watch_gradients
            "immediate_grad_update": True,  # adds 16-bit gradients to the fp32 sum at once
            "bf16_master_weights_and_grads": true,
            "bf16_optimizer_states": true,
        }
    if precision.compute_dtype == "float16":
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": round(math.log2(LOSS_SCALE["init_scale"])),
            "loss_scale_window": LOSS_SCALE["growth_interval"],
            "hysteresis": 1,
        }
    return config
