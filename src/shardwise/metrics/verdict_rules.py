"""The rules by which a run is judged: a pure function for each verdict, and the table that docs/metrics.md prints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardwise.metrics.memory_remedies import allocator_at_limit, leaking_memory
from shardwise.metrics.verdicts import (
    COLLECTING,
    COLLECTIONS,
    DATA_WAIT,
    IDLE,
    SECONDS,
    WAITING,
    Circumstances,
    Rule,
    Seen,
    Size,
    Verdict,
    compiled,
    faster_products,
    fewer_launches,
    mean,
    measures_gpus,
    more_workers,
    of_others,
    straggler,
)
from shardwise.plan import Plan

# How much the ranks of a run send in a step, at least how long that takes, and what would make it less.

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


HOST_BOUND = 0.2  # of the steps
EXPOSED = 0.15  # of the step, by a profile
EXPECTED = 0.5  # of the step, by size and bandwidth: most of less can be hidden behind computing
WAITED = 0.3  # of the step, on the CPU
BUSY_UNIT, IDLE_UNIT = 0.6, 0.4  # of the time in which memory or tensor cores are active
HELD_DOWN = 0.05  # of the time
GARBAGE = 0.02  # of the step
_ACTIVE = "memory is active {:.0%} of the time, tensor cores {:.0%}"
_HELD_DOWN, _BY_POWER = "gpu/held_down_by_", "power"  # a GPU at its power limit is at work as it should be


def data_bound(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    waits = [one.known(DATA_WAIT) for one in seen.last]
    if min(max(wait.values(), default=0.0) for wait in waits) <= run.limits.data_wait:
        return
    means = seen.means(DATA_WAIT)
    rank = max(means, key=means.__getitem__)
    if len(means) > 1 and of_others(means, rank) <= run.limits.data_wait:
        return  # one rank waits alone: a straggler
    which = f", {run.where(rank)} longest" if len(means) > 1 else ""
    yield Verdict(
        "data-bound",
        f"the device waits for data {means[rank]:.0%} of the time{which}",
        more_workers(run.plan),
        {"data_wait": means[rank]},
        means[rank],
    )


def host_bound(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    shares = [max(one.known(IDLE).values(), default=0.0) for one in seen.last]
    if min(shares) <= HOST_BOUND or max(seen.means(DATA_WAIT).values(), default=0.0) > run.limits.data_wait:
        return  # a device that waits for data is idle, too
    share = mean(shares)
    yield Verdict(
        "host-bound",
        f"in {share:.0%} of the steps the device has nothing left to do when the host begins the next one",
        f"{fewer_launches(run.plan, run.has_layers)}; a .item() or print of a tensor in training_step also makes the "
        f"host wait",
        {"device_idle": share},
        share,
    )


def communication_bound(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    plan, found = run.plan, None
    step = mean([max(one.known(SECONDS).values(), default=math.inf) for one in seen.last])
    exposed = seen.last[-1].exposed_communication
    if exposed is not None:
        if exposed > EXPOSED:
            found = f"by the last profile, {exposed:.0%} of a step is communication that no computing hides", exposed
    elif plan.accelerator == "cpu":
        # The slowest rank waits least: what it waits is communication, and what others wait more is for that rank
        shares = [min((one.share(WAITING, rank) for rank in one.known(WAITING)), default=0.0) for one in seen.last]
        if min(shares) > WAITED and reduces_too_often(plan):
            found = f"every rank waits for the others' data {mean(shares):.0%} of the time", mean(shares)
    elif (seconds := expected_seconds(plan, run.parameters)) is not None and seconds > EXPECTED * step:
        found = f"its transfers alone need {seconds:.3g} s of a step of {step:.3g} s", seconds / step
    if found is not None:
        yield Verdict("communication-bound", found[0], fewer_transfers(plan), {"share": found[1]}, found[1])


def memory_bound(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    memory, tensor = _active(seen, "dram"), _active(seen, "tensor")
    if min(memory) > BUSY_UNIT and 0 <= max(tensor) < IDLE_UNIT:
        compiling = compiled(run.plan, run.has_layers)
        word = f"{compiling} joins" if compiling else "larger layers and fused operations join"
        remedy = f"{word} operations that read and write the same tensors"
        yield Verdict(
            "memory-bound", _ACTIVE.format(mean(memory), mean(tensor)), remedy, _numbers(memory, tensor), mean(memory)
        )


def compute_bound(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    memory, tensor = _active(seen, "dram"), _active(seen, "tensor")
    if min(tensor) > BUSY_UNIT and 0 <= max(memory) < IDLE_UNIT:
        remedy = f"this is how it should be; {faster_products(run.plan)}"
        yield Verdict(
            "compute-bound", _ACTIVE.format(mean(memory), mean(tensor)), remedy, _numbers(memory, tensor), is_note=True
        )


def _active(seen: Seen, unit: str) -> list[float]:
    """The share of the time in which a unit of the GPUs is active, as a mean over the ranks; -1: not known."""
    return [mean(list(one.known(f"gpu/{unit}_active").values()) or [-1.0]) for one in seen.last]


def _numbers(memory: list[float], tensor: list[float]) -> dict[str, float]:
    return {"dram_active": mean(memory), "tensor_active": mean(tensor)}


def held_down(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    for name in seen.last[-1].values:
        reason = name.removeprefix(_HELD_DOWN)
        if reason in (name, _BY_POWER):
            continue
        shares = seen.means(name)
        for rank in sorted(shares, key=shares.__getitem__)[-1:]:
            if min(one.known(name).get(rank, 0.0) for one in seen.last) > HELD_DOWN:
                yield Verdict(
                    "held down",
                    f"the clock of {run.where(rank)} is held down {shares[rank]:.0%} of the time, "
                    f"by {reason.replace('_', ' ')}",
                    "look at its cooling and power" + measures_gpus(run.plan, "measures every GPU before the run"),
                    {name: shares[rank]}, shares[rank], rank, reason,
                )  # fmt: skip


def garbage_collection(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    shares = [{rank: one.share(COLLECTING, rank) for rank in one.known(COLLECTING)} for one in seen.last]
    if min(max(share.values(), default=0.0) for share in shares) <= GARBAGE:
        return
    rank = max(shares[-1], key=shares[-1].__getitem__)
    share = mean([max(share.values()) for share in shares])
    yield Verdict(
        "garbage collection",
        f"Python's garbage collector takes {share:.0%} of a step, on {run.where(rank)}",
        _less_garbage(seen, run.plan.gc_every_n_steps),
        {"share": share, "collections": seen.last[-1].known(COLLECTIONS).get(rank, 0.0)},
        share,
    )


def _less_garbage(seen: Seen, every: int | None) -> str:
    fewer = "make fewer objects in a step that refer to each other"
    if every is None:
        return f"gc_every_n_steps=100 lets all ranks collect at once; or {fewer}"
    if any(one.steps < every for one in seen.last):  # in some observation nothing but young objects was collected
        return f"{fewer}: these are collections of young objects, which gc_every_n_steps does not change"
    return f"gc_every_n_steps={10 * every} collects all of it less often; or {fewer}"


def dimensions(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    for size in run.sizes:
        yield Verdict(
            "dimensions",
            f"{size.name}={size.now}: {size.detail}, and tensor cores need a multiple of {size.multiple} for their "
            f"full speed",
            f"{size.name}={size.better}",
            {"now": size.now, "better": size.better, "multiple": size.multiple},
            cause=size.name,
        )


RULES = (
    Rule(
        "data-bound",
        "the device waits for data more than 5 % of the time (10 % on the CPU). If one rank alone does, it is "
        "a straggler",
        "`data.num_workers`",
        data_bound,
    ),
    Rule(
        "host-bound",
        "GPUs: in more than 20 % of the steps the device has ended the last step when the host begins the next, though "
        "the data are there. Not known under zero1 to zero3, in fp16, and with an optimizer that is not fused: the "
        "host has to wait in each step there",
        "`compile=layer`, or `compile=model` where no layer repeats, then `compile.cudagraphs=true` under ddp, then "
        "a larger `micro_batch_size`",
        host_bound,
    ),
    Rule(
        "communication-bound",
        "communication that nothing hides takes more than 15 % of a step of the last profile. Without a profile: the "
        "transfers of a step need more than 50 % of it at the bandwidth of `cluster=`; on the CPU: every rank waits "
        "more than 30 % of the time, and gradients are reduced in every micro-batch",
        "`strategy.defer_gradient_sync=true`, a smaller tensor or context axis, "
        "`strategy.reshard_after_forward=false`, `strategy=fsdp_hybrid`, a larger `global_batch_size`",
        communication_bound,
    ),
    Rule(
        "memory-bound",
        "memory is active more than 60 % of the time, tensor cores less than 40 % (Hopper and newer)",
        "`compile=layer`",
        memory_bound,
    ),
    Rule(
        "compute-bound",
        "tensor cores are active more than 60 % of the time, memory less than 40 %. A note: this is how it should be",
        "`precision=fp8`",
        compute_bound,
    ),
    Rule(
        "held down",
        "a GPU's clock is held down more than 5 % of the time by another reason than power",
        "cooling and power of that node",
        held_down,
    ),
    Rule(
        "straggler",
        "data wait, host time or compute time of one rank is more than 1.1 × the median of the others (1.5 × on the "
        "CPU), by more than 3 % of a step (25 % on the CPU), or its clock is below 0.9 × that median. The rank, its "
        "host, its GPU and the cause are named",
        "by its cause",
        straggler,
    ),
    Rule(
        "garbage collection",
        "Python's garbage collector takes more than 2 % of a rank's step",
        "fewer objects in a step; `gc_every_n_steps`, if it is full collections that take so long",
        garbage_collection,
    ),
    Rule(
        "leaking memory",
        "what is held between two steps grows in every quarter of the run, which has 17 rows or more, by more than 2 % "
        "and 64 MiB on the device or 128 MiB on the host in all",
        "`memory_history=true`",
        leaking_memory,
        needs_long_steps=False,
    ),
    Rule(
        "allocator at its limit",
        "the allocator had to give memory back and ask again, and again in the next observation",
        "`activation_checkpointing=full`, a smaller `micro_batch_size`",
        allocator_at_limit,
        needs_long_steps=False,
    ),
    Rule(
        "dimensions",
        "at the start: a size of layers with more than 5 % of the weights, of heads or of a micro-batch is no multiple "
        "of 8 in 16 bits, of 16 in fp8, of 4 in TF32 (GPUs)",
        "the next size that is",
        dimensions,
        needs_long_steps=False,
        at_start=True,
    ),
)


# Finds sizes of a module, and of its batches, that miss the full speed of tensor cores. Looks at shapes alone.

_SHARE, _WEIGHTS = 0.05, 1_000_000  # fewer weights than both cost little time
_LARGE, _ROUND = 1024, 64  # sizes from here on are better a multiple of this, at a few percent more weights
_WIDTHS = ("dim", "hidden_size", "d_model", "n_embd")
_HEADS = ("n_heads", "num_heads", "num_attention_heads", "n_head", "nhead")


def multiple_of(plan: Plan) -> int | None:
    """What sizes should be multiples of in the run's precision; None: it does not use tensor cores."""
    if plan.accelerator != "cuda":
        return None
    if plan.precision.fp8 is not None:
        return 16
    if plan.precision.is_low:
        return 8
    return 4 if plan.precision.tf32 and plan.precision.compute_dtype == "float32" else None


def sizes_that_miss(module: nn.Module, plan: Plan) -> tuple[Size, ...]:
    """The sizes to change. Call this before a strategy shards the module."""
    if (multiple := multiple_of(plan)) is None:
        return ()
    return (*_of_layers(module, plan, multiple), *_of_heads(plan), *_of_batches(plan, multiple))


def _of_layers(module: nn.Module, plan: Plan, multiple: int) -> Iterator[Size]:
    found: dict[int, tuple[str, int]] = {}  # size → a layer's attribute that has it, and the weights of all such layers
    total = 0
    for layer_name, layer in module.named_modules():
        sizes = _sizes_of(layer)
        weights = layer.weight.numel() if sizes else 0
        total += weights
        for attribute, size in sizes.items():
            name, before = found.get(size, (f"{layer_name}.{attribute}", 0))
            found[size] = name, before + weights
    for size, (name, weights) in found.items():
        if size % multiple and weights > max(_WEIGHTS, _SHARE * total):
            detail = f"layers with {weights / total:.0%} of the weights have this size"
            yield Size(_word_of(plan.module, size) or name, size, _next(size, multiple), multiple, detail)


def _sizes_of(layer: nn.Module) -> dict[str, int]:
    """Attribute → size, of the matrix that a layer multiplies by. Other layers have none."""
    if isinstance(layer, nn.Linear):
        return {"in_features": layer.in_features, "out_features": layer.out_features}
    if isinstance(layer, nn.Embedding):  # often the matrix of the head, too
        return {"num_embeddings": layer.num_embeddings, "embedding_dim": layer.embedding_dim}
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1:
        return {"in_channels": layer.in_channels, "out_channels": layer.out_channels}
    return {}


def _of_heads(plan: Plan) -> Iterator[Size]:
    """Heads of attention are multiples of 8 in every kernel, whatever the precision."""
    for path, node in _nodes(plan.module):
        width = next((node[key] for key in _WIDTHS if isinstance(node.get(key), int)), None)
        key = next((key for key in _HEADS if isinstance(node.get(key), int)), None)
        if width is None or key is None or node[key] < 1 or width % node[key] or not (width // node[key]) % 8:
            continue
        good = [n for n in range(1, width + 1) if width % n == 0 and (width // n) % 8 == 0]
        if good:
            better = min(good, key=lambda n: abs(n - node[key]))
            detail = f"a head has {width} / {node[key]} = {width // node[key]} features"
            yield Size(_override((*path, key)), node[key], better, 8, detail)


def _of_batches(plan: Plan, multiple: int) -> Iterator[Size]:
    length = (plan.data or {}).get("sequence_length")
    if isinstance(length, int) and (tokens := length * plan.micro_batch_size) % multiple:
        detail = f"a micro-batch has {plan.micro_batch_size} × {length} = {tokens} tokens"
        yield Size("data.sequence_length", length, _next(length, multiple), multiple, detail)


def _next(size: int, multiple: int) -> int:
    multiple = _ROUND if size >= _LARGE else multiple
    return -(-size // multiple) * multiple


def _word_of(node: Mapping[str, Any], size: int) -> str | None:
    """The override of an argument of the module that has this value."""
    for path, inner in _nodes(node):
        for key, value in inner.items():
            if value == size and isinstance(value, int):
                return _override((*path, key))
    return None


def _nodes(node: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    yield path, node
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _nodes(value, (*path, key))


def _override(path: tuple[str, ...]) -> str:
    """The word of the command line for an argument of the module: `model` is a node of its own."""
    return ".".join(path if path[0] == "model" else ("module", *path))
