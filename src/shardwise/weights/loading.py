"""Reads weights from files: those that a run starts from, and those of a checkpoint without a process group."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, nullcontext
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from shardwise.checkpoint.dcp import Chunk, ChunkedTensor, read_metadata, read_tensors, whole
from shardwise.checkpoint.state import (
    ShardedState,
    names_left_out,
    persistent_buffers,
    shapes_of,
    unlike,
    without_missing,
)
from shardwise.config.targets import build, locate
from shardwise.errors import ConfigError, count
from shardwise.plan import Plan
from shardwise.protocols import initializes_itself, optional
from shardwise.run_dir.files import MANIFEST
from shardwise.weights.initialize import parameters_on_meta, replace_parameters
from shardwise.weights.safetensors import list_weights

# Reads the weights that a run starts from (`init_from=`), safetensors or a checkpoint: each rank its own chunks.


def read_initial(state: ShardedState, module: LightningModule, plan: Plan) -> str:
    """Read weights into parameters and persistent buffers, and return a line for the user about what was read.

    Raises:
        ConfigError: the files' names or shapes are not those of this model; the message lists them.
    """
    from safetensors import SafetensorError, safe_open

    assert plan.init_from is not None
    path, option = Path(plan.init_from), f"init_from={plan.init_from}"
    if (path / MANIFEST).is_file():
        return _read_checkpoint(path, state, module, plan, option)
    stored = list_weights(path, option)
    names, kept = _names(state, module, plan, {name: tensor.shape for name, tensor in stored.items()}, option)
    with ExitStack() as files, torch.no_grad():
        opened: dict[Path, Any] = {}

        def fill(name: str, chunks: list[Chunk]) -> None:
            source = stored[names[name]]
            if source.file not in opened:
                opened[source.file] = files.enter_context(safe_open(source.file, framework="pt"))
            for chunk in chunks:
                if chunk.values.is_floating_point() != ("F" in source.dtype):
                    raise ConfigError(
                        f"{option}: {names[name]} is of {source.dtype} there and {chunk.values.dtype} here; give other "
                        f"weights, of this type"
                    )
                region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.values.shape, strict=True))
                # A scalar cannot be sliced.
                part = opened[source.file].get_slice(names[name])[region] if region else \
                    opened[source.file].get_tensor(names[name])  # fmt: skip
                chunk.values.copy_(part)

        try:
            for shard in state.parameter_shards():
                if shard.name in names:
                    fill(shard.name, shard.chunks(shard.values))
            for name, buffer in persistent_buffers(module):
                if name in names:
                    fill(name, whole(buffer).chunks)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{option} cannot be read: {error}; copy it again") from None
    values = sum(prod(stored[name].shape) for name in names.values())
    return f"{count(len(names), 'tensor')}, {count(values, 'value')}, of {plan.init_from}{kept}"


def _read_checkpoint(path: Path, state: ShardedState, module: LightningModule, plan: Plan, option: str) -> str:
    metadata = read_metadata(path)
    known: dict[str, Any] = metadata.state_dict_metadata
    found = {name.removeprefix("model."): tuple(m.size) for name, m in known.items() if name.startswith("model.")}
    names, kept = _names(state, module, plan, found, option)
    tensors = {f"model.{names[name]}": whole(buffer) for name, buffer in persistent_buffers(module) if name in names}
    tensors |= {f"model.{names[shard.name]}": ChunkedTensor(shard.shape, shard.chunks(shard.values))
                for shard in state.parameter_shards() if shard.name in names}  # fmt: skip
    read_tensors(path, tensors, None, metadata)
    return f"{count(len(names), 'tensor')} of {path}{kept}"


def _names(
    state: ShardedState, module: LightningModule, plan: Plan, found: dict[str, tuple[int, ...]], option: str
) -> tuple[dict[str, str], str]:
    """Map this model's names to those in the files, without a head that does not fit. Also say what it keeps."""
    expected = state.whole_shapes()
    names = _names_in_files(expected, found, module, plan)
    # As torch does with files from before 2018: the counter matters where a momentum is None alone.
    names = {ours: theirs for ours, theirs in names.items()
             if theirs in found or not theirs.endswith("num_batches_tracked")}  # fmt: skip
    kept = ""
    if plan.stage == "fit" and (head := optional(module, "head_name")) is not None:
        of_head = {ours: theirs for ours, theirs in names.items() if ours.startswith(f"{head}.")}
        there = {theirs.removesuffix(ours.removeprefix(head)) for ours, theirs in of_head.items()}  # the head's name
        in_files = {name: shape for name, shape in found.items() if name.startswith(tuple(f"{n}." for n in there))}
        here = {theirs: expected[ours] for ours, theirs in of_head.items()}
        if difference := unlike(here, in_files, "this model", "the files"):
            names = {ours: theirs for ours, theirs in names.items() if ours not in of_head}
            found = {name: shape for name, shape in found.items() if name not in in_files}
            kept = f"; {head} does not fit, and keeps its initial values: {difference}"
    wanted = {theirs: expected[ours] for ours, theirs in names.items()}
    left_out = {names[ours] for ours in state.left_out if ours in names}
    wanted, found = without_missing(module, wanted, found, left_out, option)
    if difference := unlike(wanted, found, "this model", "the files"):
        raise ConfigError(
            f"{option} is of another model: {difference}; the model's options (model=, model.dim=, module.… and so on) "
            f"must be those of these weights, or give other weights"
        )
    return {ours: theirs for ours, theirs in names.items() if theirs in wanted}, kept


def _names_in_files(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], module: LightningModule, plan: Plan
) -> dict[str, str]:
    """This model's names → those of the files, if they are there: the module's own, those of the one part that holds
    all weights (`model.fc.bias` → `fc.bias`), or Hugging Face's. Those are taken of which most are there."""
    candidates = [{name: name for name in expected}]
    if len({name.partition(".")[0] for name in expected}) == 1:
        candidates.append({name: name.partition(".")[2] or name for name in expected})
    if (theirs := optional(module, "hugging_face_names")) is not None:
        candidates.append({name: name for name in expected} | theirs(plan.module))
    return max(candidates, key=lambda names: len(found.keys() & set(names.values())))


# Reads a checkpoint's weights without a process group, one tensor at a time, whatever strategy has written it.


class SavedWeights:
    """The parameters and persistent buffers of a checkpoint, by the module's names.

    `average`: the moving average of those that have one.

    Raises:
        ConfigError: the average is asked for, and the checkpoint has none.
    """

    def __init__(self, checkpoint: Path, *, average: bool = False) -> None:
        self.checkpoint, self._metadata = checkpoint, read_metadata(checkpoint)
        self._known = cast(dict[str, Any], self._metadata.state_dict_metadata)
        if average and not any(name.startswith("average.") for name in self._known):
            raise ConfigError(
                f"weights=average: {checkpoint} holds no average, the run had no ema_decay; give weights=model"
            )
        names = [name.removeprefix("model.") for name in self._known if name.startswith("model.")]
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(self._known[f"model.{name}"].size) for name in names}
        self._sources = {name: self._source(name, average) for name in names}

    def _source(self, name: str, average: bool) -> str:
        """The checkpoint's name of a tensor; of the model's if there is no average, as for frozen parameters."""
        source = f"average.{name}"
        return source if average and source in self._known else f"model.{name}"

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor was saved in."""
        found: torch.dtype = self._known[self._sources[name]].properties.dtype
        return found

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU."""
        values = torch.empty(self.shapes[name], dtype=self.dtype(name))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            read_tensors(self.checkpoint, {self._sources[name]: whole(values)}, None, self._metadata)
        return values


def build_saved(
    node: dict[str, Any], weights: SavedWeights, device: torch.device, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the module of a Plan, with the saved weights on `device`. It is in evaluation mode.

    `dtype`: of floating-point parameters; None: as they were saved.

    Raises:
        ConfigError: the module has other weights than were saved.
    """
    target = locate(node["_target_"], "module")
    with parameters_on_meta() if initializes_itself(target) else nullcontext():
        module: nn.Module = build(node, "module")
    kept = names_left_out(module) - weights.shapes.keys()  # these have the values that the constructor gives them
    shapes = {name: shape for name, shape in shapes_of(module).items() if name not in kept}
    if difference := unlike(shapes, weights.shapes, node["_target_"], str(weights.checkpoint)):
        raise ConfigError(f"{node['_target_']} has other weights now than were saved: {difference}")
    made: dict[int, nn.Parameter] = {}  # by id, so that tied parameters stay one
    for name, parameter in module.named_parameters():
        values = parameter.detach() if name in kept else weights.read(name)
        to = dtype if dtype is not None and values.is_floating_point() else values.dtype
        made[id(parameter)] = nn.Parameter(values.to(device, to), requires_grad=False)
    replace_parameters(module, made)
    for name, buffer in persistent_buffers(module):
        if name not in kept:
            buffer.copy_(weights.read(name))
    return module.to(device).eval()
