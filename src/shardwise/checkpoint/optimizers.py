"""What optimizers keep besides tensors of the form of their parameters: their kinds, options, numbers and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint.state import ShardedState
from shardwise.errors import ConfigError

_NUMBERS = {kind.__name__: kind for kind in (bool, int, float)}


def describe_state(state: ShardedState) -> list[dict[str, Any]]:
    """What a checkpoint has of the optimizers besides tensors: see `describe_optimizers`."""
    optimizers, names = state.module_optimizers(), state.group_names()
    return describe_optimizers(optimizers, names, state.stepped_names(), whole=state.keeps_whole_weights)


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
    """`numbers`: key → the type of the numbers there. `state`: a parameter's name → what is neither a tensor nor a
    number. `beside`: entries of `optimizer.state` for no parameter. `own`: what its own `state_dict` adds."""
    numbers: dict[str, str] = {}
    state: dict[str, dict[str, Any]] = {}
    beside: dict[Any, Any] = {}
    for site, kept in optimizer.state.items():
        if not isinstance(site, Tensor):
            beside[site] = kept
            continue
        for key, value in kept.items():
            if type(value).__name__ in _NUMBERS:
                numbers[key] = type(value).__name__
            elif not isinstance(value, (Tensor, int, float)):
                state.setdefault(stepped.get(id(site), ""), {})[key] = value
    own = type(optimizer).state_dict is not Optimizer.state_dict
    added = {k: v for k, v in optimizer.state_dict().items() if k not in ("state", "param_groups")} if own else {}
    return {"numbers": numbers, "state": state, "beside": beside, "own": added}


def _refuse(optimizer: Optimizer, rest: dict[str, Any], stepped: Mapping[int, str]) -> None:
    """A rank has its own part, which the others lack."""
    in_state = {key: value for kept in rest["state"].values() for key, value in kept.items() if value is not None}
    lost = in_state if not stepped else {key: value for key, value in in_state.items() if _has_tensors(value)}
    lost |= {key: value for key, value in (rest["beside"] | rest["own"]).items() if _has_tensors(value)}
    if lost:
        raise ConfigError(
            f"{type(optimizer).__name__} keeps {', '.join(map(str, lost))}, which has not the form of its weights: a "
            f"checkpoint of weights that are divided among ranks cannot have it; use strategy=ddp, another optimizer, "
            f"or checkpoint=none"
        )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return any(map(_has_tensors, value)) if isinstance(value, (list, tuple)) else isinstance(value, Tensor)


def as_tensor(number: float) -> Tensor:
    """A number of an optimizer's state as a scalar: fp32, which others keep a count of steps in, if that is exact."""
    scalar = torch.tensor(float(number), dtype=torch.float32)
    return scalar if scalar.item() == number else scalar.new_tensor(number, dtype=torch.float64)


def restore_own(state: ShardedState, saved: list[dict[str, Any]]) -> None:
    """Give an optimizer with a `state_dict` of its own what that had added. Call it before tensors are restored, since
    torch's `load_state_dict` gives them the type of the weights."""
    for optimizer, before in zip(state.module_optimizers(), saved, strict=True):
        if own := before.get("own"):
            optimizer.load_state_dict(optimizer.state_dict() | _moved(own, _device_of(optimizer)))


def restore_state(state: ShardedState, saved: list[dict[str, Any]]) -> None:
    """Restore options, and what is neither option nor tensor. Call it after tensors are restored, with the numbers."""
    optimizers = state.module_optimizers()
    apply_options(optimizers, state.group_names(), saved)
    _restore_rest(optimizers, state.stepped_names(), saved)


def _restore_rest(optimizers: list[Optimizer], stepped: Mapping[int, str], saved: list[dict[str, Any]]) -> None:
    for optimizer, before in zip(optimizers, saved, strict=True):
        if before.get("class") != type(optimizer).__name__:
            continue
        for key, value in before["beside"].items():
            optimizer.state[key] = _moved(value, _device_of(optimizer))
        for group in optimizer.param_groups:
            for site in group["params"]:
                for key, value in before["state"].get(stepped.get(id(site)), {}).items():
                    optimizer.state[site][key] = _moved(value, site.device)
        for kept in (kept for site, kept in optimizer.state.items() if isinstance(site, Tensor)):
            for key, kind in before["numbers"].items():
                if isinstance(value := kept.get(key), Tensor) and value.ndim == 0:
                    kept[key] = _NUMBERS[kind](value.item())


def _device_of(optimizer: Optimizer) -> torch.device:
    device: torch.device = next(p.device for group in optimizer.param_groups for p in group["params"])
    return device


def _moved(value: Any, device: torch.device) -> Any:
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value.to(device) if isinstance(value, Tensor) else value


def kind_of(optimizer: Optimizer) -> str:
    """The class whose state this optimizer keeps: DeepSpeed's Adam for the host keeps the same as torch's."""
    name = type(optimizer).__name__
    if name == "DeepSpeedCPUAdam":
        return "AdamW" if getattr(optimizer, "adam_w_mode", True) else "Adam"
    return name


def optimizer_difference(
    saved: list[dict[str, Any]], optimizers: list[Optimizer], names: list[list[list[str]]]
) -> str | None:
    """Say why these optimizers cannot use the state that was saved; None: they can.

    `saved`: from `describe_optimizers`.
    """
    kinds_before, kinds = [one["kind"] for one in saved], [kind_of(optimizer) for optimizer in optimizers]
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
    return None


def _algorithms(groups: list[tuple[dict[str, Any], list[str]]]) -> dict[str, Any]:
    """Parameter's name → its algorithm, in an optimizer whose groups have different ones."""
    return {name: options.get("algorithm") for options, names in groups for name in names}


def apply_options(optimizers: list[Optimizer], names: list[list[list[str]]], saved: list[dict[str, Any]]) -> None:
    """Give each group the saved options, such as the learning rate, of a group with the same parameters."""
    for optimizer, optimizer_names, saved_optimizer in zip(optimizers, names, saved, strict=True):
        same_class = saved_optimizer.get("class") == type(optimizer).__name__  # it may add options in its first step
        options = {name: group["options"] for group in saved_optimizer["groups"] for name in group["names"]}
        for group, group_names in zip(optimizer.param_groups, optimizer_names, strict=True):
            found: dict[str, Any] = next((options[name] for name in group_names if name in options), {})
            group.update({k: v for k, v in found.items() if (k in group or same_class) and k not in _NOT_RESTORED})


# These options say how a step is computed, not what it computes: this run's own hold
_NOT_RESTORED = ("fused", "foreach", "capturable", "differentiable", "bias_correction", "newton_schulz_dtype")
