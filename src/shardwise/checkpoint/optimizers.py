"""What optimizers keep besides tensors of the form of their parameters: their kinds, options, numbers and the rest."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardwise.checkpoint.state import ShardedState
from shardwise.errors import ConfigError, count, describe_error, first_of
from shardwise.plan import Plan
from shardwise.run_dir.resume import changes_optimizer

_NUMBERS = {kind.__name__: kind for kind in (bool, int, float)}
_LARGE = 2**63
_STEPPED = "shardwise:stepped"  # stands before the name of a parameter


def describe_state(state: ShardedState) -> list[dict[str, Any]]:
    """What a checkpoint has of the optimizers besides tensors: see `describe_optimizers`."""
    optimizers, names = state.module_optimizers(), state.group_names()
    described = describe_optimizers(optimizers, names, state.stepped_names(), whole=state.keeps_whole_weights)
    for one, made in zip(described, state.made_groups, strict=False):
        one["made"] = made  # hooks may have changed them since
    return described


def describe_optimizers(
    optimizers: list[Optimizer], names: list[list[list[str]]], stepped: Mapping[int, str], *, whole: bool
) -> list[dict[str, Any]]:
    """What is plain data of each optimizer: its kind, its groups with the parameters' names and options, and the rest.

    `stepped`: the id of what it steps on → the parameter's name. `whole`: whether this rank has all weights.

    Raises:
        ConfigError: an optimizer keeps what a checkpoint of divided weights cannot have.
    """
    described = []
    for optimizer, optimizer_names in zip(optimizers, names, strict=True):
        groups = [
            {"names": group_names, "options": {k: v for k, v in group.items() if k != "params"}}
            for group, group_names in zip(optimizer.param_groups, optimizer_names, strict=True)
        ]
        rest = _rest_of(optimizer, stepped)
        if not whole:
            _refuse(optimizer, rest, stepped)
        described.append({"kind": kind_of(optimizer), "class": type(optimizer).__name__, "groups": groups, **rest})
    return described


def _rest_of(optimizer: Optimizer, stepped: Mapping[int, str]) -> dict[str, Any]:
    """`numbers`: key → the type of the numbers there. `state`: a parameter's name → what is neither a tensor nor such a
    number. `beside`: entries of `optimizer.state` for no parameter. `own`: what its own `state_dict` adds."""
    kept_for = {site: kept for site, kept in optimizer.state.items() if isinstance(site, Tensor)}
    of_tensors = {key for kept in kept_for.values() for key, value in kept.items() if isinstance(value, Tensor)}
    numbers: dict[str, str] = {}
    state: dict[str, dict[str, Any]] = {}
    for site, kept in kept_for.items():
        for key, value in kept.items():
            kind = type(value).__name__
            fits = not isinstance(value, int) or abs(value) < _LARGE
            if kind in _NUMBERS and key not in of_tensors and numbers.setdefault(key, kind) == kind and fits:
                continue
            if not isinstance(value, Tensor):
                state.setdefault(stepped.get(id(site), ""), {})[key] = value
    beside = {key: kept for key, kept in optimizer.state.items() if not isinstance(key, Tensor)}
    rest = {"state": state, "beside": beside, "own": _own_of(optimizer)}
    return {"numbers": numbers, **_with_names(rest, stepped)}


def _own_of(optimizer: Optimizer) -> dict[str, Any]:
    """What its own `state_dict`, or a hook of that, gives besides options and `optimizer.state`."""
    is_own = type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer)
    if not is_own and not getattr(optimizer, "_optimizer_state_dict_post_hooks", None):
        return {}
    try:
        given = optimizer.state_dict()
    except Exception as error:
        raise ConfigError(
            f"{type(optimizer).__name__}.state_dict() fails ({describe_error(error)}), so a checkpoint cannot have "
            f"what it keeps; use another optimizer, or checkpoint=none"
        ) from error
    numbers = {id(p): n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    usual = {numbers.get(id(site), site): kept for site, kept in optimizer.state.items()}
    others = ("param_groups",) if not _is_same(given.get("state", {}), usual) else ("param_groups", "state")
    return {key: value for key, value in given.items() if key not in others}


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and one.data_ptr() == other.data_ptr()
    return type(one) in (bool, int, float, str) and bool(one == other)


def _refuse(optimizer: Optimizer, rest: dict[str, Any], stepped: Mapping[int, str]) -> None:
    """A rank has its own part, which the others lack."""
    in_state = {key: value for kept in rest["state"].values() for key, value in kept.items() if value is not None}
    lost = in_state if not stepped else {key: value for key, value in in_state.items() if _has(value, Tensor)}
    lost |= {key: value for key, value in (rest["beside"] | rest["own"]).items() if _has(value, Tensor)}
    lost |= {key: value for group in optimizer.param_groups for key, value in group.items()
             if key != "params" and _has(value, DTensor)}  # fmt: skip
    if lost:
        raise ConfigError(
            f"{type(optimizer).__name__} keeps {', '.join(map(str, lost))}, which has not the form of its weights: a "
            f"checkpoint of weights that are divided among ranks cannot have it; use strategy=ddp, another optimizer, "
            f"or checkpoint=none"
        )


def _has(value: Any, kind: type) -> bool:
    """Whether an instance of `kind` is in `value`, at any depth."""
    if isinstance(value, kind):
        return True
    if isinstance(value, Mapping):
        return any(_has(item, kind) for item in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return any(_has(item, kind) for item in value)
    return is_dataclass(value) and any(_has(getattr(value, field.name, None), kind) for field in fields(value))


def as_tensor(number: float) -> Tensor:
    """A number of an optimizer's state as a scalar: fp32, which others keep a count of steps in, if that is exact."""
    scalar = torch.tensor(float(number), dtype=torch.float32)
    if scalar.item() == number:
        return scalar
    return torch.tensor(number, dtype=torch.int64 if type(number) is int and abs(number) < _LARGE else torch.float64)


def restore_own(state: ShardedState, saved: list[dict[str, Any]]) -> None:
    """Give an optimizer with a `state_dict` of its own what that had added. Call it before tensors are restored, since
    torch's `load_state_dict` gives them the type of the weights."""
    stepped = state.stepped_names()
    for optimizer, before in zip(state.module_optimizers(), saved, strict=True):
        if own := before.get("own"):
            given = _with_parameters(own, _by_name(optimizer, stepped), _device_of(optimizer))
            optimizer.load_state_dict(optimizer.state_dict() | given)


def restore_state(state: ShardedState, saved: list[dict[str, Any]]) -> None:
    """Restore options, and what is neither option nor tensor. Call it after tensors are restored, with the numbers."""
    optimizers = state.module_optimizers()
    apply_options(optimizers, state.group_names(), saved)
    _restore_rest(optimizers, state.stepped_names(), saved)


def _restore_rest(optimizers: list[Optimizer], stepped: Mapping[int, str], saved: list[dict[str, Any]]) -> None:
    for optimizer, before in zip(optimizers, saved, strict=True):
        if before.get("class") != type(optimizer).__name__:
            continue
        for kept in (kept for site, kept in optimizer.state.items() if isinstance(site, Tensor)):
            for key, kind in before["numbers"].items():
                if isinstance(value := kept.get(key), Tensor) and value.ndim == 0:
                    kept[key] = _NUMBERS[kind](value.item())
        named = _by_name(optimizer, stepped)
        for key, value in before["beside"].items():
            optimizer.state[key] = _with_parameters(value, named, _device_of(optimizer))
        for name, values in before["state"].items():
            if name in named:
                optimizer.state[named[name]] |= _with_parameters(values, named, named[name].device)


def _by_name(optimizer: Optimizer, stepped: Mapping[int, str]) -> dict[str, Tensor]:
    sites = [site for group in optimizer.param_groups for site in group["params"]]
    return {stepped[id(site)]: site for site in sites if id(site) in stepped}


def _device_of(optimizer: Optimizer) -> torch.device:
    devices = (p.device for group in optimizer.param_groups for p in group["params"])
    return next(devices, torch.device("cpu"))  # DeepSpeed may leave a rank, and its groups, without a parameter


def _with_names(value: Any, stepped: Mapping[int, str]) -> Any:
    """A copy with names in place of what the optimizer steps on, as keys and as values."""
    return _mapped(value, lambda item: (_STEPPED, stepped[id(item)]) if id(item) in stepped else item)


def _with_parameters(value: Any, named: Mapping[str, Tensor], device: torch.device) -> Any:
    """A copy with what the optimizer steps on in place of names, and with the other tensors on `device`."""

    def replace(item: Any) -> Any:
        if type(item) is tuple and len(item) == 2 and item[0] == _STEPPED:
            return named.get(item[1], item)
        return item.to(device) if isinstance(item, Tensor) else item

    return _mapped(value, replace)


def _mapped(value: Any, replace: Callable[[Any], Any]) -> Any:
    """A copy of `value` with `replace` applied to what is no container, and to pairs that stand for a parameter."""
    if (replaced := replace(value)) is not value:
        return replaced
    if isinstance(value, (dict, OrderedDict)):
        items = {_mapped(key, replace): _mapped(item, replace) for key, item in value.items()}
        made = copy(value)
        made.clear()
        made.update(items)
        return made
    if isinstance(value, tuple):
        parts = [_mapped(item, replace) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts) if type(value) is tuple else value
    if type(value) in (list, set, frozenset):
        return type(value)(_mapped(item, replace) for item in value)
    if isinstance(value, deque):
        return deque((_mapped(item, replace) for item in value), value.maxlen)
    return value


def kind_of(optimizer: Optimizer) -> str:
    """The class whose state this optimizer keeps: DeepSpeed's Adam for the host keeps the same as torch's."""
    name = type(optimizer).__name__
    if name == "DeepSpeedCPUAdam":
        return "AdamW" if getattr(optimizer, "adam_w_mode", True) else "Adam"
    return name


def kind_before(saved: dict[str, Any]) -> str:
    """The kind of an optimizer that was saved. Earlier versions of MuonAdamW were called Muon, as torch's is."""
    ours = saved["kind"] == "Muon" and any("algorithm" in group["options"] for group in saved["groups"])
    return "MuonAdamW" if ours else saved["kind"]


def apply_options(optimizers: list[Optimizer], names: list[list[list[str]]], saved: list[dict[str, Any]]) -> None:
    """Give each group the saved options, such as the learning rate, of the group with the same parameters."""
    for optimizer, optimizer_names, saved_optimizer in zip(optimizers, names, saved, strict=True):
        same_class = saved_optimizer.get("class") == type(optimizer).__name__  # it may add options in its first step
        options = [(set(group["names"]), group["options"]) for group in saved_optimizer["groups"]]
        for group, group_names in zip(optimizer.param_groups, optimizer_names, strict=True):
            at = next(i for i, (of, _) in enumerate(options) if of == set(group_names))
            _, found = options.pop(at)  # several groups may have no parameter
            taken = {k: v for k, v in found.items() if (k in group or same_class) and k not in _NOT_RESTORED}
            here = {k for k, v in group.items() if isinstance(v, Tensor) and v.device.type == "cpu"}
            group.update(
                {k: v if k in here else _with_parameters(v, {}, _device_of(optimizer)) for k, v in taken.items()}
            )


# These options say how a step is computed, not what it computes: this run's own hold
_NOT_RESTORED = ("fused", "foreach", "capturable", "differentiable", "bias_correction", "newton_schulz_dtype")


# The groups of optimizers in a run that goes on: those that its code makes, and those that hooks had made.


def optimizer_difference(
    saved: list[dict[str, Any]], optimizers: list[Optimizer], names: list[list[list[str]]]
) -> str | None:
    """Say why these optimizers cannot use the state that was saved; None: they can.

    `saved`: from `describe_optimizers`.
    """
    kinds_before, kinds = [kind_before(one) for one in saved], [kind_of(optimizer) for optimizer in optimizers]
    if kinds_before != kinds:
        had, has = ", ".join(kinds_before) or "none", ", ".join(kinds)
        return f"its optimizer state is of {had}, and this run has {has}"
    before = [{name for group in one["groups"] for name in group["names"]} for one in saved]
    now = [{name for group in one for name in group} for one in names]
    moved = sorted(set().union(*now) & set().union(*before) - set().union(*map(set.intersection, now, before)))
    if moved:
        return f"{', '.join(moved[:4])} had another of its optimizers; give them in the same order"
    groups_before = [(group["options"], group["names"]) for one in saved for group in one["groups"]]
    groups = [(g, n) for o, all_names in zip(optimizers, names, strict=True)
              for g, n in zip(o.param_groups, all_names, strict=True)]  # fmt: skip
    was, is_now = _algorithms(groups_before), _algorithms(groups)
    if changed := sorted(name for name in was.keys() & is_now.keys() if was[name] != is_now[name]):
        return f"{', '.join(changed[:4])}: trained by {was[changed[0]]} before, and by {is_now[changed[0]]} now"
    return _groups_difference(saved, names)


def _algorithms(groups: list[tuple[dict[str, Any], list[str]]]) -> dict[str, Any]:
    """Parameter's name → its algorithm, in an optimizer whose groups have different ones."""
    return {name: options.get("algorithm") for options, names in groups for name in names}


def _groups_difference(saved: list[dict[str, Any]], names: list[list[list[str]]]) -> str | None:
    """Say which groups `configure_optimizers` has made otherwise than for the run that was saved; None: it has not."""
    for before, now in zip(saved, names, strict=True):
        made = before.get("made", [group["names"] for group in before["groups"]])
        if (had := Counter(map(frozenset, made))) != (has := Counter(map(frozenset, now))):
            return (
                f"configure_optimizers gave {before['class']} the groups {_list_groups(made, has)} when it was saved, "
                f"and gives {_list_groups(now, had)} now: learning rate, weight decay and the like of one group would "
                f"become those of another; make the groups that it had"
            )
    return None


def _list_groups(groups: list[list[str]], others: Counter[frozenset[str]]) -> str:
    """Those that are not among `others`, and how many are."""
    listed = [f"[{first_of(names)}]" for names in groups if frozenset(names) not in others]
    same = len(groups) - len(listed)
    return ", ".join([*listed, *([f"{count(same, 'group')} in common"] if same else [])]) or "none"


def fill_names(saved: list[dict[str, Any]], names: list[list[list[str]]]) -> None:
    """Give the groups of an older checkpoint the names that it lacks: those of weights that a validation under
    FSDP had gathered."""
    for before, now in zip(saved, names, strict=False):
        if "made" in before:
            continue
        known = {name for group in before["groups"] for name in group["names"]}
        for group in before["groups"]:
            same = [of for of in now if known & set(of) == set(group["names"])]
            group["names"] = same[0] if len(same) == 1 else group["names"]


class HookGroups:
    """Groups that hooks had made in the run that was saved, such as one of weights that are trained later."""

    def __init__(self, state: ShardedState) -> None:
        self.state = state
        self._before: list[list[dict[str, Any]]] = []  # the groups of each optimizer; none where hooks had made none
        self._made: list[list[dict[str, Any]]] = []

    def make(self, saved: list[dict[str, Any]]) -> None:
        """Let the optimizers have the groups that were saved. Call it before tensors are read."""
        optimizers = self.state.module_optimizers()
        before = [list(optimizer.param_groups) for optimizer in optimizers]
        for optimizer, now, one in zip(optimizers, self.state.group_names(), saved, strict=True):
            wanted = [group["names"] for group in one["groups"]]
            if Counter(map(frozenset, wanted)) == Counter(map(frozenset, now)):
                continue
            self._before = before
            present: dict[
                frozenset[str], list[dict[str, Any]]
            ] = {}  # several groups may have no weight of the module's
            for of, group in zip(now, optimizer.param_groups, strict=True):
                present.setdefault(frozenset(of), []).append(group)
            members = [self.state.group_members(of) for of in wanted]
            optimizer.param_groups[:] = [
                present[key].pop(0) if present.get(key := frozenset(of)) else {**optimizer.defaults, "params": weights}
                for of, weights in zip(wanted, members, strict=True)
            ]
            getattr(optimizer, "take_shards", lambda: None)()
            out = sorted({name for of in now for name in of} - {name for of in wanted for name in of})
            if out and dist.get_rank() == 0:
                print(
                    f"resume: {first_of(out)}: a hook had taken this out of {one['class']}, which trains it no longer, "
                    f"and the checkpoint has no optimizer state of it",
                    flush=True,
                )

    def put_aside(self) -> None:
        """Let the optimizers have their own groups until `restore`, since `on_fit_start` may make the others itself."""
        self._made = [list(optimizer.param_groups) for optimizer in self.state.module_optimizers()]
        self._give(self._before)

    def restore(self) -> None:
        """Call it after `on_fit_start`, where Lightning restores optimizers."""
        if self._before:
            self._give(self._made)

    def _give(self, groups: list[list[dict[str, Any]]]) -> None:
        for optimizer, own in zip(self.state.module_optimizers(), groups, strict=False):
            optimizer.param_groups[:] = own


# A run with another optimizer, which by `resume_allow=[optimizer]` may leave its checkpoint's state behind.


def takes_optimizers(plan: Plan, state: ShardedState, saved: list[dict[str, Any]]) -> bool:
    """Whether this run's optimizers can use the saved state. Prints so where that state is left behind.

    Raises:
        ConfigError: they cannot, and `resume_allow` does not name the optimizer.
    """
    names = state.group_names()
    fill_names(saved, names)
    difference = optimizer_difference(saved, state.module_optimizers(), names)
    if difference is not None and "optimizer" not in plan.resume_allow:
        raise ConfigError(f"resume={plan.resume}: {difference}; resume_allow=[optimizer] leaves that state behind")
    if difference is not None and dist.get_rank() == 0:
        print(
            f"the checkpoint's optimizer: {difference}; that state is left behind, and this run's learning rate holds",
            flush=True,
        )
    return difference is None


def tell_kept(plan: Plan, optimizers: Sequence[Optimizer]) -> None:
    """Say that the saved state is used, where the user may think otherwise. Call it when the state is restored."""
    if dist.get_rank() != 0:
        return
    without = _without_effect(plan, [group for one in optimizers for group in one.param_groups])
    if not (without or "optimizer" in plan.resume_allow or changes_optimizer(plan)):
        return
    line = "the checkpoint's optimizer state, its learning rate included, is kept"
    if without:
        line += (
            f": {' and '.join(without)} {'have' if len(without) > 1 else 'has'} no effect; a new run from its weights "
            f"takes such values: shardwise export {plan.resume} format=safetensors, then init_from= and another name="
        )
    print(line, flush=True)


def tell_left_callbacks(saved: Mapping[str, Any], trainer: Trainer) -> None:
    """Name the callbacks of which the checkpoint has the state, and which this run does not have as they were."""
    left = sorted(map(str, saved.keys() - {callback.state_key for callback in trainer.callbacks}))  # type: ignore[attr-defined]
    if left and dist.get_rank() == 0:
        print(
            f"the checkpoint has the state of {', '.join(left)}, which this run has not, or with other values: that "
            f"state is left behind",
            flush=True,
        )


def _without_effect(plan: Plan, groups: list[dict[str, Any]]) -> list[str]:
    """The values of `optimizer.*` that no group of the optimizer has, each with the one that holds."""
    found = []
    for key, given in (plan.optimizer or {}).items():
        kept = "initial_lr" if key == "lr" and plan.schedule is not None else key  # the schedule's highest rate
        held = [_plain(group[kept]) for group in groups if kept in group]
        if held and not any(_are_alike(value, given) for value in held):
            found.append(f"optimizer.{key}={json.dumps(given)} (it is {json.dumps(held[0])})")
    return found


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    return list(value) if isinstance(value, tuple) else value


def _are_alike(value: Any, given: Any) -> bool:
    numbers = isinstance(value, (int, float)) and isinstance(given, (int, float))
    return value == given or (numbers and math.isclose(value, given, rel_tol=1e-6))  # a rate may be kept in fp32


def moved_on(configs: Sequence[LRSchedulerConfig], saved: Sequence[Any]) -> list[Any]:
    """Move this run's schedules on by as many steps as the `saved` ones had made, and return their states.

    So each group of this run's optimizer has the rate of that step. The saved states cannot be used: they hold the
    rates of another optimizer, one for each of its groups. A schedule that follows a metric, or that is not torch's,
    begins anew.
    """
    for config, state in zip(configs, saved, strict=False):
        scheduler = config.scheduler
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # before the optimizer's first
            for _ in range(_steps(state)):
                scheduler.step()
    return [config.scheduler.state_dict() for config in configs]


def _steps(state: dict[str, Any]) -> int:
    """How many steps a schedule had made; a ChainedScheduler does not know it itself."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    chained = [one for value in state.values() if isinstance(value, list) for one in value if isinstance(one, dict)]
    return max(map(_steps, chained), default=0)
