"""Finds a run's name, its folder, and the weights that it starts from."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.plan import Host, Plan

_MEMBER = re.compile(r"_\d+$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def runs_folder(config: RunConfig) -> Path:
    try:
        if not config.runs_dir or "\0" in config.runs_dir:
            raise ValueError
        # resolve() would follow links, and so read the file system.
        return Path(os.path.abspath(Path(config.runs_dir).expanduser()))
    except (RuntimeError, ValueError):
        raise ConfigError(f"runs_dir={config.runs_dir}: names no folder; give one, e.g. runs_dir=runs") from None


def initial_weights(config: RunConfig) -> str | None:
    if config.init_from is None:
        return None
    if config.resume not in (None, "auto", "best"):
        raise ConfigError(
            f"init_from={config.init_from} resume={config.resume}: a checkpoint has its own weights; give one of them"
        )
    try:
        if not config.init_from or "\0" in config.init_from:
            raise ValueError
        return os.path.abspath(Path(config.init_from).expanduser())
    except (RuntimeError, ValueError):
        raise ConfigError(f"init_from={config.init_from}: names no file or folder; give one, or null") from None


def frozen_parts(config: RunConfig) -> tuple[str, ...]:
    parts, epochs = [config.freeze] if isinstance(config.freeze, str) else config.freeze, config.freeze_epochs
    if epochs is not None and not parts:
        raise ConfigError(f"freeze_epochs={epochs} and no freeze=: say what is frozen, e.g. freeze=backbone")
    return tuple(parts)


def run_name(config: RunConfig, host: Host) -> str:
    if config.name is None and config.resume == "auto" and host.run_id_is_new:
        raise ConfigError(
            "resume=auto: without name= a run has a new name each time, and no checkpoint to go on from; give name= of "
            "the run to go on with"
        )
    run_id = config.name if config.name is not None else host.run_id
    if run_id is None:
        raise ConfigError(
            "the ranks cannot agree on a run id: torchrun was started on several nodes without --rdzv-id; "
            "add --rdzv-id=ID, or name=NAME"
        )
    if not _NAME.fullmatch(run_id):
        raise ConfigError(
            f"name={run_id!r} cannot name a folder under {config.runs_dir}: use letters, digits, '.', '_' and '-', "
            f"starting with a letter or digit, at most 128"
        )
    return run_id


def number_run(plan: Plan, number: int, in_array: bool = False) -> Plan:
    """The Plan of job `number` of a sweep, which has its own folder.

    `in_array`: its id is Slurm's for a member of a job array; the Plan's may be that of another member.
    """
    run_id = f"{_MEMBER.sub('', plan.run_id)}_{number}" if in_array else f"{plan.run_id}-{number}"
    return dataclasses.replace(plan, run_id=run_id, run_dir=str(Path(plan.run_dir).parent / run_id))
