"""Composes a RunConfig from argv, for train.py and every tool. Only this file runs Hydra.

It uses Hydra's compose API instead of `@hydra.main`, so that a sweep does not relaunch itself in every rank, no
`outputs/` folder appears, and a mistake gets one message instead of a traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast, get_type_hints

import yaml  # type: ignore[import-untyped]
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardwise.config.explain import (
    as_text,
    check_cluster,
    check_numbers,
    check_open,
    drop_schedule,
    explain,
    keys_of,
    replaced_words,
    without_dashes,
)
from shardwise.config.groups import OPTIONS, STRATEGY_CONFIGS, ClusterConfig, StrategyConfig
from shardwise.config.help import config_groups, help_text
from shardwise.config.paths import CONF
from shardwise.config.schema import RunConfig, as_yaml, bind, choose
from shardwise.config.secrets import refer_to_secrets, refuse_secrets
from shardwise.config.translate import translate
from shardwise.errors import ConfigError, did_you_mean

_BUILT = ("model", "data", "optimizer", "schedule")  # their _target_ may take an argument `name`
_FIELDS: dict[str, Any] = get_type_hints(RunConfig)
# Mappings whose names the user chooses
_NAMED = ("callbacks.", "loggers.", "cluster.environment.", "cluster.sbatch.")
_TEXT = (str, str | None)


@dataclass(frozen=True)
class Job:
    """One run: its typed config, the same as YAML, the overrides that made it, and the machines in conf/."""

    config: RunConfig
    yaml: str
    overrides: tuple[str, ...]
    clusters: tuple[ClusterConfig, ...] = ()
    messages: tuple[str, ...] = ()  # for the user: how overrides were translated


@dataclass(frozen=True)
class Command:
    """The meaning of a command line: `print` is the text of --help or --cfg; without it the jobs are run."""

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
        _store_options()
        if arguments.help:
            return Command(print=help_text(directories))
        groups = config_groups(directories)
        ours = translate(arguments.overrides)
        overrides = [_read_override(word, groups) for word in _with_plus(ours.overrides)]
        searchpath = [f"hydra.searchpath=[{Path(d).resolve().as_uri()}]" for d in directories[1:]]
        combinations = _combinations(overrides, arguments.multirun, groups)
        for word in sorted({word for words in combinations for word in words}):
            _check_override(_read_override(word, groups), groups)
        if arguments.cfg and len(combinations) > 1:
            raise ConfigError(f"--cfg prints one job, and this sweep has {len(combinations)}: give one value each")
        try:
            jobs = tuple(_compose_job(config_name, words, searchpath, ours.messages) for words in combinations)
        except ConfigError as error:  # perhaps about an override that the user has not typed
            messages = [line for line in ours.messages if f" is read as {str(error).partition(': ')[0]}" in line]
            raise ConfigError("; ".join([*messages, str(error)])) from None
        return Command(print=jobs[0].yaml) if arguments.cfg else Command(jobs=jobs)


def _store_options() -> None:
    """Give Hydra the fields with their defaults: files of conf/ begin with them, and say what differs."""
    run = to_plain(RunConfig())
    of_groups = ("module", "data", "strategy", *(path.name for path in CONF.iterdir()))
    nodes = {"run": {key: value for key, value in run.items() if key == "model" or key not in of_groups}}
    nodes |= {name: to_plain(kind()) for name, kind in OPTIONS.items()}
    for name, node in nodes.items():
        ConfigStore.instance().store(name, node, group="shardwise_options", provider="shardwise")


def _parse(argv: list[str]) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            unknown = message.removeprefix("unrecognized arguments: ")
            if unknown != message and (meant := without_dashes(argv, unknown, {*_FIELDS, *config_groups([CONF])})):
                raise ConfigError(f"{message}; write {' '.join(meant)}, without --")
            raise ConfigError(f"{message}; overrides look like strategy=fsdp, and --help explains them")

    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    return parser.parse_intermixed_args(argv)


def _with_plus(words: list[str]) -> list[str]:
    """Add `++` to arguments of classes that conf/ does not know: `module.lr=3e-4` after `module._target_=my.Module`.

    Later the arguments are checked against the class.
    """
    classes = {w.partition("._target_=")[0] for w in words if "._target_=" in w and not w.startswith(("+", "~"))}
    if "recipe=custom" in words:  # whose classes may stand in an experiment
        classes |= {"module", "data"}

    def is_argument(word: str) -> bool:  # which may have a target of its own: module.backbone._target_=my.Backbone
        return any(word.startswith(f"{c}.") and not word.startswith(f"{c}._target_=") for c in classes)

    return [f"++{w}" if w.startswith(_NAMED) or is_argument(w) else w for w in words]


def _read_override(word: str, groups: dict[str, list[str]]) -> Override:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        key, equals, value = word.partition("=")
        if equals:
            raise ConfigError(f"{word}: the value cannot be read; {as_text(key, value)}") from None
        example = f"{word} is one of {', '.join(groups[word])}" if word in groups else "e.g. strategy=fsdp"
        raise ConfigError(f"{word!r} is not key=value; {example}") from None


def _check_override(override: Override, groups: dict[str, list[str]]) -> None:
    """Refuse a wrong key, group or option with our message, before Hydra does so with its own."""
    line, key = override.input_line, override.key_or_group
    root, _, rest = key.partition(".")
    if not key:
        raise ConfigError(f"{line}: no key before the =; overrides look like strategy=fsdp")
    if root == "hydra":
        raise ConfigError(f"{line}: Hydra's own node is set by this program; leave it out")
    if override.package is not None:
        raise ConfigError(f"{line}: a group has one place here; write {key}=…, without @{override.package}")
    if root not in groups and root not in _FIELDS:
        homes = [group for group in groups if any(root in keys_of(p) for p in (CONF / group).glob("*.yaml"))]
        inside = f"; did you mean {' or '.join(f'{group}.{line}' for group in homes)}?"
        near = inside if homes and not rest else did_you_mean(root, [*groups, *_FIELDS])
        raise ConfigError(f"{line}: there is no {root}{near}; --help lists what there is")
    if rest and root not in _FIELDS:
        raise ConfigError(f"{line}: {root} names a file and has no values of its own; {root} is one of "
                          f"{', '.join(groups[root])}")  # fmt: skip
    value = override.value()
    if key in groups and not isinstance(value, dict):
        options = f"{key} is one of {', '.join(groups[key])}"
        if override.is_add() or override.is_delete():
            raise ConfigError(f"{line}: a run always has one {key}; write {key}=…, without + or ~; {options}")
        if value not in groups[key]:
            raise ConfigError(f"{line}: no such option; {options}{did_you_mean(str(value), groups[key])}")
    if override.is_add() and key in _FIELDS:
        raise ConfigError(f"{line}: {key} is there already; leave out the +")
    if rest == "name" and root in groups and root in _FIELDS and root not in _BUILT:
        raise ConfigError(f"{line}: a name alone changes nothing; {root}={as_yaml(value)} brings its values as well")
    raw = cast(str, line).partition("=")[2]
    if isinstance(value, dict) and (twice := _repeated_key(raw)) is not None:
        raise ConfigError(f"{line}: {twice} is there twice, and only the last would count: name it once")
    is_too_large = value in (float("inf"), -float("inf")) and "inf" not in raw.lower()  # a commit such as 123e456
    if is_too_large or (_FIELDS.get(key) in _TEXT and type(value) in (int, float, bool) and str(value) != raw):
        raise ConfigError(f"{line}: is read as {as_yaml(value)}, not as text; quote it: \"{key}='{raw}'\"")


def _repeated_key(raw: str) -> str | None:
    """The first key that a mapping in `raw` has twice; Hydra would drop all but the last. None: there is none."""
    try:
        nodes = [yaml.compose(raw)]
    except yaml.YAMLError:  # Hydra's grammar is not quite YAML's
        return None
    for node in nodes:
        if isinstance(node, yaml.MappingNode):
            keys = [str(key.value) for key, _ in node.value]
            if twice := [key for key in keys if keys.count(key) > 1]:
                return twice[0]
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return None


def _combinations(overrides: list[Override], multirun: bool, groups: dict[str, list[str]]) -> list[tuple[str, ...]]:
    """Multiply out the sweeps, as Hydra's basic sweeper does."""
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
        value = override.value()
        if isinstance(value, Glob):
            found = value.filter(groups.get(override.key_or_group, []))
            if override.key_or_group not in groups:
                raise ConfigError(f"{override.input_line}: only a group has a glob(), such as strategy=glob(zero*)")
            if not found:
                options = ", ".join(groups[override.key_or_group])
                raise ConfigError(f"{override.input_line}: it matches none of {options}")
            choices.append([f"{key}={name}" for name in found])
            continue
        choices.append([f"{key}={one}" for one in override.sweep_string_iterator()])
    return list(itertools.product(*choices))


def _compose_job(config_name: str, words: tuple[str, ...], searchpath: list[str], messages: tuple[str, ...]) -> Job:
    try:
        composed = hydra_compose(config_name, overrides=[*words, *searchpath])
        _check_belongs(composed, words)
        if replaced := replaced_words(composed, words):
            composed = hydra_compose(
                config_name, overrides=[*words, *(f"{w.partition('=')[0]}=null" for w in replaced), *searchpath]
            )
            messages += tuple(f"{by} is given, so the recipe's {old} does not count" for old, by in replaced.items())
        plain = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=False))
        messages += drop_schedule(plain, words)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, config_name, words, searchpath)) from None
    check_numbers(plain)
    check_cluster(plain, words)
    plain = refer_to_secrets(plain)
    refuse_secrets(plain)
    text = OmegaConf.to_yaml(OmegaConf.create(plain))
    return Job(config=_typed(plain), yaml=text, overrides=words, clusters=read_clusters(), messages=messages)


def _check_belongs(composed: DictConfig, words: tuple[str, ...]) -> None:
    """Refuse a recipe's model or data with another recipe's module, since they do not fit."""
    recipe = _recipe_of(composed, "module")
    for group in ("model", "data"):
        other = _recipe_of(composed, group)
        if other not in (None, recipe) and recipe is not None:
            option = next((word for word in reversed(words) if word.startswith(f"{group}=")), group)
            raise ConfigError(f"{option} belongs to the recipe {other}, and this run's is {recipe}: use recipe={other}")


def _recipe_of(composed: DictConfig, key: str) -> str | None:
    """NAME of a class in `recipes.NAME`; None for a class of the user's."""
    node = composed.get(key)
    if not isinstance(node, DictConfig) or OmegaConf.is_missing(node, "_target_"):
        return None
    package, _, rest = str(node.get("_target_")).partition(".")
    name = rest.partition(".")[0]
    return name if package == "recipes" and (CONF / "recipe" / f"{name}.yaml").is_file() else None


@functools.cache
def read_clusters() -> tuple[ClusterConfig, ...]:
    """Read the machines of conf/cluster/ that name their GPU."""
    files = sorted((CONF / "cluster").glob("*.yaml"))
    clusters = [bind(ClusterConfig, OmegaConf.to_container(OmegaConf.load(file)), "cluster") for file in files]
    return tuple(cluster for cluster in clusters if cluster.gpu is not None)


def _typed(plain: dict[str, Any]) -> RunConfig:
    """Bind the composed mapping to the schema, and check that no value was left open."""
    for group in ("recipe", "experiment"):
        if group in plain:
            raise ConfigError(
                f"the file of {group}= sets values of {group} itself; start it with `# @package _global_`"
            )
    check_open(plain)
    strategy = plain.get("strategy")
    name = strategy.get("name") if isinstance(strategy, dict) else strategy
    config: RunConfig = bind(RunConfig, plain)
    return dataclasses.replace(config, strategy=bind(_options_of(name), strategy, "strategy"))


def _options_of(name: Any) -> type[StrategyConfig]:
    if isinstance(name, str) and name in STRATEGY_CONFIGS:
        return STRATEGY_CONFIGS[name]
    named = [file.stem for file in sorted((CONF / "strategy").glob("*.yaml")) if "name" in OmegaConf.load(file)]
    choose([*STRATEGY_CONFIGS, *named], name, "strategy.name")
    return StrategyConfig


def to_plain(value: Any) -> Any:
    """Replace dataclasses by plain values, recursively, to write them to a file."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


if GlobalHydra.instance().is_initialized():  # ours would clear the caller's Hydra
    sys.stderr.write("shardwise: Hydra is already initialised in this process\n")
