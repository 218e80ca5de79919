"""A training run's tensors by name, the same under every strategy: what a checkpoint holds.

`model.<name>`: parameters (the masters, where there are low-precision copies) and persistent buffers.
`optimizer.<i>.<name>.<key>`: what optimizer i keeps of a parameter. `average.<name>`: the averaged weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from shardwise.checkpoint.chunks import Chunk, ChunkedTensor, whole
from shardwise.checkpoint.dcp import read_tensors
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class ParameterShard:
    """A parameter, or what this rank holds of it."""

    name: str
    shape: tuple[int, ...]  # of the whole
    values: Tensor  # this rank's part: storage that is read, and written when a checkpoint is loaded
    chunks: Callable[[Tensor], list[Chunk]]  # of `values`, or of anything of its form
    trained: bool


class ShardedState(Protocol):
    """What a strategy tells about where parameters and the optimizers' state are."""

    average: dict[str, Tensor] | None  # of the shards that `master_shards` gives, where `ema_decay` asks for it

    def parameter_shards(self) -> Iterator[ParameterShard]:
        """This rank's parts of all parameters. A parameter of which it holds nothing may be left out."""

    def optimizer_state(self, shard: ParameterShard) -> tuple[int, dict[str, Tensor]]:
        """Which optimizer trains it, and what that keeps of it: of the form of `shard.values`, or scalars."""

    def allocate_optimizer_state(
        self, shard: ParameterShard, known: dict[str, TensorStorageMetadata]
    ) -> dict[str, Tensor]:
        """As `optimizer_state`, with everything that is `known` of it made: to be loaded into."""

    def module_optimizers(self) -> list[Optimizer]:
        """As the module made them."""

    def group_names(self) -> list[list[list[str]]]:
        """Per optimizer and group: its parameters."""

    def load_tensors(
        self, folder: Path, metadata: Metadata, group: dist.ProcessGroup | None, *, optimizers: bool, average: bool
    ) -> None:
        """From a checkpoint into their places. Collective."""


def gather(state: ShardedState, module: LightningModule, training: bool) -> dict[str, ChunkedTensor]:
    """Everything that this rank holds. Nothing is copied."""
    tensors = {f"model.{name}": whole(buffer) for name, buffer in persistent_buffers(module)}
    for shard in state.parameter_shards():
        tensors[f"model.{shard.name}"] = _chunked(shard, shard.values)
        if shard.trained and training:
            number, kept = state.optimizer_state(shard)
            for key, value in kept.items():
                tensors[f"optimizer.{number}.{shard.name}.{key}"] = _chunked(shard, value)
        if state.average is not None and shard.name in state.average:
            tensors[f"average.{shard.name}"] = ChunkedTensor(shard.shape, shard.chunks(state.average[shard.name]))
    return tensors


def restore(
    state: ShardedState,
    module: LightningModule,
    folder: Path,
    metadata: Metadata,
    group: dist.ProcessGroup | None,
    *,
    optimizers: bool,
    weights: str = "model",
) -> None:
    """Read what `gather` gave, in whatever parts it was written, into the parts that this rank holds. Collective.

    `metadata`: the folder's. `weights`: "average" puts the averaged weights into the parameters.

    Raises:
        ConfigError: other parameters than this model's; lists them.
    """
    known: dict[str, Any] = metadata.state_dict_metadata
    _check_names(module, known, folder)
    tensors = {f"model.{name}": whole(buffer) for name, buffer in persistent_buffers(module)}
    saved: dict[str, dict[str, TensorStorageMetadata]] = {}  # per optimizer's number and parameter: by key
    for full, tensor in known.items():
        kind, _, rest = full.partition(".")
        if kind == "optimizer":
            of, _, key = rest.rpartition(".")
            saved.setdefault(of, {})[key] = tensor
    for shard in state.parameter_shards():
        source = weights if f"{weights}.{shard.name}" in known else "model"
        tensors[f"{source}.{shard.name}"] = _chunked(shard, shard.values)
        if shard.trained and optimizers:
            number, _ = state.optimizer_state(shard)
            kept = state.allocate_optimizer_state(shard, saved.get(f"{number}.{shard.name}", {}))
            for key, value in kept.items():
                tensors[f"optimizer.{number}.{shard.name}.{key}"] = _chunked(shard, value)
        if state.average is not None and shard.name in state.average:
            tensors[f"average.{shard.name}"] = ChunkedTensor(shard.shape, shard.chunks(state.average[shard.name]))
    read_tensors(folder, tensors, group, metadata)


def _chunked(shard: ParameterShard, values: Tensor) -> ChunkedTensor:
    if values is shard.values or (values.ndim and values.shape == shard.values.shape):
        return ChunkedTensor(shard.shape, shard.chunks(values))
    if values.ndim and shard.values.numel() != prod(shard.shape):
        raise ConfigError(
            f"the optimizer keeps a tensor of shape {tuple(values.shape)} for {shard.name}, of which this rank holds "
            f"{tuple(shard.values.shape)}: what is not of a weight's form cannot be saved from a part of it; use "
            f"strategy=ddp, or checkpoint=none"
        )
    return whole(values)


def _check_names(module: nn.Module, known: dict[str, Any], folder: Path) -> None:
    there = {name.removeprefix("model."): tuple(m.size) for name, m in known.items() if name.startswith("model.")}
    if told := unlike(shapes_of(module), there, "this model", "the checkpoint"):
        raise ConfigError(f"resume={folder}: is of another model: {told}")


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of parameters, whole, and persistent buffers: what a checkpoint has to have."""
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}
    return shapes | {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module)}


def unlike(here: Mapping[str, Any], there: Mapping[str, Any], this: str, that: str) -> str:
    """Which names, or sizes of one name, differ between `this` and `that`: in words, or nothing."""
    told = [
        *(f"{name}: not in {that}" for name in here.keys() - there.keys()),
        *(f"{name}: not in {this}" for name in there.keys() - here.keys()),
        *(f"{name}: size mismatch, {there[name]} there and {size} here"
          for name, size in here.items() if there.get(name, size) != size),
    ]  # fmt: skip
    told.sort()
    return "; ".join(told[:8]) + (f"; and {len(told) - 8} more" if len(told) > 8 else "")


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that `state_dict` would have."""
    seen: set[int] = set()
    for prefix, layer in module.named_modules():
        for name, buffer in layer._buffers.items():
            if buffer is not None and name not in layer._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer.detach()


def make_like(
    shard: ParameterShard, values: Tensor, key: str, metadata: TensorStorageMetadata, scalars_on: torch.device
) -> Tensor:
    """What an optimizer keeps under `key`: of a parameter's form, a scalar, or, where the parameter is whole, of any
    form. A count of steps is a scalar, also where the parameter is one."""
    dtype = metadata.properties.dtype
    if tuple(metadata.size) == shard.shape and (shard.shape or key != "step"):
        return torch.zeros_like(values, dtype=values.dtype if dtype.is_floating_point else dtype)
    if len(metadata.size) == 0:
        return torch.zeros((), dtype=dtype, device=scalars_on)
    return torch.zeros(metadata.size, dtype=dtype, device=values.device)


# Optimizers' own words: small, and not tensors


def describe_optimizers(optimizers: list[Optimizer], names: list[list[list[str]]]) -> list[dict[str, Any]]:
    """Kinds and options, by the names of each group's parameters."""
    return [
        {
            "kind": kind_of(optimizer),
            "groups": [
                {"names": of_group, "options": {k: v for k, v in group.items() if k != "params"}}
                for group, of_group in zip(optimizer.param_groups, of_optimizer, strict=True)
            ],
        }
        for optimizer, of_optimizer in zip(optimizers, names, strict=True)
    ]


def kind_of(optimizer: Optimizer) -> str:
    """DeepSpeed's Adam for the host keeps what torch's does."""
    name = type(optimizer).__name__
    if name == "DeepSpeedCPUAdam":
        return "AdamW" if getattr(optimizer, "adam_w_mode", True) else "Adam"
    return name


def optimizer_difference(
    saved: list[dict[str, Any]], optimizers: list[Optimizer], names: list[list[list[str]]]
) -> str | None:
    """Why state of the optimizers that were `saved` is of no use to these; None: it is."""
    kinds_before, kinds = [one["kind"] for one in saved], [kind_of(optimizer) for optimizer in optimizers]
    if kinds_before != kinds:
        had, has = ", ".join(kinds_before) or "none", ", ".join(kinds)
        return f"its optimizer state is of {had}, and this run has {has}"
    before = [{name for group in one["groups"] for name in group["names"]} for one in saved]
    now = [{name for group in one for name in group} for one in names]
    moved = sorted(set().union(*now) & set().union(*before) - set().union(*map(set.intersection, now, before)))
    if not moved:
        return None
    return f"{', '.join(moved[:4])} had another of its optimizers; give them in the same order"


def apply_options(optimizers: list[Optimizer], names: list[list[list[str]]], saved: list[dict[str, Any]]) -> None:
    """Learning rates, decay and the like, to the groups of the same parameters."""
    for optimizer, of_optimizer, there in zip(optimizers, names, saved, strict=True):
        options = {name: group["options"] for group in there["groups"] for name in group["names"]}
        for group, of_group in zip(optimizer.param_groups, of_optimizer, strict=True):
            found: dict[str, Any] = next((options[name] for name in of_group if name in options), {})
            group.update({key: value for key, value in found.items() if key in group and key not in _OWN})


_OWN = ("fused", "foreach", "capturable", "differentiable", "bias_correction")  # how, not what


def layers_with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers that keep something besides parameters and buffers."""
    for name, layer in module.named_modules():
        if type(layer).get_extra_state is not nn.Module.get_extra_state:
            yield name, layer
