"""Cuts a module into the stages of a pipeline. The module runs unchanged: stubs stand where other ranks' layers were.

A stage owns consecutive units, the first one also the layers that stand before them, the last one those behind. Each
stage calls the module's own step. A stub before its units hands on what was received from the stage before; the stub
behind its last unit ends the step there by raising `Done`. Stubs stand in `parent._modules[name]`, so names of layers
and weights stay those of the whole module.

What is not owned gives NaN that knows it (parallel/pipeline/placeholders.py), never a number. A module that uses what a
pipeline does not hand over (the hidden states of every layer, a condition that is embedded once) is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.distributed.parameters import keep_attributes
from shardwise.errors import ConfigError, class_name
from shardwise.parallel.pipeline.placeholders import NOT_HERE, absent, absent_weight, check_present
from shardwise.parallel.precision import map_tensors
from shardwise.parallel.units import Units


class Done(BaseException):
    """Ends a step where a stage's last unit has run. `output` is what the next stage receives."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


class Stages:
    """The stages of this rank, which are cut out of `module`.

    `split`: how many units each stage has, in order. `own`: this rank's stages. `dtype`: that of layers outside.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Units,
        split: Sequence[int],
        own: Collection[int],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.module, self.device, self.name = module, device, class_name(module)
        self.ownership = Ownership(module, units, split, own)
        self.names, self.layers = [name for name, _ in units.modules], [unit for _, unit in units.modules]
        self.twins = {name: _on_meta(layer, dtype) for name, layer, _ in self.ownership.outside}
        self._spots: dict[str, list[tuple[nn.Module, str]]] = {}  # a layer's name → where it is registered
        self._stubs: dict[str, Stub] = {}
        self._originals = dict(units.modules) | {name: layer for name, layer, _ in self.ownership.outside}
        self._active: int | None = None  # the stage whose layers stand in the module; None: those of all own stages
        self._stage = 0  # the stage that runs now
        self._next: int | None = None  # the unit that must run next; None: no step runs
        self._handed: Tensor | None = None  # what that unit must be given
        self._receive: Callable[[], Tensor | None] = lambda: None
        self._shows = False  # whether stubs show stand-ins for weights outside a step

    def cut(self) -> None:
        """Put stubs in place of all layers that this rank does not own. Their weights are dropped."""
        by_id = {id(layer): name for name, layer in self._originals.items()}
        for parent in self.module.modules():
            for key, child in parent._modules.items():
                if id(child) in by_id:
                    self._spots.setdefault(by_id[id(child)], []).append((parent, key))
        own, shared = self.ownership, self.ownership.shared_ids()
        for number, (name, layer) in enumerate(zip(self.names, self.layers, strict=True)):
            self._stubs[name] = self._stub(layer, lambda *a, number=number, **k: self._at_stub(number, a, k))
            if own.stage_of_unit(number) not in own.stages:
                drop_weights(layer, shared)
            else:
                layer.register_forward_pre_hook(
                    lambda _, args, kwargs, number=number: self._before_unit(number, args, kwargs),
                    with_kwargs=True, prepend=True,
                )  # fmt: skip
                layer.register_forward_hook(lambda _, args, output, number=number: self._after_unit(number, output))
        for name, layer, stage in own.outside:
            stub = self._stub(layer, lambda *a, name=name, stage=stage, **k: self._at_outside(name, stage, a, k))
            if stage not in own.stages:
                for key, parameter in layer._parameters.items():
                    if id(parameter) in shared:
                        stub._parameters[key] = parameter
                drop_weights(layer, shared)
            self._stubs[name] = stub
        self._place(None)

    def _stub(self, layer: nn.Module, run: Callable[..., Any]) -> Stub:
        return Stub(layer, run, lambda: self._shows or self._next is not None, self.device)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, as in a step, who walks through the weights finds stand-ins for those of other stages."""
        self._shows = True
        try:
            yield
        finally:
            self._shows = False

    def owns(self, layer: nn.Module) -> bool:
        """Whether a unit is in one of this rank's stages."""
        number = next(number for number, unit in enumerate(self.layers) if unit is layer)
        return self.ownership.stage_of_unit(number) in self.ownership.stages

    def absent(self) -> set[int]:
        """The ids of layers that need no memory here: those of other stages that share no weight with an own one."""
        own, shared = self.ownership, self.ownership.shared_ids()
        found = {id(part) for unit in self.layers if not self.owns(unit) for part in unit.modules()}
        for _, layer, stage in own.outside:
            if stage not in own.stages and not shared & {id(p) for p in layer._parameters.values()}:
                found.add(id(layer))
        return found

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the module has all its layers: those of other stages have no memory."""
        for name, spots in self._spots.items():
            layer, stub = self._originals[name], self._stubs[name]
            for key, shared in stub._parameters.items():
                layer._parameters[key] = shared
            for parent, key in spots:
                parent._modules[key] = layer
        try:
            yield
        finally:
            self._place(None)

    def rest(self) -> None:
        """Let the module have the layers of all own stages again."""
        if self._active is not None and len(self.ownership.stages) > 1:
            self._place(None)

    def run(self, stage: int, receive: Callable[[], Tensor | None], step: Callable[[], Any]) -> Any:
        """Run `step`, a step of the module, in one stage. Gives what the next stage receives, or the step's own result.

        Raises:
            ConfigError: the module does not run through its units once, in order, with one tensor from each to the next
        """
        if stage != self._active:
            self._place(stage)
        self._stage, self._receive, self._next, self._handed = stage, receive, 0, None
        try:
            output = step()
        except Done as done:
            return done.output
        finally:
            ran, self._next, self._handed, self._receive = self._next, None, None, lambda: None
        if ran != len(self.layers):
            raise ConfigError(
                f"{self.name}: the step ended before {self.names[ran or 0]} had run: in a pipeline every layer that "
                f"repeats runs once in a step; units=[Name] names other layers, or use "
                f"strategy.pipeline_parallel_size=1"
            )
        return output

    def _place(self, stage: int | None) -> None:
        """Let the layers of `stage`, or of all own stages, stand in the module, and stubs in place of all others."""
        own = self.ownership
        stages = own.stages if stage is None else {stage}
        units = {name: own.stage_of_unit(number) for number, name in enumerate(self.names)}
        where = units | {name: stage for name, _, stage in own.outside}
        for name, spots in self._spots.items():
            for parent, key in spots:
                parent._modules[key] = self._originals[name] if where[name] in stages else self._stubs[name]
        self._active = stage

    # What is called while a step runs

    def _at_stub(self, number: int, args: Any, kwargs: Any) -> Any:
        handed = self._check_input(number, args, kwargs)
        first, end = self.ownership.units_of(self._stage)
        if number >= end:
            check_present(self.name, handed, f"the input of {self.names[number]}")
            raise Done(handed)
        # Only the stub just before the stage's units gives what was received.
        output = self._receive() if number == first - 1 else handed
        assert output is not None
        self._next, self._handed = number + 1, output
        return output

    def _before_unit(self, number: int, args: Any, kwargs: Any) -> None:
        if self._next is not None:
            self._check_input(number, args, kwargs)

    def _after_unit(self, number: int, output: Any) -> None:
        if self._next is None:
            return
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"{self.name}: {self.names[number]} gives {type(output).__name__}, and a pipeline hands over one "
                f"tensor from layer to layer; use strategy.pipeline_parallel_size=1"
            )
        self._next, self._handed = number + 1, output

    def _check_input(self, number: int, args: Any, kwargs: Any) -> Tensor:
        name, one_rank = self.names[number], "use strategy.pipeline_parallel_size=1"
        if number != self._next:
            raise ConfigError(
                f"{self.name}: {name} ran where {self._expected()}: in a pipeline a step runs once through the layers "
                f"that repeat, in the order of their definition (generating text takes several passes, and two stacks "
                f"of layers are not one pipeline); {one_rank}"
            )
        if not args or not isinstance(args[0], Tensor):
            raise ConfigError(
                f"{self.name}: the first argument of {name} is no tensor: a pipeline hands over one tensor from "
                f"layer to layer, which must come first; {one_rank}"
            )
        if _needs_gradients([*args[1:], kwargs]):
            raise ConfigError(
                f"{self.name}: {name} is given a second tensor that needs gradients: a pipeline hands over one tensor "
                f"from layer to layer; {one_rank}"
            )
        if self._handed is not None and args[0] is not self._handed:
            raise ConfigError(
                f"{self.name}: {name} is not given what {self.names[number - 1]} gave: the module computes between the "
                f"two, and each stage would do it once more; move that into the layer, or {one_rank}"
            )
        handed: Tensor = args[0]
        return handed

    def _at_outside(self, name: str, stage: int, args: Any, kwargs: Any) -> Any:
        if self._next is None:
            raise ConfigError(
                f"{self.name}: {name} is on another stage of the pipeline and ran outside a step; "
                f"use strategy.pipeline_parallel_size=1"
            )
        is_before = stage == 0
        if not is_before or self._next > 0:
            side, other = ("before", "behind") if is_before else ("behind", "before")
            raise ConfigError(
                f"{self.name}: {name} is defined {side} the layers that repeat and runs {other} them: a pipeline makes "
                f"one pass through the layers in a step (generating text takes several), and gives layers to its first "
                f"and last stage by the order of definition; define it {other} them if it belongs there, or use "
                f"strategy.pipeline_parallel_size=1"
            )
        try:
            shapes = self.twins[name](*map_tensors(_to_meta, args), **map_tensors(_to_meta, kwargs))
        except Exception as error:
            raise ConfigError(
                f"{self.name}: the pipeline cannot find the shape of what {name} gives without its weights "
                f"({' '.join(str(error).split())[:160]}); use strategy.pipeline_parallel_size=1"
            ) from error
        return map_tensors(lambda like: self._nothing(name, like), shapes)

    def _nothing(self, name: str, like: Tensor) -> Tensor:
        """What stands in for a tensor that another stage has."""
        if not like.is_floating_point():
            raise ConfigError(f"{self.name}: {name} gives numbers of {like.dtype}, {NOT_HERE}")
        return absent(like, self.device)

    def _expected(self) -> str:
        if self._next is None or self._next >= len(self.names):
            return "all of them had run"
        return f"{self.names[self._next]} had to run next"


def drop_weights(layer: nn.Module, but: Collection[int]) -> None:
    """Give the memory of a layer's weights and buffers back. `but`: the ids of parameters that are kept."""
    for part in layer.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in but:
                gone = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                keep_attributes(gone, parameter)  # configure_optimizers reads them
                part._parameters[key] = gone
        for key, buffer in part._buffers.items():
            part._buffers[key] = None if buffer is None else buffer.to("meta")


def _needs_gradients(value: Any) -> bool:
    found: list[bool] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(tensor.requires_grad)
        return tensor

    map_tensors(look, value)
    return any(found)


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor).detach().to("meta")


def _on_meta(layer: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    memo: dict[int, Any] = {
        id(t): t.detach().to("meta", dtype if t.is_floating_point() else None)
        if not isinstance(t, nn.Parameter)
        else nn.Parameter(t.detach().to("meta", dtype), t.requires_grad and t.is_floating_point())
        for t in (*layer.parameters(), *layer.buffers())
    }
    return copy.deepcopy(layer, memo).requires_grad_(False)


# Which stage of a pipeline owns which layer.

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


# What stands in the module in place of a layer of another stage.


class Stub(nn.Module):
    """Stands in the place of a layer that does not run. Its only weights are those shared with one that does.

    `shows`: whether who walks through the module's weights is shown stand-ins for those of the layer. A sum over the
    weights that are here alone would pass for one over all.
    """

    def __init__(self, layer: nn.Module, run: Callable[..., Any], shows: Callable[[], bool], device: Any) -> None:
        super().__init__()
        self.__dict__["layer"], self.__dict__["run"] = layer, run
        self.__dict__["_parameters"] = _Weights(layer, shows, device)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["run"](*args, **kwargs)


class _Weights(dict[str, Any]):
    """The weights of a stub, whose `items` every walk through a module's weights goes through."""

    def __init__(self, layer: nn.Module, shows: Callable[[], bool], device: torch.device) -> None:
        super().__init__()
        self._layer, self._shows, self._device = layer, shows, device

    def items(self) -> Any:
        if not self._shows():
            return super().items()
        found: dict[str, Tensor] = {
            name: absent_weight(p, self._device) if p.is_meta else p
            for name, p in self._layer.named_parameters()
            if p.is_floating_point()
        }
        return (found | dict(self)).items()
