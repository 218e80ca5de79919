"""Which stage of a pipeline owns which layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from torch import nn

from shardwise.errors import ConfigError
from shardwise.parallel.units import Units

_ONE = "use strategy.pipeline_parallel_size=1"


class Ownership:
    """The stages of one rank, and whose the layers are.

    Layers outside units are given by the order of definition: those before the units to the first stage, those behind
    them to the last. Only layers that own parameters are given; all others stay on every stage.

    Raises:
        ConfigError: the module cannot be cut so.
    """

    def __init__(self, module: nn.Module, units: Units, split: Sequence[int], own: Collection[int]) -> None:
        self.split, self.stages, self.count = tuple(split), set(own), len(split)
        assert sum(split) == len(units.modules) and min(split) > 0
        self._ends = list(accumulate(split))
        name = type(module).__name__
        inside = {id(layer): number for number, (_, unit) in enumerate(units.modules) for layer in unit.modules()}
        places = [(dotted, layer) for dotted, layer in module.named_modules() if id(layer) not in inside]
        order = {dotted: number for number, (dotted, _) in enumerate(module.named_modules())}
        first, last = order[units.modules[0][0]], order[units.modules[-1][0]]
        self.outside: list[tuple[str, nn.Module, int]] = []  # name, layer, stage
        for dotted, layer in places:
            if not any(p is not None for p in layer._parameters.values()):
                continue
            if any(id(child) in inside for child in layer.modules()):
                raise ConfigError(
                    f"{name}: {dotted or 'the module'} has parameters itself and the layers that repeat inside it, so "
                    f"no stage of a pipeline can own it: move them into a layer of their own, or {_ONE}"
                )
            if first < order[dotted] < last:
                behind = next(unit for unit, _ in units.modules if order[unit] > order[dotted])
                raise ConfigError(
                    f"{name}: {dotted} is defined between the layers that repeat, of which {behind} is behind it: two "
                    f"stacks of layers, such as those of a model and of its teacher, are not one pipeline; {_ONE}"
                )
            self.outside.append((dotted, layer, 0 if order[dotted] < first else self.count - 1))
        self._check_ties(name, module, inside)

    def units_of(self, stage: int) -> tuple[int, int]:
        """The numbers of a stage's first unit, and of the one behind its last."""
        return self._ends[stage] - self.split[stage], self._ends[stage]

    def stage_of_unit(self, number: int) -> int:
        return next(stage for stage, end in enumerate(self._ends) if number < end)

    def shared_ids(self) -> set[int]:
        """The ids of parameters that the first and the last stage share, as they are now, if one of them is here."""
        ends = {0, self.count - 1}
        if not self.stages & ends:
            return set()
        return {id(layer._parameters[key]) for layer, key in self._ties}

    def shared(self) -> list[nn.Parameter]:
        """Those parameters, each once. A stage that is neither has none."""
        found = {id(p): p for layer, key in self._ties if (p := layer._parameters[key]) is not None}
        return list(found.values()) if self.stages & {0, self.count - 1} else []

    def _check_ties(self, name: str, module: nn.Module, inside: dict[int, int]) -> None:
        stages: dict[int, set[int]] = {}  # a parameter's id → the stages that use it
        sites: dict[int, list[tuple[nn.Module, str]]] = {}
        outside = {id(layer): stage for _, layer, stage in self.outside}
        for layer in module.modules():
            for key, parameter in layer._parameters.items():
                if parameter is not None:
                    at = outside[id(layer)] if id(layer) in outside else self.stage_of_unit(inside[id(layer)])
                    stages.setdefault(id(parameter), set()).add(at)
                    sites.setdefault(id(parameter), []).append((layer, key))
        self._ties: list[tuple[nn.Module, str]] = []
        for dotted, parameter in module.named_parameters():
            if len(stages[id(parameter)]) == 1:
                continue
            if any(id(layer) not in outside for layer, _ in sites[id(parameter)]):
                raise ConfigError(
                    f"{name}: {dotted} is shared by layers of several stages: in a pipeline only layers before and "
                    f"behind those that repeat can share a weight, an embedding and a head; {_ONE}"
                )
            self._ties += sites[id(parameter)]
