"""What `strategy.tensor_parallel_size` has to divide, and what it cannot be used with. parallel/ divides the layers."""

from __future__ import annotations

from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.choices import arguments_of
from shardwise.plan.topology import Topology

# Arguments of a module, or of its argument `model`, that count what is divided
_DIVIDED = ("n_heads", "n_kv_heads", "ffn_dim")


def check_tensor_parallel(config: RunConfig, topology: Topology) -> None:
    """Raises `ConfigError` for sizes that the tensor axis does not divide, as far as the config says them."""
    ranks = topology.tensor
    if ranks == 1:
        return
    given = f"strategy.tensor_parallel_size={ranks}"
    if config.stage == "predict":
        raise ConfigError(
            f"{given} stage=predict: peers would write each prediction once more; leave it out: any layout reads the "
            f"checkpoint"
        )
    sizes = arguments_of(config.module)
    _check_length(config, topology, given)
    divided = {f"model.{name}": sizes.get(name) for name in _DIVIDED}
    for name, size in divided.items():
        if isinstance(size, int) and size % ranks:
            raise ConfigError(
                f"{given} does not divide {name}={size}; use one of {_divisors(divided, topology.devices)}, or change "
                f"{name}"
            )
    vocabulary = sizes.get("vocab_size")
    if isinstance(vocabulary, int) and vocabulary < ranks:
        raise ConfigError(f"{given}: model.vocab_size={vocabulary} has not a token for each rank")


def _check_length(config: RunConfig, topology: Topology, given: str) -> None:
    """Each context rank has a part of a sequence, of which each tensor rank has a part."""
    length = config.data.get("sequence_length") if isinstance(config.data, dict) else None
    parts = topology.tensor * topology.context
    if isinstance(length, int) and length % parts:
        axes = given + (f" * strategy.context_parallel_size={topology.context} = {parts}") * (topology.context > 1)
        raise ConfigError(
            f"{axes} does not divide data.sequence_length={length}; use a multiple of {parts}, such as "
            f"data.sequence_length={max(1, length // parts) * parts}"
        )


def _divisors(sizes: dict[str, Any], devices: int) -> list[int]:
    """The sizes of the axis that divide everything."""
    wholes = [devices, *(size for size in sizes.values() if isinstance(size, int))]
    return [ranks for ranks in range(1, devices + 1) if all(size % ranks == 0 for size in wholes)]
