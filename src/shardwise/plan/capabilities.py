"""What each strategy can do. All that depends on the strategy and is not in `strategies/` asks this table.

A new strategy is a file of `strategies/`, one of `conf/strategy/`, and a row here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Capabilities:
    entry: str  # its class
    entry_of_pipeline: str = ""  # its class with a pipeline axis
    package: str = ""  # a package of Python that it needs, in requirements-PACKAGE.txt
    shards: tuple[Literal["optimizer state", "gradients", "parameters"], ...] = ()  # of each, a rank holds a part
    has_replicas: bool = False  # of the shards: strategy.shard_size
    uses_dtensors: bool = False  # as parameters, which the optimizer is given
    owns_step: bool = False  # an engine scales, clips and steps, and keeps masters of its own
    options: tuple[str, ...] = ()  # those of strategy.… that a run is advised to change if it is slow or out of memory
    with_more_shards: str = ""  # the strategy of the same engine that shards everything over all ranks
    sends_less: str = ""  # an override by which ranks send less, and why
    sends_less_between_nodes: str = ""

    # Features: empty if it can, else why it cannot, as the user reads it. benchmarks/pages/numerics.py prints them
    fp64: str = ""
    fp16_on_cpu: str = ""
    fp8: str = ""
    buckets_in_bf16: str = ""
    clip_by_value: str = ""
    compiled_step: str = ""
    cuda_graphs: str = ""
    whole_rows: str = ""
    thawing: str = ""
    manual_steps: str = ""
    complex_numbers: str = ""
    sync_errors: str = ""

    @property
    def shards_parameters(self) -> bool:
        return "parameters" in self.shards


WAITS = "each of its steps waits for the GPU by itself; use debug.sync=warn, which names these places among the others"
_REAL = "keeps real ones alone: let the parameter be torch.view_as_real of it, or use strategy=ddp"
_GATHERS = "gathers weights into other memory in each step; leave it out, or use strategy=ddp"

_DDP = Capabilities(entry="shardwise.strategies.ddp.DdpStrategy", with_more_shards="fsdp")
_FSDP = Capabilities(
    entry="shardwise.strategies.fsdp.FsdpStrategy",
    entry_of_pipeline="shardwise.strategies.pipelined.PipelinedStrategy",
    shards=("optimizer state", "gradients", "parameters"),
    uses_dtensors=True,
    options=("reshard_after_forward", "defer_gradient_sync"),
    sends_less_between_nodes="strategy=fsdp_hybrid gathers parameters within a node alone",
    cuda_graphs=_GATHERS,
    complex_numbers=_REAL,
)
_ZERO = Capabilities(
    entry="shardwise.strategies.zero.strategy.ZeroStrategy",
    package="DeepSpeed",
    shards=("optimizer state",),
    owns_step=True,
    options=("offload_optimizer",),
    with_more_shards="zero3",
    fp64="DeepSpeed keeps master weights in fp32; use precision=fp32, or strategy=fsdp",
    fp16_on_cpu="DeepSpeed refuses float16 there; use precision=bf16, or strategy=fsdp",
    fp8="fp8 is made of the fp32 weights, and DeepSpeed gives layers weights that it has rounded to bf16; use "
    "strategy=fsdp, or precision=bf16",
    clip_by_value="DeepSpeed bounds the norm and nothing else; use gradient_clip_algorithm=norm, or strategy=ddp or "
    "fsdp",
    cuda_graphs="collects gradients by hooks that a replay does not call; leave it out, or use strategy=ddp",
    whole_rows="DeepSpeed gives an optimizer flat ranges that cut rows; use strategy=fsdp, fsdp_hybrid or ddp, or "
    "optimizer=adamw or adamw_bf16",
    thawing="DeepSpeed's optimizer steps frozen weights too, with a gradient of zero, so that they would not stay as "
    "they are; use strategy=ddp or fsdp, or two runs: freeze= alone, then init_from= with the folder of the first",
    manual_steps="DeepSpeed's engine owns one optimizer and its step; use strategy=ddp or fsdp",
    complex_numbers=_REAL,
    sync_errors=WAITS,
)

STRATEGIES: dict[str, Capabilities] = {
    "ddp": _DDP,
    "fsdp": _FSDP,
    "fsdp_hybrid": replace(_FSDP, has_replicas=True, with_more_shards="fsdp", sends_less_between_nodes=""),
    "zero1": replace(
        _ZERO,
        buckets_in_bf16="DeepSpeed's optimizer for bf16 masters in fp32 reduces all gradients at the end of a step and "
        "would ignore it; leave it out, or use strategy=zero2",
    ),
    "zero2": replace(_ZERO, shards=("optimizer state", "gradients")),
    "zero3": replace(
        _ZERO,
        shards=("optimizer state", "gradients", "parameters"),
        options=("offload_optimizer", "offload_parameters"),
        with_more_shards="",
        sends_less="strategy=zero2 gathers no parameters within a step",
        compiled_step="parameters are gathered between layers, where one graph of the whole step cannot stop; use "
        "compile=layer, or strategy=zero2",
        cuda_graphs=_GATHERS,
    ),
}
