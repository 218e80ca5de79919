"""What tensor, context, pipeline and FSDP axes cost: idle time, memory and bytes sent, as a dry run states them."""

from __future__ import annotations

from math import prod
from typing import Any

from shardwise.config.groups import ClusterConfig
from shardwise.plan.optimizer import bytes_of_weight, known_optimizer, size_of
from shardwise.plan.pipeline import SIZES, Decoder, decoder_of, recomputed, stage_costs
from shardwise.plan.pipeline_schedule import GPIPE, ONE_F_ONE_B, schedule_lines
from shardwise.plan.plan import Plan

# What a dry run states of tensor, context and pipeline axes before there is a run: idle time, memory, bytes sent.


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
    ranks = ", ".join(f"{size / 1e9:.3g} GB" for size in state_bytes_of_rank(plan, decoder))
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
    needs = max(state_bytes_of_rank(plan, decoder)) / 2**30
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
        sent["pipeline"] = compute * inner * pipeline_elements(chunks=chunks, **shape)
        if decoder.tied:  # both ends send the gradients of the weight that they share, as large as its parameters
            ends = 2 * decoder.table / (topology.tensor * shards)
            sent["pipeline"] += size_of(plan.precision.parameter_dtype) * ends / stages
    if topology.context > 1:
        by_keys, by_heads = context_elements_by_keys, context_elements_by_heads
        method = strategy.context_parallel_method
        elements = (by_keys if method == "keys" else by_heads)(layers=layers, **shape, **heads)
        sent[f"context by {method}"] = compute * elements
    if topology.tensor > 1:
        inside = tensor_elements(layers=layers, **shape)
        sent["tensor"] = compute * (inside + tensor_end_elements(**shape) / stages)
    if shards > 1:
        whole = decoder.parameters + (decoder.table if decoder.tied and stages > 1 else 0)
        weights: dict[str, Any] = {"shards": shards, "parameters": whole / (stages * topology.tensor)}
        once = strategy.defer_gradient_sync
        scattered = fsdp_scattered_elements(once=once, micro_batches=micro_batches, **weights)
        gathers = 2 * micro_batches  # for the two passes of each
        if strategy.reshard_after_forward is False:
            gathers = micro_batches if stages == 1 else 1
        sent["fsdp"] = compute * fsdp_gathered_elements(gathers=gathers, **weights) + reduce * scattered
    return sent


def state_bytes_of_rank(plan: Plan, decoder: Decoder) -> list[float]:
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


# What tensor, context, pipeline and FSDP axes cost, from plain numbers: idle time, memory, and what a rank sends.
#
# The letters are those of the papers: p ranks of a pipeline with v stages each, m micro-batches of b samples with s
# tokens in a step, width h, a heads of which k have keys of their own, t tensor ranks, c context ranks, and n ranks
# that shard a weight. What is sent is counted in elements, one rank's, in one step; a ring moves what the formulas say.


def bubble(ranks: int, chunks: int, micro_batches: int) -> float:
    """The idle time of a pipeline over its ideal time, where all stages cost the same: (p−1)/(v·m).

    Narayanan et al. 2021, arXiv 2104.04473; for v = 1 GPipe, arXiv 1811.06965.
    """
    return (ranks - 1) / (chunks * micro_batches)


def idle_share(ranks: int, chunks: int, micro_batches: int) -> float:
    """The share of a step in which a rank waits, where all stages cost the same: (p−1)/(v·m+p−1)."""
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)


def micro_batches_kept(schedule: str, position: int, ranks: int, chunks: int, micro_batches: int) -> float:
    """The micro-batches whose activations a rank of a pipeline keeps at most, in micro-batches through all its stages.

    GPipe m; 1F1B p−r; interleaved (2(p−r−1)+(v−1)p+1)/v; never more than m. r: the position, 0 with the first layers.
    Korthikanti et al. 2022, arXiv 2205.05198.
    """
    if schedule == GPIPE:
        return micro_batches
    if schedule == ONE_F_ONE_B:
        return min(ranks - position, micro_batches)
    return min((2 * (ranks - position - 1) + (chunks - 1) * ranks + 1) / chunks, micro_batches)


def pipeline_elements(
    *, micro_batches: int, samples: int, tokens: int, width: int, chunks: int = 1, context: int = 1, tensor: int = 1
) -> float:
    """What a rank in the middle of a pipeline hands over: 2·m·v·b·s·h/(c·t), activations on and gradients back.

    The division by t is that of sequence parallelism: between layers, each tensor rank has a part of the tokens.
    """
    return 2 * micro_batches * chunks * samples * tokens * width / (context * tensor)


def tensor_elements(
    *, layers: float, micro_batches: int, samples: int, tokens: int, width: int, tensor: int, context: int = 1
) -> float:
    """What tensor and sequence parallelism send inside the layers: 8·b·s·h/c·(t−1)/t, a layer and a micro-batch.

    Two gathers and two scatters forward, as many backward. Shoeybi et al. 2019, arXiv 1909.08053, and 2205.05198.
    """
    return 8 * layers * micro_batches * samples * tokens * width / context * (tensor - 1) / tensor


def tensor_end_elements(
    *, micro_batches: int, samples: int, tokens: int, width: int, tensor: int, context: int = 1
) -> float:
    """What tensor parallelism sends at the embedding and at the loss: (4·h+6)·b·s/c·(t−1)/t, a micro-batch.

    A scatter behind the embedding and a gather before the head, and both again backward; three all-reduces of one
    number a token (maximum, sum, the target's logit), each of which sends twice its size.
    """
    return (4 * width + 6) * micro_batches * samples * tokens / context * (tensor - 1) / tensor


def context_elements_by_heads(
    *, layers: float, micro_batches: int, samples: int, tokens: int, width: int, heads: int, key_heads: int,
    context: int, tensor: int = 1,
) -> float:  # fmt: skip
    """What context parallelism by heads sends: 2·(2+2k/a)·b·s·h/(c·t)·(c−1)/c, a layer and a micro-batch.

    Queries, keys and values go out, the result comes back, each by an all-to-all; the gradients do the same.
    DeepSpeed-Ulysses, arXiv 2309.14509.
    """
    each_way = (2 + 2 * key_heads / heads) * samples * tokens * width / (context * tensor) * (context - 1) / context
    return 2 * layers * micro_batches * each_way


def context_elements_by_keys(
    *, layers: float, micro_batches: int, samples: int, tokens: int, width: int, heads: int, key_heads: int,
    context: int, tensor: int = 1,
) -> float:  # fmt: skip
    """What context parallelism by gathered keys and values sends: 2·(2k/a)·b·s·h/t·(c−1)/c, a layer and a micro-batch.

    Keys and values are gathered; their gradients are scattered. Llama 3, arXiv 2407.21783.
    """
    each_way = 2 * key_heads / heads * samples * tokens * width / tensor * (context - 1) / context
    return 2 * layers * micro_batches * each_way


def fsdp_gathered_elements(*, parameters: float, shards: int, gathers: int) -> float:
    """What FSDP sends to gather a rank's weights: (n−1)/n·P, `gathers` times.

    P: the parameters of the rank's stage and tensor part, before FSDP shards them. n = shard · context.
    """
    return gathers * parameters * (shards - 1) / shards


def fsdp_scattered_elements(*, parameters: float, shards: int, micro_batches: int, once: bool = False) -> float:
    """What FSDP sends to add up gradients and scatter them: (n−1)/n·P, m times.

    P and n as for gathering. `once`: they add up unsharded, and are scattered after the last micro-batch.
    """
    return (1 if once else micro_batches) * parameters * (shards - 1) / shards


def state_bytes(
    *, parameters: float, shards: int, gathered: bool = False, synced_once: bool = False, bytes_per_parameter: int = 16
) -> float:
    """The bytes of a rank's weights, gradients and optimizer state: 16·P/n, where P/t has been divided already.

    16: weights, gradients and AdamW's two averages in fp32. `gathered` adds 2·P, the weights in 16 bits over the whole
    step; `synced_once` adds 4·P, the unsharded gradients in fp32.
    """
    return bytes_per_parameter * parameters / shards + (2 * gathered + 4 * synced_once) * parameters
