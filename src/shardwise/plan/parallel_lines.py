"""What a dry run states of tensor, context and pipeline axes before there is a run: idle time, memory, bytes sent."""

from __future__ import annotations

from math import prod
from typing import Any

from shardwise.config.cluster import ClusterConfig
from shardwise.plan import parallel_arithmetic as arithmetic
from shardwise.plan.decoder import SIZES, Decoder, decoder_of, recomputed
from shardwise.plan.optimizer_bytes import bytes_of_weight, known_optimizer, size_of
from shardwise.plan.pipeline_split import stage_costs
from shardwise.plan.plan import Plan
from shardwise.plan.schedule_text import schedule_lines


def parallel_lines(plan: Plan) -> list[str]:
    """The lines of a Plan; none where every rank sees samples of its own.

    Bytes are stated for a model whose words have the sizes of a decoder with gated layers, such as the recipe's.

    Raises:
        ConfigError: the model's layers cannot be cut into the stages of the pipeline.
    """
    topology = plan.topology
    if topology.is_data_parallel_only or plan.stage != "fit":
        return []
    decoder = decoder_of(plan)
    lines = _schedule(plan, decoder) if topology.pipeline > 1 else []
    if decoder is None:
        return [*lines, f"bytes are not stated: they need data.sequence_length and model.{', '.join(SIZES)}"]
    each = ", ".join(f"{axis} {size / 1e9:.3g} GB" for axis, size in bytes_sent(plan, decoder).items())
    ranks = ", ".join(f"{size / 1e9:.3g} GB" for size in state_bytes(plan, decoder))
    word = known_optimizer(plan)
    state = f"weights, gradients and the state of {word}" if word else "weights and gradients, without optimizer state,"
    of = "of each rank in the order of the layers" if topology.pipeline > 1 else "of a rank"
    return [
        *lines,
        f"a rank sends in a step{', on average over the stages' * (topology.pipeline > 1)}: {each}",
        f"{state} {of}: {ranks}",
    ]


def explain_memory(plan: Plan, cluster: ClusterConfig) -> list[str]:
    """A line where a GPU of the cluster cannot hold even the weights, the gradients and the optimizer's state."""
    decoder, has = decoder_of(plan), cluster.gpu_memory_gib
    if plan.stage != "fit" or plan.accelerator == "cpu" or decoder is None or has is None:
        return []
    if plan.capabilities.owns_step or plan.freeze:  # it keeps other copies; what is frozen has weights alone
        return []
    needs = max(state_bytes(plan, decoder)) / 2**30
    return [] if needs <= has else [
        f"memory will run out: weights, gradients and optimizer state of a rank take {needs:.0f} GiB, and a GPU of "
        f"cluster={cluster.name} has {has:.0f} GiB; strategy=fsdp over more ranks or optimizer=adamw_8bit takes less"
    ]  # fmt: skip


def _schedule(plan: Plan, decoder: Decoder | None) -> list[str]:
    strategy, ranks = plan.strategy, plan.topology.pipeline
    layout = strategy.pipeline_schedule, ranks, strategy.pipeline_chunks, plan.accumulate_grad_batches
    if decoder is None:
        return schedule_lines(*layout, strategy.pipeline_split or ())
    split, layers = decoder.split(plan), [float(decoder.layer_flops)] * decoder.n_layers
    forward = stage_costs(split, layers, behind=decoder.head_flops)
    again = stage_costs(split, [recomputed(plan) * layer for layer in layers])
    backward = [2 * cost + more for cost, more in zip(forward, again, strict=True)]
    head = f"the head costs as much as {decoder.head_flops / decoder.layer_flops:.3g} layers"
    return [*schedule_lines(*layout, split, forward, backward), head]


def bytes_sent(plan: Plan, decoder: Decoder) -> dict[str, float]:
    """What a rank sends in a step over each axis, on average over the stages of a pipeline."""
    topology, micro_batches, strategy = plan.topology, plan.accumulate_grad_batches, plan.strategy
    stages, chunks = topology.pipeline, strategy.pipeline_chunks
    compute, reduce = size_of(plan.precision.compute_dtype), size_of(plan.precision.reduce_dtype)
    shape = {"samples": plan.micro_batch_size, "tokens": decoder.tokens, "width": decoder.dim}
    shape |= {"micro_batches": micro_batches, "context": topology.context, "tensor": topology.tensor}
    heads = {"heads": decoder.n_heads, "key_heads": decoder.n_kv_heads}
    layers, shards = decoder.n_layers / stages, topology.shard * topology.context
    sent = {}
    if stages > 1:
        inner = 1 - 1 / (chunks * stages)  # the first stage and the last hand over in one direction each
        sent["pipeline"] = compute * inner * arithmetic.pipeline_elements(chunks=chunks, **shape)
        if decoder.tied:  # both ends send the gradients of the weight that they share, as large as its parameters
            ends = 2 * decoder.table / (topology.tensor * shards)
            sent["pipeline"] += size_of(plan.precision.parameter_dtype) * ends / stages
    if topology.context > 1:
        by_keys, by_heads = arithmetic.context_elements_by_keys, arithmetic.context_elements_by_heads
        method = strategy.context_parallel_method
        elements = (by_keys if method == "keys" else by_heads)(layers=layers, **shape, **heads)
        sent[f"context by {method}"] = compute * elements
    if topology.tensor > 1:
        inside = arithmetic.tensor_elements(layers=layers, **shape)
        sent["tensor"] = compute * (inside + arithmetic.tensor_end_elements(**shape) / stages)
    if shards > 1:
        whole = decoder.parameters + (decoder.table if decoder.tied and stages > 1 else 0)
        weights: dict[str, Any] = {"shards": shards, "parameters": whole / (stages * topology.tensor)}
        once = strategy.defer_gradient_sync
        scattered = arithmetic.fsdp_scattered_elements(once=once, micro_batches=micro_batches, **weights)
        gathers = 2 * micro_batches  # for the two passes of each
        if strategy.reshard_after_forward is False:
            gathers = micro_batches if stages == 1 else 1
        sent["fsdp"] = compute * arithmetic.fsdp_gathered_elements(gathers=gathers, **weights) + reduce * scattered
    return sent


def state_bytes(plan: Plan, decoder: Decoder) -> list[float]:
    """The bytes of weights, gradients and optimizer state of each rank of a pipeline, in the order of the layers."""
    topology, width = plan.topology, decoder.dim
    shards = topology.shard * topology.context
    deferred = plan.strategy.defer_gradient_sync and shards > 1 and plan.accumulate_grad_batches > 1
    whole_gradients = size_of(plan.precision.reduce_dtype) if deferred else 0  # they add up before they are sharded

    def bytes_of(shape: tuple[int, ...], in_layer: bool) -> float:
        of_one = bytes_of_weight(plan, shape, in_layer) / shards + whole_gradients
        return of_one * prod(shape) / (topology.tensor if len(shape) > 1 else 1)  # norms are whole on every rank

    layer = sum(bytes_of(shape, True) for shape in decoder.matrices) + 2 * bytes_of((width,), True)
    table, norm = bytes_of((decoder.vocab_size, width), False), bytes_of((width,), False)
    split, found = decoder.split(plan), []
    for position in range(topology.pipeline):
        first, last = position == 0, position == topology.pipeline - 1
        tables = 1 if first and last and decoder.tied else first + last
        own = layer * sum(split[position :: topology.pipeline])
        found.append(own + tables * table + last * norm)
    return found
