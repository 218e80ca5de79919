"""What `--help` prints: made from the config folders and from the fields of the schema."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shardwise.config.groups import (
    STRATEGY_CONFIGS,
    ActivationCheckpointingConfig,
    CheckpointConfig,
    CompileConfig,
    DebugConfig,
    GuardConfig,
    LoggerConfig,
    MetricsConfig,
    ProfileConfig,
)
from shardwise.config.schema import MISSING, RunConfig, as_yaml

_LEFT, _WIDTH = 28, 118  # columns of the names, and of a line
_NODES = (
    ("Checkpoints (docs/checkpointing.md)", CheckpointConfig, "checkpoint."),
    ("logger=wandb: a run is logged to Weights & Biases, and metrics.csv is written as well", LoggerConfig, "logger."),
    ("compile=layer compiles each repeated layer with torch.compile, compile=model the whole step",
     CompileConfig, "compile."),
    ("activation_checkpointing=full computes layers again in the backward pass, selective what is cheap of them",
     ActivationCheckpointingConfig, "activation_checkpointing."),
    ("Steps that are not finite, and losses that leap", GuardConfig, "guard."),
    ("Where the time of a step goes (docs/profiling.md); `shardwise profile runs/NAME` asks a run that is under way",
     ProfileConfig, "profile."),
    ("To find a mistake", DebugConfig, "debug."),
    ("What GPUs and hosts report, and Prometheus (docs/telemetry.md)", MetricsConfig, "metrics."),
)  # fmt: skip


def config_groups(directories: list[Path]) -> dict[str, list[str]]:
    """Group → its options, over all config folders."""
    groups: dict[str, set[str]] = {}
    for directory in directories:
        for file in sorted(directory.glob("*/*.yaml")):
            groups.setdefault(file.parent.name, set()).add(file.stem)
    return {name: sorted(options) for name, options in sorted(groups.items())}


def help_text(directories: list[Path]) -> str:
    """What can be said on the command line."""
    groups = config_groups(directories)
    width = max(map(len, groups)) + 2
    lines = [HELP_HEAD, *(f"  {group + '=':<{width}}{' | '.join(options)}" for group, options in groups.items())]
    lines += _describe(RunConfig)
    for headline, kind, prefix in _NODES:
        lines += ["", f"{headline}:", "", *_describe(kind, prefix)]
    return "\n".join([*lines, *_describe_strategies(), HELP_TAIL])


def _describe(kind: type[Any], prefix: str = "", names: set[str] | None = None) -> Iterator[str]:
    """The options of a dataclass, in the order of its fields. `names`: those that are described; None: all."""
    types = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if "says" not in field.metadata or (names is not None and field.name not in names):
            continue
        if field.metadata["section"]:
            yield from ("", f"{field.metadata['section']}:", "")
        form = field.metadata["form"] or _form_of(types[field.name])
        yield from _entry(f"{prefix}{field.name}={form}", field.metadata["says"] + _default_of(field))


def _describe_strategies() -> Iterator[str]:
    """The options of each strategy, once for all strategies that have them."""
    described: dict[str, list[str]] = {}
    for name, kind in STRATEGY_CONFIGS.items():
        for field in dataclasses.fields(kind):
            if "says" in field.metadata:
                described.setdefault(field.name, []).append(name)
    yield from ("", "What the options of a strategy cost and save: docs/large-models.md")
    groups = dict.fromkeys(map(tuple, described.values()))
    for owners in sorted(groups, key=lambda owners: len(owners) == len(STRATEGY_CONFIGS)):  # what all have comes last
        yield from ("", f"strategy={'|'.join(owners)}:", "")
        names = {name for name, having in described.items() if tuple(having) == owners}
        yield from _describe(STRATEGY_CONFIGS[owners[0]], "strategy.", names)


def _entry(left: str, says: str) -> Iterator[str]:
    if len(left) > _LEFT - 4:
        yield f"  {left}"
        left = ""
    indent = " " * _LEFT
    yield from textwrap.wrap(
        says, _WIDTH, initial_indent=f"  {left:<{_LEFT - 2}}", subsequent_indent=indent, break_on_hyphens=False
    )


def _form_of(kind: Any) -> str:
    """What a value of this type looks like."""
    if get_origin(kind) in (Union, UnionType):
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is tuple:
        return "[…]"
    return {bool: "true|false", int: "N", float: "X"}.get(kind, "TEXT")


def _default_of(field: dataclasses.Field[Any]) -> str:
    """In words. Nothing is said of options that are off, or left out, by default."""
    default = field.default
    if default in (None, False, (), (0,), MISSING, dataclasses.MISSING) or default == 0:
        return ""
    return f" (default: {as_yaml(default)})"


HELP_HEAD = """\
usage: python train.py [key=value …] [-m] [--cfg job] [--config-dir DIR]

Trains a LightningModule under any strategy. One word at a time:

  python train.py                                         a few minutes on two CPU cores
  python train.py strategy=fsdp precision=bf16 devices=8  the same run, sharded over eight GPUs
  python train.py model=gpt2_124m data=token_shards data.directory=/data/tokens
  python train.py name=first resume=auto                  go on where `first` stopped
  python train.py stage=validate name=first resume=auto   measure its newest checkpoint
  python train.py -m optimizer.lr=1e-3,3e-3 devices=2     one run a value, each in its own folder
  torchrun --standalone --nproc-per-node=8 train.py strategy=fsdp

Groups (each option is a file in conf/; its values can be set one by one, e.g. optimizer.lr=1e-4):
"""
HELP_TAIL = """
Classes of your own:

  module._target_=my.Module data._target_=my.Data         with recipe=custom
  callbacks.NAME._target_=… callbacks.NAME.argument=…     a Lightning callback, any number: docs/callbacks.md
  loggers.NAME._target_=…   a Lightning logger beside logger=, e.g. MLFlowLogger

And:

  --cfg job                 print the composed config
  --config-dir DIR          a folder of your own with the same groups
  -m                        sweep: every combination of comma-separated values
"""
