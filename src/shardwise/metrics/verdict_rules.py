"""The rules by which a run is judged: a pure function for each verdict, and the table that docs/metrics.md prints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardwise.metrics.communication import expected_seconds, fewer_transfers, reduces_too_often
from shardwise.metrics.memory_rules import allocator_at_limit, leaking_memory
from shardwise.metrics.overrides import compiled, faster_products, fewer_launches, measures_gpus, more_workers
from shardwise.metrics.stragglers import straggler
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
    Verdict,
    mean,
    of_others,
)

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
