"""argv → RunConfig. The one module that drives Hydra, for train.py and every tool.

Hydra's compose API is used rather than `@hydra.main`, so that a sweep does not relaunch itself in every rank, no
`outputs/` folder appears, and a mistake gets one message instead of a traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import re
import sys
import warnings
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardwise.errors import ConfigError
from shardwise.schema import STRATEGY_CONFIGS, RunConfig, StrategyName

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"


@dataclass(frozen=True)
class Job:
    """One run: its typed config, the same as YAML, and the words that made it."""

    config: RunConfig
    yaml: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """What the command line asks for: `print` holds text for --help or --cfg; else the jobs are run."""

    jobs: tuple[Job, ...] = ()
    print: str | None = None


def compose(argv: list[str], config_name: str = "train") -> Command:
    """Read a command line: overrides (`strategy=fsdp micro_batch_size=4`) and Hydra's own flags.

    Raises:
        ConfigError: an unknown flag, group, option, key or value.
    """
    arguments = _parse(argv)
    directories = [CONF, *([Path(arguments.config_dir)] if arguments.config_dir else [])]
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"--config-dir={directory}: no such folder")
    warnings.filterwarnings("ignore", module="hydra")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        if arguments.help:
            return Command(print=help_text(directories))
        overrides = _checked_overrides(arguments.overrides, directories)
        searchpath = [f"hydra.searchpath=[{Path(d).resolve().as_uri()}]" for d in directories[1:]]
        combinations = _combinations(overrides, arguments.multirun)
        if arguments.cfg and len(combinations) > 1:
            raise ConfigError(f"--cfg prints one job, and this sweep has {len(combinations)}: give one value each")
        jobs = tuple(_compose_job(config_name, list(words), searchpath) for words in combinations)
        return Command(print=jobs[0].yaml) if arguments.cfg else Command(jobs=jobs)


def _parse(argv: list[str]) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"{message}; overrides look like strategy=fsdp, and --help explains them")

    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    return parser.parse_intermixed_args(argv)


def _checked_overrides(words: list[str], directories: list[Path]) -> list[Override]:
    """Parse the overrides; say of a group, an option or a plain word what would have been right."""
    try:
        overrides = OverridesParser.create().parse_overrides(words)
    except HydraException as error:
        raise ConfigError(f"cannot read an override: {_first_line(error)}; they look like key=value") from None
    groups = config_groups(directories)
    for override in overrides:
        key = override.key_or_group
        if key == "hydra" or key.startswith("hydra."):
            raise ConfigError(f"{override.input_line}: Hydra's own node is set by this program; leave it out")
        value = None if override.is_sweep_override() else override.value()
        if key in groups and isinstance(value, str) and value not in groups[key]:
            raise ConfigError(
                f"{key}={value}: no such option; {key} is one of {', '.join(groups[key])}"
                + _did_you_mean(value, groups[key])
            )
        if key not in groups and "." not in key and not override.is_force_add() and not override.is_add():
            known = [f.name for f in dataclasses.fields(RunConfig)]
            if key not in known:
                raise ConfigError(
                    f"{override.input_line}: there is no {key}" + _did_you_mean(key, [*groups, *known])
                    + "; --help lists what there is"
                )  # fmt: skip
    return overrides


def config_groups(directories: list[Path]) -> dict[str, list[str]]:
    """Group → its options, over all config folders."""
    groups: dict[str, set[str]] = {}
    for directory in directories:
        for file in sorted(directory.glob("*/*.yaml")):
            groups.setdefault(file.parent.name, set()).add(file.stem)
    return {name: sorted(options) for name, options in sorted(groups.items())}


def _combinations(overrides: list[Override], multirun: bool) -> list[tuple[str, ...]]:
    """The cartesian product of the sweeps, as Hydra's basic sweeper makes it."""
    choices: list[list[str]] = []
    for override in overrides:
        if not override.is_sweep_override():
            choices.append([cast(str, override.input_line)])
            continue
        if not multirun:
            raise ConfigError(f"{override.input_line}: several values make a sweep; add -m, or quote the value")
        if not override.is_discrete_sweep():
            raise ConfigError(f"{override.input_line}: only lists of values, choice() and range() are swept")
        key = override.get_key_element()
        choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    return list(itertools.product(*choices))


def _compose_job(config_name: str, words: list[str], searchpath: list[str]) -> Job:
    try:
        composed = hydra_compose(config_name, overrides=[*words, *searchpath])
        plain = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=False))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, words)) from None
    return Job(config=_typed(plain), yaml=OmegaConf.to_yaml(OmegaConf.create(plain)), overrides=tuple(words))


def _typed(plain: dict[str, Any]) -> RunConfig:
    """Bind the composed mapping to the schema: types, enums, unknown keys, values that were left open."""
    strategy = plain.get("strategy") or {}
    name = strategy.get("name")
    if name not in StrategyName.__members__:
        raise ConfigError(f"strategy.name={name}: is one of {', '.join(StrategyName.__members__)}")
    open_keys = [key for key in _missing(plain) if not key.startswith("model.")]
    if open_keys:
        key = open_keys[0]
        raise ConfigError(f"{key} has no value, and nothing can be assumed for it: give {key}=…")
    try:
        typed = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.create({**plain, "strategy": None}))
        options = OmegaConf.merge(OmegaConf.structured(STRATEGY_CONFIGS[StrategyName[name]]), strategy)
        config = cast(RunConfig, OmegaConf.to_object(typed))
        config.strategy = OmegaConf.to_object(options)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, [], prefix="")) from None
    return config


def _missing(node: Any, prefix: str = "") -> list[str]:
    if isinstance(node, dict):
        return [key for k, v in node.items() for key in _missing(v, f"{prefix}.{k}" if prefix else str(k))]
    return [prefix] if node == MISSING else []


def _explain(error: Exception, words: list[str], prefix: str = "") -> str:
    """Hydra's and OmegaConf's errors as one line: what was wrong, and what would be right."""
    text = str(error)
    cause = str(error.__cause__ or "")
    full_key = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None) or ""
    said = next((w for w in words if w.split("=")[0].lstrip("+~") == full_key), full_key)
    if "not in struct" in text + cause or "not in 'Run" in text or re.search(r"Key '\w+' not in '", text):
        parent, _, key = full_key.rpartition(".")
        return f"{said}: {parent or 'the config'} has no option {key}" + _known_options(parent, key, words)
    if "could not be converted" in text or "Invalid value" in text or "Incompatible" in text or "not supported" in text:
        return f"{said}: {_first_line(error)}"
    if "Interpolation" in type(error).__name__:
        return f"{full_key}: {_first_line(error)}"
    match = re.search(r"Could not find '([^']+)'", text)
    if match:
        return f"{match.group(1)}: no such config file; --help lists what there is"
    return " ".join((cause or text).split())


def _known_options(parent: str, key: str, words: list[str]) -> str:
    try:
        composed = hydra_compose("train", overrides=[w for w in words if "." not in w.split("=")[0]])
        node = OmegaConf.select(composed, parent) if parent else composed
    except (HydraException, OmegaConfBaseException):
        return ""
    if not isinstance(node, DictConfig):
        return ""
    known = [str(k) for k in node]
    return f"; it has {', '.join(known)}" + _did_you_mean(key, known)


def _did_you_mean(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def help_text(directories: list[Path]) -> str:
    """What can be said on the command line, made from the config folders themselves."""
    lines = [HELP_HEAD]
    for group, options in config_groups(directories).items():
        lines.append(f"  {group + '=':<13}{' | '.join(options)}")
    lines.append(HELP_TAIL)
    return "\n".join(lines)


HELP_HEAD = """\
usage: python train.py [key=value …] [-m] [--cfg job] [--config-dir DIR]

Trains a LightningModule under any strategy. One word at a time:

  python train.py                                         two minutes on two CPU cores
  python train.py strategy=fsdp precision=bf16 devices=8  the same run, sharded over eight GPUs
  python train.py model=gpt2_124m data=token_shards data.directory=/data/tokens
  python train.py name=first resume=auto                  go on where `first` stopped
  python train.py stage=validate name=first resume=auto   measure its newest checkpoint
  python train.py -m optimizer.lr=1e-3,3e-3 devices=2     one run a value, each in its own folder
  torchrun --standalone --nproc-per-node=8 train.py strategy=fsdp

Groups (each option is a file in conf/; its values can be set one by one, e.g. optimizer.lr=1e-4):
"""

HELP_TAIL = """
Run-level values:

  stage=fit|validate|test|predict
  name=NAME                 the run's folder under runs_dir; made up when left out
  resume=auto|PATH          the newest checkpoint of this name (from the seed if there is none), or that one
  dry_run=true              print config and Plan, start nothing
  devices=N nodes=N         processes a node (one a GPU), nodes; under torchrun both are known
  accelerator=auto|cpu|cuda
  micro_batch_size=N        samples per data-parallel rank per forward
  global_batch_size=N       samples per optimizer step over all ranks: a multiple of micro_batch_size * ranks
  max_steps=N | max_epochs=N | max_samples=N              exactly one; a step is an optimizer step
  gradient_clip_val=X       bound on the global gradient norm
  seed=N  log_every_n_steps=N  validate_every_n_steps=N  max_validation_batches=N
  units=[ClassName,…]       the repeated layers, where they are not found

  --cfg job                 print the composed config
  --config-dir DIR          a folder of your own with the same groups
  -m                        sweep: every combination of comma-separated values
"""


def to_plain(value: Any) -> Any:
    """Enums to their words, recursively: what is written to a file."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


if GlobalHydra.instance().is_initialized():  # a caller's own Hydra would be cleared by ours
    sys.stderr.write("shardwise: Hydra is already initialised in this process\n")
