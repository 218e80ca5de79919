"""How a run's memory grows, whether its allocator is at its limit, and which options would make it need less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from shardwise.config.groups import ActivationCheckpointingConfig
from shardwise.metrics.verdicts import DEVICE_MEMORY, HOST_MEMORY, IN_A_ROW, RETRIES, Circumstances, Seen, Verdict, mean
from shardwise.plan import Plan

# Lists changes to a config by which a run needs less memory.


def remedies(plan: Plan, memory: GpuMemory | None, requested: float | None) -> list[str]:
    """Changes to make on the command line, without those that this Plan has made already.

    `requested`: GiB that the allocation which failed had asked for.
    """
    strategy, ranks, trains = plan.strategy, plan.topology.world_size, plan.stage == "fit"
    does = plan.capabilities
    words = []
    if (smaller := smaller_micro_batch_size(plan)) is not None:
        words.append(f"micro_batch_size={smaller}" + (f" (global_batch_size={plan.global_batch_size} stays)" * trains))
    if trains and plan.activation_checkpointing != ActivationCheckpointingConfig("full"):
        words.append("activation_checkpointing=full (recomputes each repeated layer in backward)")
    if plan.chosen_loss.name == "full" and not plan.chosen_loss.reason:
        words.append("loss=chunked (the logits of some rows at a time)")
    if strategy.reshard_after_forward is not True:
        words.append("strategy.reshard_after_forward=true")
    if strategy.defer_gradient_sync:
        words.append("strategy.defer_gradient_sync=false")
    ungraphed = " compile.cudagraphs=false" * plan.compile.cudagraphs  # graphs are for ddp alone
    if does.with_more_shards and ranks > 1:
        sharded = "fsdp" if plan.compile.name == "model" else does.with_more_shards  # zero3 compiles no whole step
        words.append(
            f"strategy={sharded}{ungraphed} (parameters, gradients and optimizer state sharded over the {ranks} ranks)"
        )
    if trains and plan.accelerator == "cuda" and plan.precision.name != "fp64":
        if "offload_optimizer" not in does.options:
            words.append(
                f"strategy=zero2 strategy.offload_optimizer=true{ungraphed} (its state and step on the CPU; DeepSpeed)"
            )
        elif not strategy.offload_optimizer:
            words.append("strategy.offload_optimizer=true (its state and step on the CPU)")
    if "offload_parameters" in does.options and plan.accelerator == "cuda" and not strategy.offload_parameters:
        words.append("strategy.offload_parameters=true")
    if memory is not None and _is_fragmented(memory, requested):
        words.append(
            f"PYTORCH_ALLOC_CONF=expandable_segments:True in the environment ({memory.reserved - memory.allocated:.2f} "
            f"GiB are reserved and in no tensor)"
        )
    if ranks == 1:
        words.append("more devices" if does.shards else "devices=N strategy=fsdp, on a machine with N GPUs")
    return words or ["a smaller model, shorter samples or more devices"]


def host_remedies(plan: Plan) -> list[str]:
    """Changes for a rank on a GPU whose host has no memory left."""
    offloads = {
        "offload_optimizer": plan.strategy.offload_optimizer,
        "offload_parameters": plan.strategy.offload_parameters,
    }
    words = [f"strategy.{word}=false" for word, is_on in offloads.items() if is_on]
    if plan.stage == "fit" and plan.checkpoint.saves and plan.checkpoint.asynchronous:
        words.append("checkpoint.asynchronous=false (a save then needs no copy of what a rank holds)")
    if plan.data is not None and plan.data.get("num_workers"):
        words.append(f"fewer data.num_workers than {plan.data['num_workers']}, of each of the ranks on this machine")
    return words or ["fewer processes on this machine, or one with more memory"]


def smaller_micro_batch_size(plan: Plan) -> int | None:
    """The largest size that is at most half of now and divides the global batch; None: there is none."""
    each = plan.global_batch_size // plan.topology.data_parallel_size
    return next((size for size in range(plan.micro_batch_size // 2, 0, -1) if each % size == 0), None)


@dataclass(frozen=True)
class GpuMemory:
    """What the allocator of this rank's GPU holds, in GiB."""

    allocated: float  # memory in tensors
    reserved: float  # memory taken from the GPU, that in tensors included
    free: float
    total: float


def _is_fragmented(memory: GpuMemory, requested: float | None) -> bool:
    """Whether the allocator has enough free memory in pieces: as much as was requested, or a tenth of the GPU's."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    unused = memory.reserved - memory.allocated
    return "expandable_segments:True" not in settings and unused >= min(requested or memory.total, memory.total / 10)


# Judges how the memory of a run grows, and whether its allocator is at its limit.

GROWTH, GROWTH_GIB = 0.02, {DEVICE_MEMORY: 1 / 16, HOST_MEMORY: 1 / 8}  # of the whole run, both
_LEAK_ROWS = 16


def leaking_memory(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    for name, what in ((DEVICE_MEMORY, "tensors"), (HOST_MEMORY, "the process")):
        first, last = seen.rows[0], seen.rows[-1]
        before_of = first.known(name)
        grown = {rank: now - before_of.get(rank, now) for rank, now in last.known(name).items()}
        rank = max(grown, key=grown.__getitem__, default=None)
        if rank is None or not (growth := _growth([row.values[name][rank] for row in seen.rows], GROWTH_GIB[name])):
            continue
        before, now = before_of[rank], last.values[name][rank]
        rate = growth / (last.step - first.step)
        yield Verdict(
            "leaking memory",
            f"the memory of {what} of {run.where(rank)} grows by {rate * 1024:.3g} MiB a step, from "
            f"{before:.2f} GiB at step {first.step} to {now:.2f} GiB at step {last.step}",
            "look for losses or outputs that are kept from step to step without .item() or .detach()"
            + ("; memory_history=true names the lines that allocate" if run.plan.accelerator == "cuda" else ""),
            {"gib_before": before, "gib_now": now},
            rate,
            rank,
        )


def _growth(values: list[float], least: float) -> float:
    """The growth over the run, if it went on in every quarter of it and was not small; else 0."""
    if len(values) < _LEAK_ROWS:
        return 0.0
    quarter = len(values) // 4
    means = [mean(values[i * quarter : (i + 1) * quarter]) for i in range(4)]
    steps, whole = [b - a for a, b in pairwise(means)], values[-1] - values[0]
    is_steady = min(steps) > 0.5 * max(steps) > 0
    return whole if is_steady and whole > max(GROWTH * values[0], least) else 0.0


def allocator_at_limit(seen: Seen, run: Circumstances) -> Iterator[Verdict]:
    counts_of = [one.known(RETRIES) for one in seen.last]
    for rank in counts_of[-1] if len(counts_of) == IN_A_ROW else ():
        counts = [counts.get(rank, 0.0) for counts in counts_of]
        if all(later > earlier for earlier, later in pairwise(counts)):
            yield Verdict(
                "allocator at its limit",
                f"{run.where(rank)} has too little memory, so that its allocator has given memory back and asked again "
                f"{counts[-1]:.0f} times, which takes time",
                " or ".join(remedies(run.plan, None, None)[:2]),
                {"retries": counts[-1]}, rank=rank,
            )  # fmt: skip
            return
