"""The weights that a run starts from (`init_from=`): each rank reads the chunks that it holds, from safetensors."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from shardwise.checkpoint.chunks import Chunk, whole
from shardwise.checkpoint.state import ShardedState, persistent_buffers, shapes_of, unlike
from shardwise.errors import ConfigError, count
from shardwise.plan import Plan
from shardwise.protocols import hugging_face_names_of
from shardwise.weights.safetensors import Stored, list_weights


def read_initial(state: ShardedState, module: LightningModule, plan: Plan) -> str:
    """Into parameters and persistent buffers; what was read, in words.

    Raises:
        ConfigError: other names or shapes than this model's; lists them.
    """
    from safetensors import SafetensorError, safe_open

    assert plan.init_from is not None
    said = f"init_from={plan.init_from}"
    stored = list_weights(Path(plan.init_from), said)
    names = _names(module, plan, stored, said)
    with ExitStack() as files, torch.no_grad():
        opened: dict[Path, Any] = {}

        def fill(name: str, chunks: list[Chunk]) -> None:
            source = stored[names[name]]
            if source.file not in opened:
                opened[source.file] = files.enter_context(safe_open(source.file, framework="pt"))
            for chunk in chunks:
                if chunk.values.is_floating_point() != ("F" in source.dtype):
                    raise ConfigError(f"{said}: {names[name]} is of {source.dtype} there and {chunk.values.dtype} here")
                place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.values.shape, strict=True))
                # A scalar has nothing to be cut
                part = opened[source.file].get_slice(names[name])[place] if place else \
                    opened[source.file].get_tensor(names[name])  # fmt: skip
                chunk.values.copy_(part)

        try:
            for shard in state.parameter_shards():
                fill(shard.name, shard.chunks(shard.values))
            for name, buffer in persistent_buffers(module):
                fill(name, whole(buffer).chunks)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{said} cannot be read: {error}; copy it again") from None
    values = sum(prod(stored[name].shape) for name in names.values())
    return f"{count(len(names), 'tensor')}, {count(values, 'value')}, of {plan.init_from}"


def _names(module: LightningModule, plan: Plan, stored: dict[str, Stored], said: str) -> dict[str, str]:
    """This model's names → the files': the module's own, or else Hugging Face's where the module says them."""
    here, there = shapes_of(module), {name: tensor.shape for name, tensor in stored.items()}
    names = {name: name for name in here}
    theirs = hugging_face_names_of(module)
    if here.keys() != there.keys() and theirs is not None:
        foreign: dict[str, str] = theirs(plan.module)
        if len(there.keys() & foreign.values()) > len(there.keys() & here.keys()):
            names |= foreign
    if told := unlike({names[name]: shape for name, shape in here.items()}, there, "this model", "the files"):
        raise ConfigError(f"{said}: is of another model: {told}")
    return names
