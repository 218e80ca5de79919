"""Finds the layers that repeat. Each is one unit, which is sharded, cast, compiled and checkpointed as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.protocols import no_split_modules_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Units:
    """The layers that repeat, in the order of the module's definition. None contains another."""

    modules: tuple[tuple[str, nn.Module], ...]  # (dotted name, layer)
    covered: int  # the number of parameters inside these layers
    total: int  # the number of parameters of the whole module
    rule: str  # how the layers were found

    @property
    def rest(self) -> int:
        """The number of parameters outside the units, which a strategy that gathers layers gathers as one piece."""
        return self.total - self.covered

    @property
    def share(self) -> float:
        return self.covered / self.total if self.total else 0.0

    def __str__(self) -> str:
        counts = Counter(type(module).__name__ for _, module in self.modules)
        layers = ", ".join(f"{count} × {name}" for name, count in counts.items()) or "none"
        return f"{layers}, with {self.share:.1%} of {self.total:,} parameters ({self.rule})"


def find_units(root: nn.Module, names: Sequence[str] | None = None, needed_by: Sequence[str] = ()) -> Units:
    """Find the layers that repeat. There may be none: then the module is one piece.

    `names` (class names) decides if it is given; an empty list makes the module one piece. Otherwise the model's
    `_no_split_modules` decides (Hugging Face's convention), and without that every outermost class that repeats among
    siblings: encoder and decoder layers, the blocks of every ResNet stage. `needed_by`: the options that act on these
    layers only. Without any, the layers are needed for sharding alone, and a layer that shares a parameter with another
    is left out.

    Raises:
        ConfigError: a name that no layer has, or no layers for an option that would then do nothing.
    """
    units = _find(root, names)
    if names is None and not needed_by:
        units = _units(root, _alone(root, units.modules), units.rule)
    if needed_by and not units.modules:
        none = "units=[] names none" if names is not None else f"{type(root).__name__} has none"
        act, them = ("act", "them") if len(needed_by) > 1 else ("acts", "it")
        raise ConfigError(
            f"{' and '.join(needed_by)} {act} on the layers that repeat, and {none}: leave {them} out, or name layers "
            f"by their classes, e.g. units=[{_example(root)}]; {_classes(root)}"
        )
    return units


def units_for(module: nn.Module, plan: Plan) -> tuple[Units, str | None]:
    """The layers that this Plan acts on, and a line about them for the user; None if the Plan acts on none.

    Raises:
        ConfigError: see `find_units`; or there is nothing to train, or a parameter has no shape yet.
    """
    if lazy := [name for name, p in module.named_parameters() if is_lazy(p)]:
        raise ConfigError(
            f"{type(module).__name__} has layers that get their shapes with the first batch ({', '.join(lazy[:4])}): "
            f"strategies need them before; give the sizes, or run the layers once in configure_model or setup"
        )
    checkpointing = plan.activation_checkpointing.name
    options = {"compile=layer": plan.compile.name == "layer",
               f"activation_checkpointing={checkpointing}": checkpointing != "none"}  # fmt: skip
    needed_by = [option for option, given in options.items() if given]
    units = find_units(module, plan.units, needed_by)
    if not any(p.requires_grad for p in module.parameters()) and plan.stage == "fit":
        raise ConfigError(f"{type(module).__name__} has no parameter that needs a gradient: nothing can be trained")
    gathers = plan.capabilities.shards_parameters
    if not (gathers or needed_by or plan.units is not None):
        return units, None
    message = f"layers that repeat: {units}"
    if gathers and plan.units is None and units.share < 0.5:
        message += (
            f"; the other {units.rest:,} are gathered as one piece; units=[Name] names layers to gather "
            f"one by one, by their class"
        )
    return units, message


def _find(root: nn.Module, names: Sequence[str] | None) -> Units:
    if names is not None:
        found = list(_outermost(root, set(names)))
        missing = sorted(set(names) - {type(module).__name__ for module in root.modules() if module is not root})
        if missing:
            raise ConfigError(f"units={list(names)}: no layer of class {', '.join(missing)}; {_classes(root)}")
        return _units(root, found, "named in units")
    declared = {name for module in root.modules() for name in no_split_modules_of(module)}
    if declared and (found := list(_outermost(root, declared))):
        rule = "named by _no_split_modules"
    else:
        rule = "found by their class"
        found = list(_repeated(root, "", leaves=False)) or list(_repeated(root, "", leaves=True))
    return _units(root, found, rule)


def _units(root: nn.Module, found: list[tuple[str, nn.Module]], rule: str) -> Units:
    inside = {id(p): p.numel() for _, module in found for p in module.parameters()}
    total = sum(p.numel() for p in root.parameters())
    return Units(tuple(found), sum(inside.values()), total, rule)


def _alone(root: nn.Module, found: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The layers that share no parameter with the rest of the module, since only one sharded layer can own a weight."""
    counts = Counter(id(p) for _, unit in found for p in unit.parameters())
    counts.update(id(p) for p in _outside(root, {id(unit) for _, unit in found}))
    return [(name, unit) for name, unit in found if all(counts[id(p)] == 1 for p in unit.parameters())]


def _outside(module: nn.Module, units: set[int]) -> set[nn.Parameter]:
    found = {p for p in module._parameters.values() if p is not None}
    for child in module.children():
        if id(child) not in units:
            found |= _outside(child, units)
    return found


def _outermost(module: nn.Module, names: set[str], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if type(child).__name__ in names:
            yield prefix + name, child
        else:
            yield from _outermost(child, names, f"{prefix}{name}.")


def _siblings(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The children, with those of lists and Sequentials in their place, so that all stages of a ResNet are siblings."""
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from _siblings(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _repeated(module: nn.Module, prefix: str, leaves: bool) -> Iterator[tuple[str, nn.Module]]:
    siblings = [(n, m) for n, m in _siblings(module, prefix) if any(True for _ in m.parameters())]
    counts = Counter(type(m) for _, m in siblings)
    for name, sibling in siblings:
        is_leaf = next(sibling.children(), None) is None
        if counts[type(sibling)] > 1 and (leaves or not is_leaf):
            yield name, sibling
        elif not is_leaf:
            yield from _repeated(sibling, f"{name}.", leaves)


def _classes(root: nn.Module) -> str:
    counts = _counts(root)
    return "the module has " + (
        ", ".join(f"{n} × {c}" for c, n in counts.most_common(8)) or "no layers with parameters"
    )


def _example(root: nn.Module) -> str:
    return next(iter(_counts(root)), "Block")


def _counts(root: nn.Module) -> Counter[str]:
    """How many layers with parameters there are of each class."""
    return Counter(type(m).__name__ for m in root.modules() if m is not root and any(True for _ in m.parameters()))
