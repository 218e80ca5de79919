"""Finds the checkpoint that a run goes on from, and what differs from the run that wrote it."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.run_dir.checkpoints import (
    another_than,
    best_whole,
    damage,
    list_checkpoints,
    named_checkpoint,
    newest_whole,
    none_is_whole,
    step_of,
    stopped_before,
    was_trained,
)
from shardwise.run_dir.events import has_begun
from shardwise.run_dir.files import BEST, CHECKPOINTS, CONFIG, MANIFEST, PLAN, best_checkpoint_path, read_json


def resolve_resume(resume: str | None, run_dir: str | Path, stage: str, may_be_taken: bool = True) -> str | None:
    """Turn the value of `resume=` into the checkpoint to load, or None.

    `may_be_taken`: check whether the folder already holds another run.

    Raises:
        ConfigError: there is no such checkpoint, or a run's folder would be overwritten.
    """
    try:
        taken = may_be_taken and stage == "fit" and (Path(run_dir) / PLAN).exists() and was_trained(run_dir)
        if resume == "best" and stage == "fit":
            raise ConfigError(
                f"resume=best: a run goes on from its newest checkpoint, with resume=auto; to train on from its best "
                f"one ({best_whole(run_dir) or 'there is none here'}), give resume=PATH and another name="
            )
        if resume in ("auto", "best"):
            found = best_whole(run_dir) if resume == "best" else None
            if found is None and resume == "best":
                _check_kept_none(Path(run_dir) / CHECKPOINTS / BEST)
            found = found or newest_whole(run_dir)
            if found is None and list_checkpoints(run_dir):
                raise ConfigError(f"resume={resume}: {none_is_whole(run_dir)}")
            if found is None and stage != "fit":
                raise ConfigError(
                    f"resume={resume}: {run_dir} holds no checkpoint to {stage}; name= a run that has one"
                )
            return str(found) if found else None
        path = None if resume is None else _checkpoint(resume)
        forgotten = may_be_taken and stage != "fit" and path is None and newest_whole(run_dir) is not None
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"cannot look for checkpoints of {run_dir}: {error}; give another path") from None
    if forgotten:
        raise ConfigError(
            f"{run_dir} holds checkpoints, and no word asks for one: give resume=best or resume=auto to {stage} it, or "
            f"another name= for other weights"
        )
    if taken and (path is None or Path(run_dir).resolve() not in path.parents):
        raise ConfigError(f"{run_dir} already holds a run: resume=auto goes on with it, another name= starts a new one")
    if taken and path and (newer := [p.name for p in list_checkpoints(run_dir) if step_of(p) > step_of(path)]):
        raise ConfigError(
            f"resume={resume}: this run went on to {newer[-1]}, and two histories would mix in {run_dir}: "
            f"another name= starts a branch"
        )
    return None if path is None else str(path)


def _check_kept_none(best: Path) -> None:
    """Refuse `resume=best` where the run has kept a best checkpoint that is not known or not whole any more.

    Raises:
        ConfigError
    """
    if best.exists():
        raise ConfigError(
            f"resume=best: {best} does not name a checkpoint that is whole; resume=auto takes the newest, and "
            f"resume=PATH any other"
        )
    run_dir = best.parents[1]
    there = sorted(path for path in best.parent.glob("*.ckpt") if step_of(path) >= 0)
    if any(path == best_checkpoint_path(run_dir, step_of(path)) for path in there):
        raise ConfigError(
            f"resume=best: there is no {best}, which names the best checkpoint; give one by resume=PATH: "
            f"{', '.join(path.name for path in there)}"
        )


def _checkpoint(resume: str) -> Path:
    path = Path(resume).expanduser().resolve()
    if not path.exists():
        raise ConfigError(f"resume={resume}: no such checkpoint; name=RUN resume=auto takes the newest of that run")
    if not (path / MANIFEST).is_file() and (path / CHECKPOINTS).is_dir():
        there = "it holds no checkpoint that is whole; give another"
        if (newest := newest_whole(path)) is not None:
            there = f"name={path.name} resume=auto goes on with it, and resume={newest} takes its newest checkpoint"
        raise ConfigError(f"resume={resume} is a run's folder: {there}")
    if not (path / MANIFEST).is_file():
        raise ConfigError(f"resume={resume}: without a {MANIFEST} it is no complete checkpoint; {another_than(path)}")
    if found := damage(path):
        raise ConfigError(f"resume={resume} is damaged: {found}; {another_than(path)}")
    return path


def find_checkpoint(plan: Plan, host: Host) -> Plan:
    """The Plan with the checkpoint that it goes on from. A requeued job goes on with its own run by itself."""
    first = host.launcher == "local" or os.environ.get("RANK") == "0"  # this process creates the run's folder
    resume, begun = plan.resume, has_begun(plan.run_dir)
    if begun and plan.stage == "fit" and (resume is None or newest_whole(plan.run_dir) is not None):
        plan = plan.going_on_from("auto", may_fall_back=True)
    plan = plan.going_on_from(resolve_resume(plan.resume, plan.run_dir, plan.stage, first and not begun))
    return _up_to_early_stop(_initial_checkpoint(plan))


def _initial_checkpoint(plan: Plan) -> Plan:
    """The Plan with the checkpoint whose weights it starts from, where `init_from` names a run or a checkpoint."""
    if plan.init_from is None or plan.resume is not None:
        return plan
    if not any((Path(plan.init_from) / name).exists() for name in (CHECKPOINTS, MANIFEST)):
        return plan
    try:
        newest, _ = named_checkpoint(plan.init_from)
    except ConfigError as error:
        raise ConfigError(f"init_from={error}") from None
    return dataclasses.replace(plan, init_from=str(newest))


def choose_again(plan: Plan) -> Plan:
    """The Plan from the newest checkpoint that is there now, if it goes on from the newest one."""
    newest = newest_whole(plan.run_dir) if plan.may_fall_back and plan.stage == "fit" else None
    if newest is None or str(newest) == plan.resume:
        return plan
    return _up_to_early_stop(plan.going_on_from(str(newest)))


def _up_to_early_stop(plan: Plan) -> Plan:
    stop = _early_stop(plan)
    return plan if stop is None else dataclasses.replace(plan, max_steps=stop["step"])


def _early_stop(plan: Plan) -> dict[str, Any] | None:
    """The early stop that ended the run which `resume=auto` goes on with; None: there is none, or callbacks changed."""
    if plan.stage != "fit" or plan.resume is None or not plan.may_fall_back:
        return None
    stop = stopped_before(plan.run_dir, step_of(plan.resume))
    return stop if stop is not None and stop.get("callbacks") == plan.callbacks else None


def resumption(plan: Plan, given: str | None = None) -> list[str]:
    """Lines for the user about a run that goes on: values that differ from its checkpoint's, or nothing left to do;
    or that there is no checkpoint.

    `given`: the value of `resume=`, of which the Plan has the checkpoint.

    Raises:
        ConfigError: the run would see other samples, or in another order, and `resume_allow` does not allow that.
    """
    if plan.resume is None:
        is_told = given == "auto" and plan.stage == "fit"
        return [f"resume=auto: {plan.run_dir} holds no checkpoint, so the run begins anew"] if is_told else []
    notices = []
    if plan.init_from is not None:
        notices.append(f"the weights are those of {Path(plan.resume).name}: init_from={plan.init_from} is not read")
    if plan.stage != "fit":
        if given == "best" and not (Path(plan.run_dir) / CHECKPOINTS / BEST).exists():
            notices.append(
                f"{plan.run_dir} has kept no best checkpoint: {Path(plan.resume).name} is its newest; "
                f"checkpoint.monitor=NAME in its training keeps one"
            )
        return notices
    if plan.may_fall_back:
        passed = [p for p in list_checkpoints(plan.run_dir) if step_of(p) > step_of(plan.resume)]
        notices += [f"{path} is damaged: {damage(path)}; going on from {Path(plan.resume).name}" for path in passed]
    try:
        before = read_json(Path(plan.resume).parents[1] / PLAN)
    except (OSError, ValueError):
        before = {}
    now = json.loads(plan.to_json())
    known = before.get("data") or {}  # an option that came later changes nothing while it is off
    for values in (before, now):
        values["data"] = {
            key: value
            for key, value in (values.get("data") or {}).items()
            if key not in _LOADER_KEYS and (key in known or value not in (None, False))
        }
    changed = list(differences({k: before[k] for k in _RUN_KEYS if k in before}, {k: now[k] for k in _RUN_KEYS}))
    if before.get("module") and changed:
        same_kind = _target(before.get("optimizer")) == _target(now["optimizer"])
        # The checkpoint's options of the optimizer hold, which `tell_kept` says when it knows them
        hold = [line for line in changed if not (same_kind and line.startswith("optimizer."))]
        if hold:
            notices.append("goes on with other values than its checkpoint was trained with: " + "; ".join(hold))
        for name in ("data", "global_batch_size", "seed"):
            lines = [line for line in changed if line.startswith((f"{name} ", f"{name}."))]
            if lines and name not in plan.resume_allow:
                again = _words_of(before["data"], now["data"], plan.run_dir) if name == "data" else ""
                raise ConfigError(
                    f"resume={plan.resume}: {'; '.join(lines)}: the run would not see the samples that it was to see; "
                    f"give the same {name}{again}, or resume_allow=[{name}] to go on with other samples"
                )
    if (stop := _early_stop(plan)) is not None:
        notices.append(
            f"nothing left to train: {stop['by']} stopped this run at step {stop['step']}; other values of callbacks.* "
            f"or resume={plan.resume} go on from there"
        )
    elif plan.max_steps is not None and step_of(plan.resume) >= plan.max_steps:
        path = Path(plan.resume)
        notices.append(f"nothing left to train: max_steps={plan.max_steps}, and {path.name} is there already")
    return notices


def changes_optimizer(plan: Plan) -> bool:
    """Whether the run has another optimizer or schedule, or other values of them, than its checkpoint has on record.

    A module with an optimizer of its own may take such values as its arguments.
    """
    try:
        before = read_json(Path(plan.resume or "") / PLAN)
    except (OSError, ValueError):
        return False
    keys = ("module", "optimizer", "schedule") if plan.optimizer is None else ("optimizer", "schedule")
    return any(key in before and before[key] != getattr(plan, key) for key in keys)


# The keys of a Plan whose values a run should keep when it goes on
_RUN_KEYS = ("module", "data", "optimizer", "schedule", "seed", "global_batch_size", "gradient_clip_val", "ema_decay")
# The keys of `data` that change how batches are loaded, not which samples come
_LOADER_KEYS = ("batch_size", "num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


def _target(node: dict[str, Any] | None) -> Any:
    return None if node is None else node.get("_target_")


def _words_of(before: dict[str, Any], now: dict[str, Any], run_dir: str | Path) -> str:
    """How to say the data of before again: the words that were left out or are others now."""
    if before.get("_target_") != now.get("_target_"):
        return f" ({Path(run_dir) / CONFIG} has its words)"
    changed = [key for key in before | now if before.get(key) != now.get(key)]
    values = {key: before.get(key) for key in changed}
    words = [f"data.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]
    return f" ({' '.join(map(shlex.quote, words))})"


def differences(before: Any, now: Any, key: str = "") -> Iterator[str]:
    """Yield `key before → now` for every value that has changed."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in before | now:
            yield from differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield f"{key} {json.dumps(before)} → {json.dumps(now)}"
