"""What two values of a config may not be together. Whether one value is well formed is schema.py's question."""

from __future__ import annotations

from types import NoneType
from typing import Any

from shardwise.config.bind import say
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError, a_or_an


def check_pairs(config: RunConfig, accelerator: str) -> None:
    """What cannot be had together; docs/numerics.md lists these with the upstream reason."""
    strategy, precision = config.strategy.name.value, config.precision.name.value
    if config.precision.parameter_dtype.value == "float16":
        raise ConfigError(
            "precision.parameter_dtype=float16: gradients in float16 cannot be unscaled; use precision=fp16, whose "
            "master weights are float32, or precision=bf16_true"
        )
    if config.precision.loss_scaling != (config.precision.compute_dtype.value == "float16"):
        raise ConfigError(
            f"precision.compute_dtype={config.precision.compute_dtype.value} precision.loss_scaling="
            f"{say(config.precision.loss_scaling)}: float16, and nothing else, needs a loss scale; use precision=fp16"
        )
    if strategy.startswith("zero") and precision == "fp64":
        raise ConfigError(
            f"strategy={strategy} precision=fp64: DeepSpeed keeps master weights in fp32; use precision=fp32, or "
            f"strategy=fsdp"
        )
    if strategy.startswith("zero") and precision == "fp16" and accelerator == "cpu":
        raise ConfigError(
            f"strategy={strategy} precision=fp16 on the CPU: DeepSpeed refuses float16 there; use precision=bf16, or "
            f"strategy=fsdp"
        )
    if strategy.startswith("zero") and config.gradient_clip_val and config.gradient_clip_algorithm.value == "value":
        raise ConfigError(
            f"strategy={strategy} gradient_clip_algorithm=value: DeepSpeed bounds the norm and nothing else; use "
            f"gradient_clip_algorithm=norm, or strategy=ddp or fsdp"
        )
    if strategy == "zero3" and config.compile.value == "model":
        raise ConfigError(
            "strategy=zero3 compile=model: parameters are gathered between layers, where one graph of the whole step "
            "cannot stop; use compile=layer, or strategy=zero2"
        )


def check_plain(where: str, node: Any) -> None:
    """Ranks read the Plan as JSON: what JSON would change has no place in it."""
    if isinstance(node, dict):
        for key, value in node.items():
            if not isinstance(key, str):
                raise ConfigError(f"{where}: the key {key!r} is not text; quote it in YAML: '{key}'")
            if key == "_target_" and not isinstance(value, str):
                raise ConfigError(f"{where}._target_={say(value)}: must be a dotted path, package.module.Class")
            check_plain(f"{where}.{key}", value)
    elif isinstance(node, list):
        for i, value in enumerate(node):
            check_plain(f"{where}[{i}]", value)
    elif not isinstance(node, (str, int, float, bool, NoneType)):
        raise ConfigError(f"{where} is {a_or_an(type(node).__name__)}: must be text, a number, true, false, null, "
        f"a list or "
                          f"a mapping; quote it")  # fmt: skip
