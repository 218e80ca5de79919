"""The groups of optimizers in a run that goes on: those that its code makes, and those that hooks had made."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.checkpoint.optimizers import kind_before, kind_of
from shardwise.checkpoint.state import ShardedState
from shardwise.errors import count, first_of


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
