"""How much the ranks of a run send in a step, at least how long that takes, and what would make it less."""

from __future__ import annotations

from shardwise.plan import Plan

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def reduces_too_often(plan: Plan) -> bool:
    """Whether gradients are reduced in every micro-batch of a step, where once would do."""
    defers = plan.strategy.defer_gradient_sync or not plan.strategy.name.startswith("fsdp")
    return plan.accumulate_grad_batches > 1 and not defers


def expected_seconds(plan: Plan, parameters: int) -> float | None:
    """What the transfers of a step take at the bandwidth of the links, if nothing else does; None: not known.

    `parameters`: of the whole module.
    """
    if plan.link_gb_per_second is None or plan.topology.world_size == 1:
        return None
    return _sent_bytes(plan, parameters) / (plan.link_gb_per_second * 1e9)


def _sent_bytes(plan: Plan, parameters: int) -> float:
    """What each rank sends in a step; a gather or a reduction of P bytes over n ranks sends P (n − 1) / n."""
    strategy, windows = plan.strategy, plan.accumulate_grad_batches
    ranks = plan.topology.shard if strategy.name.startswith("fsdp") else plan.topology.world_size
    reduce, gather = (
        _BYTES[dtype] * parameters * (ranks - 1) / ranks
        for dtype in (plan.precision.reduce_dtype, plan.precision.compute_dtype)
    )
    if strategy.name in ("ddp", "zero1"):
        return 2 * reduce
    if strategy.name == "zero2":
        return windows * reduce + gather
    times = 2 * windows if strategy.reshard_after_forward is True or strategy.zero_stage else windows
    return times * gather + (1 if strategy.defer_gradient_sync else windows) * reduce


def fewer_transfers(plan: Plan) -> str:
    """The override by which the ranks send less."""
    strategy = plan.strategy
    if reduces_too_often(plan):
        return "strategy.defer_gradient_sync=true reduces gradients once a step, and keeps them unsharded meanwhile"
    if strategy.name.startswith("fsdp") and strategy.reshard_after_forward is True:
        return "strategy.reshard_after_forward=false gathers parameters once, and keeps them until the backward pass"
    if strategy.name == "fsdp" and plan.topology.nodes > 1:
        return "strategy=fsdp_hybrid gathers parameters within a node alone"
    if strategy.zero_stage == 3 and not strategy.offload_parameters:  # zero2 would need room for all parameters
        return "strategy=zero2 gathers no parameters within a step"
    return f"global_batch_size={2 * plan.global_batch_size} sends half as much for each sample"
