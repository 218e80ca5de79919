"""Reads the weights that a run starts from (`init_from=`), safetensors or a checkpoint: each rank its own chunks."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from shardwise.checkpoint.chunks import Chunk, ChunkedTensor, whole
from shardwise.checkpoint.dcp import read_tensors
from shardwise.checkpoint.metadata import read_metadata
from shardwise.checkpoint.state import ShardedState, persistent_buffers, unlike, without_missing
from shardwise.errors import ConfigError, count
from shardwise.plan import Plan
from shardwise.protocols import hugging_face_names_of
from shardwise.run_dir.files import MANIFEST
from shardwise.weights.safetensors import list_weights


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
    names = _names(state, module, plan, {name: tensor.shape for name, tensor in stored.items()}, option)
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
    return f"{count(len(names), 'tensor')}, {count(values, 'value')}, of {plan.init_from}"


def _read_checkpoint(path: Path, state: ShardedState, module: LightningModule, plan: Plan, option: str) -> str:
    metadata = read_metadata(path)
    known: dict[str, Any] = metadata.state_dict_metadata
    found = {name.removeprefix("model."): tuple(m.size) for name, m in known.items() if name.startswith("model.")}
    names = _names(state, module, plan, found, option)
    tensors = {f"model.{names[name]}": whole(buffer) for name, buffer in persistent_buffers(module) if name in names}
    tensors |= {f"model.{names[shard.name]}": ChunkedTensor(shard.shape, shard.chunks(shard.values))
                for shard in state.parameter_shards() if shard.name in names}  # fmt: skip
    read_tensors(path, tensors, None, metadata)
    return f"{count(len(names), 'tensor')} of {path}"


def _names(
    state: ShardedState, module: LightningModule, plan: Plan, found: dict[str, tuple[int, ...]], option: str
) -> dict[str, str]:
    """Map this model's names to those in the files: the same, or Hugging Face's names if the module defines them."""
    expected = state.whole_shapes()
    names = {name: name for name in expected}
    theirs = hugging_face_names_of(module)
    if expected.keys() != found.keys() and theirs is not None:
        foreign: dict[str, str] = theirs(plan.module)
        if len(found.keys() & foreign.values()) > len(found.keys() & expected.keys()):
            names |= foreign
    inside = {outside: name for name, outside in names.items()}
    here = {names[name]: shape for name, shape in expected.items()}
    here, found = without_missing(module, here, found, {names[name] for name in state.left_out}, option)
    if difference := unlike(here, found, "this model", "the files"):
        raise ConfigError(
            f"{option} is of another model: {difference}; the model's options (model=, model.dim=, module.… and so on) "
            f"must be those of these weights, or give other weights"
        )
    return {inside[outside]: outside for outside in here}
