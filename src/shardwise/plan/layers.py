"""Decides what is compiled, and what the backward pass computes again, and refuses options that would do nothing."""

from __future__ import annotations

import re

from shardwise.config.bind import as_yaml
from shardwise.config.groups import SAVED
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError, did_you_mean
from shardwise.plan.engine_knobs import overlaps_tensor_axis
from shardwise.plan.plan import Compile
from shardwise.plan.topology import Topology

_OPERATION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){1,2}")  # namespace.name or namespace.name.overload


def make_compile(config: RunConfig, topology: Topology, accelerator: str) -> Compile:
    """Raises: ConfigError: an option that compile=none or this accelerator or checkpointing rules out."""
    options = config.compile
    name, mode = options.name, options.mode
    budget = options.memory_budget
    given = {"memory_budget": budget is not None, "recompute_elementwise": options.recompute_elementwise,
             "mode": mode != "default", "cudagraphs": options.cudagraphs}  # fmt: skip
    for word, is_given in given.items():
        if name == "none" and is_given:
            raise ConfigError(
                f"compile.{word}={as_yaml(mode if word == 'mode' else getattr(options, word))}: compile=none compiles "
                f"nothing; give compile=model or compile=layer as well, or leave it out"
            )
    if budget is not None and not 0 < budget <= 1:
        raise ConfigError(
            f"compile.memory_budget={budget}: must be above 0 and at most 1, the share of what the compiler would keep "
            f"for the backward pass, or null"
        )
    checkpointing = config.activation_checkpointing.name
    if budget is not None and checkpointing != "none":
        raise ConfigError(
            f"compile.memory_budget={budget} activation_checkpointing={checkpointing}: both decide what is kept for "
            f"the backward pass; leave out one of them"
        )
    if options.recompute_elementwise:
        _check_recomputing(budget, checkpointing, config.activation_checkpointing.every_n_layers)
    if options.cudagraphs and accelerator != "cuda":
        raise ConfigError("compile.cudagraphs=true: a CUDA graph is a GPU's; leave it out on the CPU")
    overlaps = overlaps_tensor_axis(config.strategy, config.precision, options, topology, accelerator)
    return Compile(**vars(options), overlaps_peers=overlaps)


def _check_recomputing(budget: float | None, checkpointing: str, every: int) -> None:
    word = "compile.recompute_elementwise=true"
    if budget is not None:
        raise ConfigError(
            f"{word} compile.memory_budget={budget}: both decide what is kept for the backward pass; leave out one of "
            f"them"
        )
    if checkpointing != "none" and every == 1:
        raise ConfigError(
            f"{word} activation_checkpointing={checkpointing}: checkpointed layers compute elementwise operations "
            f"again without it; leave out one of them"
        )


def check_activation_checkpointing(config: RunConfig) -> None:
    """Raises: ConfigError: an unknown operation, or an option that does nothing."""
    options = config.activation_checkpointing
    name, every, save = options.name, options.every_n_layers, options.save
    if name == "none" and every != 1:
        raise ConfigError(
            f"activation_checkpointing.every_n_layers={every}: activation_checkpointing=none checkpoints no layer; "
            f"give activation_checkpointing=full or selective as well"
        )
    key = f"activation_checkpointing.save=[{','.join(save)}]"
    if name != "selective" and save:
        raise ConfigError(f"{key}: activation_checkpointing={name} keeps no operation's result; give "
                          f"activation_checkpointing=selective as well, or leave it out")  # fmt: skip
    if name == "selective" and not save:
        raise ConfigError(f"{key}: nothing would be kept, which is activation_checkpointing=full; name some, e.g. "
                          f"[matmul,attention]")  # fmt: skip
    for word in save:
        if word not in SAVED and not _OPERATION.fullmatch(word):
            raise ConfigError(f"{key}: there is no operation {word}{did_you_mean(word, SAVED)}; known are "
                              f"{', '.join(SAVED)}, and PyTorch's own by name, e.g. aten.mm")  # fmt: skip
    if {"matmul", "every_second_matmul"} <= set(save):
        raise ConfigError(f"{key}: matmul keeps every one, every_second_matmul every second one; leave out one of them")
