"""How much the ranks of a run send in a step, at least how long that takes, and what would make it less."""

from __future__ import annotations

from shardwise.plan import Plan

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def reduces_too_often(plan: Plan) -> bool:
    """Whether gradients are reduced in every micro-batch of a step, where once would do."""
    defers = plan.strategy.defer_gradient_sync or "defer_gradient_sync" not in plan.capabilities.options
    return plan.accumulate_grad_batches > 1 and not defers and _shards(plan) > 1


def _shards(plan: Plan) -> int:
    """The ranks that share the parameters, if any do."""
    topology = plan.topology
    return topology.shard * topology.context if plan.capabilities.shards else topology.world_size


def expected_seconds(plan: Plan, parameters: int) -> float | None:
    """What the transfers of a step take at the bandwidth of the links, if nothing else does; None: not known.

    `parameters`: of the whole module. What ranks exchange of activations is not known here.
    """
    if plan.link_gb_per_second is None or plan.topology.world_size == 1 or not plan.topology.is_data_parallel_only:
        return None
    return _sent_bytes(plan, parameters) / (plan.link_gb_per_second * 1e9)


def _sent_bytes(plan: Plan, parameters: int) -> float:
    """What each rank sends in a step; a gather or a reduction of P bytes over n ranks sends P (n − 1) / n."""
    strategy, windows = plan.strategy, plan.accumulate_grad_batches
    ranks = _shards(plan)
    reduce, gather = (
        _BYTES[dtype] * parameters * (ranks - 1) / ranks
        for dtype in (plan.precision.reduce_dtype, plan.precision.compute_dtype)
    )
    if "gradients" not in plan.capabilities.shards:
        return 2 * reduce
    if not plan.capabilities.shards_parameters:
        return windows * reduce + gather
    times = 2 * windows if strategy.reshard_after_forward is True else windows
    return times * gather + (1 if strategy.defer_gradient_sync else windows) * reduce


def fewer_transfers(plan: Plan) -> str:
    """The override by which the ranks send less."""
    strategy, topology, does = plan.strategy, plan.topology, plan.capabilities
    if reduces_too_often(plan):
        return "strategy.defer_gradient_sync=true reduces gradients once a step, and keeps them unsharded meanwhile"
    for axis, size in (("tensor", topology.tensor), ("context", topology.context)):
        if size > 1:
            smaller = next(size // n for n in range(2, size + 1) if size % n == 0)
            return f"strategy.{axis}_parallel_size={smaller} exchanges less within each layer, where memory suffices"
    if "reshard_after_forward" in does.options and strategy.reshard_after_forward is True and _shards(plan) > 1:
        return "strategy.reshard_after_forward=false gathers parameters once, and keeps them until the backward pass"
    if does.sends_less_between_nodes and topology.nodes > 1:
        return does.sends_less_between_nodes
    if does.sends_less and not strategy.offload_parameters:  # it would need room for all parameters
        return does.sends_less
    if topology.pipeline > 1:
        return f"global_batch_size={2 * plan.global_batch_size} lets stages of the pipeline wait less for each other"
    return f"global_batch_size={2 * plan.global_batch_size} sends half as much for each sample"
