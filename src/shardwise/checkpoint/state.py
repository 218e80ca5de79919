"""Names the tensors of a training run, the same way under every strategy: a checkpoint holds them by these names.

`model.<name>`: parameters (the masters, where there are low-precision copies) and persistent buffers.
`optimizer.<i>.<name>.<key>`: what optimizer i keeps for a parameter. `average.<name>`: the averaged weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
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

from shardwise.checkpoint.dcp import Chunk, ChunkedTensor, read_tensors, whole
from shardwise.errors import ConfigError, first_of
from shardwise.protocols import optional

COMPILED = "_orig_mod."  # in the names of what torch.compile(layer) wraps


@dataclass(frozen=True)
class ParameterShard:
    """The part of a parameter that this rank holds; all of it where nothing is sharded."""

    name: str
    shape: tuple[int, ...]  # the whole parameter's
    values: Tensor  # this rank's part: a save reads its storage, and loading a checkpoint writes into it
    chunks: Callable[[Tensor], list[Chunk]]  # cuts `values`, or another tensor of the same shape
    trained: bool  # by an optimizer, also while a hook or a step has frozen it


class ShardedState(Protocol):
    """What a strategy says about where the parameters and the optimizers' state are."""

    average: dict[str, Tensor] | None  # the averages of the shards that `master_shards` gives; None without ema_decay
    left_out: frozenset[str]  # see `names_left_out`
    made_groups: list[list[list[str]]]  # `group_names` as `configure_optimizers` made them

    def parameter_shards(self) -> Iterator[ParameterShard]:
        """This rank's parts of all parameters. A parameter of which it holds nothing may be left out."""

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the whole parameters and persistent buffers, by name."""

    def optimizer_state(self, shard: ParameterShard) -> tuple[int, dict[str, Tensor]]:
        """The number of the optimizer that trains the shard, and what that keeps for it.

        These tensors have the shape of `shard.values`, or are scalars.
        """

    def allocate_optimizer_state(
        self, shard: ParameterShard, known: dict[str, TensorStorageMetadata], *, same_dtype: bool
    ) -> dict[str, Tensor]:
        """Allocate every tensor in `known` (key → metadata), and return what `optimizer_state` then would.

        `same_dtype`: the parameter was saved in the dtype that it has, so what is kept for it has its dtype of then.
        """

    def module_optimizers(self) -> list[Optimizer]:
        """The optimizers as the module made them."""

    def group_names(self) -> list[list[list[str]]]:
        """The names of the parameters, for each optimizer and each of its groups."""

    def group_members(self, names: list[str]) -> list[nn.Parameter]:
        """What an optimizer has of these parameters, for a group that a hook had made.

        Raises:
            ConfigError: the strategy knows only the groups that `configure_optimizers` makes.
        """

    def stepped_names(self) -> dict[int, str]:
        """The id of what an optimizer steps on → the name of the parameter; empty where it steps on many at once."""

    def of_all_stages(self, value: Any) -> list[Any]:
        """The `value` of each stage of a pipeline, which have different layers; without one, this alone. Collective."""

    @property
    def keeps_whole_weights(self) -> bool:
        """Whether every rank has all weights, and what optimizers keep for them."""

    def load_tensors(
        self, folder: Path, metadata: Metadata, group: dist.ProcessGroup | None, *, optimizers: bool, average: bool
    ) -> None:
        """Read a checkpoint's tensors into the parameters, buffers and optimizers. Collective."""


def gather(state: ShardedState, module: LightningModule, training: bool) -> dict[str, ChunkedTensor]:
    """Every tensor that this rank holds, by name. Nothing is copied."""
    optimizers = state.module_optimizers() if training else []
    tensors = {f"model.{name}": whole(buffer) for name, buffer in persistent_buffers(module)
               if name not in state.left_out}  # fmt: skip
    for shard in state.parameter_shards():
        if shard.name in state.left_out:
            continue
        tensors[f"model.{shard.name}"] = _chunked(shard, shard.values)
        if shard.trained and training:
            number, kept = state.optimizer_state(shard)
            by_rows = optional(optimizers[number], "kept_by_rows") or ()
            for key, value in kept.items():
                tensors[f"optimizer.{number}.{shard.name}.{key}"] = _chunked(shard, value, by_rows=key in by_rows)
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
    """Read the tensors that `gather` named into the parts that this rank holds. Collective.

    The parts in which they were written need not be this run's. `metadata`: the folder's. `weights`: "average" puts
    the averaged weights into the parameters.

    Raises:
        ConfigError: the checkpoint has other parameters than this model; the message lists them.
    """
    known: dict[str, Any] = metadata.state_dict_metadata
    _check_names(state, module, known, folder)
    tensors = {
        f"model.{name}": whole(buffer) for name, buffer in persistent_buffers(module) if f"model.{name}" in known
    }
    saved: dict[str, dict[str, TensorStorageMetadata]] = {}  # `<optimizer's number>.<parameter>` → key → metadata
    for full, tensor in known.items():
        kind, _, rest = full.partition(".")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition(".")
            saved.setdefault(parameter, {})[key] = tensor
    mine = state.module_optimizers() if optimizers else []
    for shard in state.parameter_shards():
        if f"model.{shard.name}" not in known:
            continue
        source = weights if f"{weights}.{shard.name}" in known else "model"
        tensors[f"{source}.{shard.name}"] = _chunked(shard, shard.values)
        if shard.trained and optimizers:
            number, _ = state.optimizer_state(shard)
            same = known[f"model.{shard.name}"].properties.dtype == shard.values.dtype
            kept = state.allocate_optimizer_state(shard, saved.get(f"{number}.{shard.name}", {}), same_dtype=same)
            by_rows = optional(mine[number], "kept_by_rows") or ()
            for key, value in kept.items():
                tensors[f"optimizer.{number}.{shard.name}.{key}"] = _chunked(shard, value, by_rows=key in by_rows)
        if state.average is not None and shard.name in state.average:
            tensors[f"average.{shard.name}"] = ChunkedTensor(shard.shape, shard.chunks(state.average[shard.name]))
    read_tensors(folder, tensors, group, metadata)


def _chunked(shard: ParameterShard, values: Tensor, *, by_rows: bool = False) -> ChunkedTensor:
    """The chunks of a parameter's values, or of what an optimizer keeps for it.

    `by_rows`: `values` have another form than the parameter's values, and a row for each of their rows.
    """
    if by_rows:
        firsts = [chunk.offsets[0] for chunk in shard.chunks(shard.values)]  # one, or none without any row
        chunks = [Chunk((first, *(0 for _ in values.shape[1:])), values) for first in firsts]
        return ChunkedTensor((shard.shape[0], *values.shape[1:]), chunks)
    if values is shard.values or (values.ndim and values.shape == shard.values.shape):
        return ChunkedTensor(shard.shape, shard.chunks(values))
    if values.ndim and shard.values.numel() != prod(shard.shape):
        raise ConfigError(
            f"the optimizer keeps a tensor of shape {tuple(values.shape)} for {shard.name}, of which this rank holds "
            f"{tuple(shard.values.shape)}: what is not of a weight's form cannot be saved from a part of it; use "
            f"strategy=ddp, or checkpoint=none"
        )
    return whole(values)


def _check_names(state: ShardedState, module: LightningModule, known: dict[str, Any], folder: Path) -> None:
    saved = {name.removeprefix("model."): tuple(m.size) for name, m in known.items() if name.startswith("model.")}
    own, saved = without_missing(module, state.whole_shapes(), saved, state.left_out, f"resume={folder}")
    if difference := unlike(own, saved, "this model", "the checkpoint"):
        raise ConfigError(
            f"resume={folder} is of another model: {difference}; the model's options (recipe=, model=, "
            f"module.… and so on) must be those that it was trained with"
        )


def names_left_out(module: nn.Module) -> frozenset[str]:
    """The names of parameters and persistent buffers that checkpoints leave out, as the module says in Lightning's way:
    it sets `strict_loading = False` and has a `state_dict` without them. Call it before weights are sharded."""
    if getattr(module, "strict_loading", True):
        return frozenset()
    given = {name for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    names: dict[int, set[str]] = {}  # of a weight that layers share, all
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), set()).add(name)
    if given - set().union(*names.values()):
        return frozenset()  # it renames: who knows which of its own names these are
    shared = [of for of in names.values() if not of & given]
    return frozenset(name for name in shapes_of(module) if any(name in of for of in shared))


def without_missing(
    module: nn.Module, own: dict[str, Any], saved: dict[str, Any], left_out: Collection[str], source: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of `own` and `saved`, names with shapes, those that must be alike: where a module sets `strict_loading = False`,
    those that both have. What it does not leave out of its checkpoints by itself and is passed over is printed."""
    if getattr(module, "strict_loading", True) or not (both := own.keys() & saved.keys()):
        return own, saved
    passed = sorted((own.keys() ^ saved.keys()) - set(left_out))
    if passed and dist.get_rank() == 0:
        print(
            f"{source}: either the model or the file lacks {first_of(passed, 8)}, which strict_loading=False allows: "
            f"what the model has of them begins as it was made",
            flush=True,
        )
    return {name: own[name] for name in both}, {name: saved[name] for name in both}


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters and persistent buffers; whole, unless tensor parallelism divides them."""
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}
    return shapes | {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module)}


def unlike(own: Mapping[str, Any], other: Mapping[str, Any], this: str, that: str) -> str:
    """Describe which names, or sizes of one name, differ between `own` and `other`; "" where none do.

    `this` and `that` name the two in the message.
    """
    if own.keys() != other.keys() and {_plain(name) for name in own} == {_plain(name) for name in other}:
        return (
            f"the names differ by the {COMPILED!r} alone that torch.compile(layer) puts into them: wrap the "
            f"layer in __init__ or configure_model of both; or call layer.compile(), which changes no name"
        )
    lines = [
        *(f"{name}: not in {that}" for name in own.keys() - other.keys()),
        *(f"{name}: not in {this}" for name in other.keys() - own.keys()),
        *(f"{name}: size mismatch, {other[name]} there and {size} here"
          for name, size in own.items() if other.get(name, size) != size),
    ]  # fmt: skip
    lines.sort()
    return "; ".join(lines[:8]) + (f"; and {len(lines) - 8} more" if len(lines) > 8 else "")


def _plain(name: str) -> str:
    return name.replace(COMPILED, "")


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that `state_dict` would have, each once, with their names."""
    seen: set[int] = set()
    for prefix, layer in module.named_modules():
        for name, buffer in layer._buffers.items():
            if buffer is not None and name not in layer._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer.detach()


def make_like(
    shard: ParameterShard,
    values: Tensor,
    key: str,
    metadata: TensorStorageMetadata,
    scalars_on: torch.device,
    *,
    same_dtype: bool,
) -> Tensor:
    """Allocate what an optimizer keeps under `key` for a parameter.

    It has the parameter's shape, or is a scalar, or has any shape where the parameter is whole. A count of steps is a
    scalar, also where the parameter is one.
    """
    dtype = metadata.properties.dtype
    if tuple(metadata.size) == shard.shape and (shard.shape or key != "step"):
        return torch.zeros_like(values, dtype=values.dtype if dtype.is_floating_point and not same_dtype else dtype)
    if len(metadata.size) == 0:
        return torch.zeros((), dtype=dtype, device=scalars_on)
    return torch.zeros(metadata.size, dtype=dtype, device=values.device)


def layers_with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers, with their names, that keep something besides parameters and buffers."""
    for name, layer in module.named_modules():
        if type(layer).get_extra_state is not nn.Module.get_extra_state:
            yield name, layer
