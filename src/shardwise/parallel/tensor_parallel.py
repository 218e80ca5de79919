"""Tensor parallelism: each rank computes with its part of the weights, and has its part of the sequence in between.

A module says what its layers are (`tensor_parallel_layers` of protocols.py), or a Hugging Face model in it does (see
tensor_plan.py). The weights become plain tensors, each a part of the whole one; strategies shard these parts as they
shard whole weights. Where a pass needs no gradients every rank has the whole sequence, so that a text may have any
length: the same numbers, for more communication.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.distributed.collectives import gather_in_order, sum_over
from shardwise.distributed.dtensor import local_part
from shardwise.distributed.parameters import keep_notes
from shardwise.errors import ConfigError, a_or_an
from shardwise.nn.peers import Between, Peers, share_of
from shardwise.parallel.divided_layers import (
    BY_SAMPLE,
    CLASSES,
    DIVIDES_ACTIVATIONS,
    DIVIDES_VOCABULARY,
    WORDS,
    WRAPPERS,
    divided_dim,
    say_sizes,
    sees_a_part,
)
from shardwise.parallel.own_draws import OwnDraws
from shardwise.parallel.tensor_plan import CheckedCopies, planned_layers
from shardwise.parallel.units import Units
from shardwise.protocols import tensor_parallel_layers_of


@dataclass(frozen=True)
class Cut:
    """Which part of a parameter this rank has: from `start` on along `dim` of a tensor of `shape`."""

    dim: int
    start: int
    shape: tuple[int, ...]


class TensorParallel:
    """The layers of one module that its peers compute together.

    `by_sample`: a module may divide activations by samples (`embedding_by_sample`). Stages of a pipeline do not: one
    without the embedding is not told. `overlaps`: compiled layers exchange beside their products.

    Raises:
        ConfigError: the module does not say what its layers are, or says what they cannot be.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, by_sample: bool = True, overlaps: bool = False
    ) -> None:
        self.module, self.group = module, group
        self._between, self._embedding = Between(), BY_SAMPLE if by_sample else "embedding"
        self.peers = Peers(group.group_name, group.rank(), group.size(), show_dims=overlaps)
        found = find_division(module, self.peers.size)
        self.layers, self.follows_plan, self._seen_in_part = found.layers, found.follows_plan, found.seen_in_part
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.cuts = {  # a parameter's name → its part; one that is not here is whole on every rank
            name: Cut(dim, share_of(shapes[name][dim], self.peers.size, self.peers.rank)[0], shapes[name])
            for name, dim in found.dims.items()
        }
        self._done: set[int] = set()  # ids of layers
        self._copies: CheckedCopies | None = None

    def begin_batch(self) -> None:
        """Before each training step: all of its passes divide the same dim."""
        self._between.begin_batch()

    def wrap(self, part: nn.Module, name: str = "") -> None:
        """Let the layers in `part`, which stands in the module as `name`, exchange what they need. Once for each."""
        for inner, layer in part.named_modules(prefix=name):
            if (word := self.layers.get(inner)) is not None:
                WRAPPERS[self._embedding if word == BY_SAMPLE else word](layer, self.peers, self._between)

    def draw_apart(self, draws: OwnDraws, units: Units) -> None:
        """Let each rank draw its own random numbers where it has a part of the sequence or of the heads."""
        unit_of = {layer: unit for _, unit in units.modules for layer in unit.modules()}
        named = {layer: self.layers.get(name) for name, layer in self.module.named_modules()}
        for first in {unit_of.get(layer, layer): None for layer, word in named.items() if word in DIVIDES_ACTIVATIONS}:
            draws.begin_in(first)
        for head in (layer for layer, word in named.items() if word == "head"):
            part: Any = head.vocabulary_part
            head.vocabulary_part = replace(part, when_whole=draws.leave)

    def cut(self, part: nn.Module) -> None:
        """Replace the weights in `part`, which are whole, by this rank's parts. Layers that are done are left alone."""
        inside, made = {id(layer) for layer in part.modules()}, dict[int, nn.Parameter]()
        for name, layer in self.module.named_modules():
            word = self.layers.get(name)
            if id(layer) not in inside or id(layer) in self._done or divided_dim(word, "weight") is None:
                continue
            self._done.add(id(layer))
            for key, p in layer._parameters.items():
                if p is None or (dim := divided_dim(word, key)) is None:
                    continue
                if id(p) not in made:  # a tied weight is cut once, and stays one
                    made[id(p)] = self._own_part(p, dim)
                layer._parameters[key] = made[id(p)]
            say_sizes(layer, self.peers)

    def _own_part(self, whole: nn.Parameter, dim: int) -> nn.Parameter:
        start, size = share_of(whole.shape[dim], self.peers.size, self.peers.rank)
        part = whole.detach().narrow(dim, start, size).clone(memory_format=torch.contiguous_format)
        return keep_notes(nn.Parameter(part, requires_grad=whole.requires_grad), whole)

    def divided(self) -> Iterator[nn.Parameter]:
        """The parameters of which each peer has its own part."""
        return (p for name, p in self.module.named_parameters() if name in self.cuts)

    def sum_gradients(self, dtype: torch.dtype) -> None:
        """Sum the gradients of whole weights that see a part of the sequence or of the heads, in `dtype`. Collective.

        Once a step, after the last backward pass: all of them at once, since they are few and small.
        """
        if self.follows_plan and self._copies is None:
            others = self.cuts.keys() | self._seen_in_part
            alike = {name: p for name, p in self.module.named_parameters() if name not in others}
            self._copies = CheckedCopies(alike, self.group)
            self._copies.check()
        seen_in_part = [p for name, p in self.module.named_parameters() if name in self._seen_in_part]
        gradients = [local_part(p.grad) for p in seen_in_part if p.grad is not None]
        if gradients:
            flat = sum_over(self.group, torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients]))
            for gradient, whole in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
                gradient.copy_(whole.view(gradient.shape))

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Gather a parameter of which `part` is this rank's. Collective."""
        if (cut := self.cuts.get(name)) is None:
            return part
        shares = [share_of(cut.shape[cut.dim], self.peers.size, rank)[1] for rank in range(self.peers.size)]
        rows = part.movedim(cut.dim, 0)
        padded = torch.cat((rows, rows.new_zeros(shares[0] - len(rows), *rows.shape[1:])))
        parts = gather_in_order(self.group, padded.flatten()).view(self.peers.size, *padded.shape)
        own = [rows[:share] for rows, share in zip(parts, shares, strict=True)]
        return torch.cat(own).movedim(0, cut.dim).contiguous()


@dataclass(frozen=True)
class Division:
    """How the layers of a module are divided. Parameters are named."""

    layers: dict[str, str]  # names of layers → what they are
    follows_plan: bool  # that of a Hugging Face model
    dims: dict[str, int]  # a parameter → along which dim each rank has a part of it
    seen_in_part: set[str]  # whose gradients are of a part of the sequence or of the heads


def divided_layers(layers: dict[str, str]) -> dict[str, int]:
    """The names of layers of whose weight each rank has a part → the dim that is divided."""
    found = {name: divided_dim(word, "weight") for name, word in layers.items()}
    return {name: dim for name, dim in found.items() if dim is not None}


def find_division(module: nn.Module, ranks: int) -> Division:
    """Raises: ConfigError: the module does not say what its layers are, or says what they cannot be."""
    layers, follows_plan = layers_of(module, ranks)
    names = {id(p): name for name, p in module.named_parameters()}
    owners: dict[int, list[tuple[str, str]]] = {}  # a parameter's id → its layers and their words
    dims, seen_in_part = dict[str, int](), set[str]()
    for name, layer in module.named_modules():
        word = layers.get(name, "")
        for key, p in layer._parameters.items():
            if p is None:
                continue
            owners.setdefault(id(p), []).append((name, word if key == "weight" else f"{word} {key}"))
            if sees_a_part(word, key):
                seen_in_part.add(names[id(p)])
            elif (dim := divided_dim(word, key)) is not None:
                _check_size(module, names[id(p)], word, p.shape[dim], dim, ranks)
                dims[names[id(p)]] = dim
    _check_owners(module, owners, names, follows_plan)
    return Division(layers, follows_plan, dims, seen_in_part)


def _check_size(module: nn.Module, name: str, word: str, size: int, dim: int, ranks: int) -> None:
    if size < ranks or (size % ranks and word not in DIVIDES_VOCABULARY):
        raise ConfigError(
            f"strategy.tensor_parallel_size={ranks} does not divide the {size} {('rows', 'columns')[dim]} of {name}, "
            f"which {type(module).__name__} calls {word!r}; use a divisor of {size}"
        )


def layers_of(module: nn.Module, ranks: int) -> tuple[dict[str, str], bool]:
    """The names of layers → what they are, and whether that is the plan of a Hugging Face model.

    Raises:
        ConfigError: neither the module nor a model in it says what its layers are, or a layer cannot be that.
    """
    if declared := declared_layers(module):
        return declared, False
    if planned := planned_layers(module, ranks):
        return planned, True
    raise ConfigError(
        f"strategy.tensor_parallel_size: {type(module).__name__} does not say how its layers are divided, and there is "
        f"no Hugging Face model in it that brings a tp_plan; add tensor_parallel_layers (recipes/README.md has an "
        f"example), or leave it out"
    )


def declared_layers(module: nn.Module) -> dict[str, str]:
    """The names of layers → what they are, as `module` and its parts declare it.

    Raises:
        ConfigError: a declaration means no layer, or one of another class.
    """
    found: dict[str, str] = {}
    names = [name for name, _ in module.named_modules()]
    for prefix, owner in module.named_modules():
        for pattern, word in (tensor_parallel_layers_of(owner) or {}).items():
            where = f"{type(owner).__name__}.tensor_parallel_layers"
            if word not in WORDS:
                raise ConfigError(f"{where}: {pattern!r} is {word!r}, which must be one of {', '.join(WORDS)}")
            of = re.compile(re.escape(f"{prefix}.{pattern}".strip(".")).replace(r"\*", r"[^.]+"))
            matches = [name for name in names if of.fullmatch(name)]
            if not matches:
                raise ConfigError(f"{where}: no layer is named {pattern!r}; a * stands for one part of a name")
            for name in matches:
                layer = module.get_submodule(name)
                if not isinstance(layer, CLASSES.get(word, nn.Module)):
                    raise ConfigError(
                        f"{where}: {name} is {word!r}, which an nn.{CLASSES[word].__name__} can be, and it is "
                        f"{a_or_an(type(layer).__name__)}"
                    )
                found[name] = word
    embeddings = [name for name, word in found.items() if word in ("embedding", BY_SAMPLE)]
    if len(embeddings) > 1 and BY_SAMPLE in found.values():
        raise ConfigError(
            f"tensor_parallel_layers: {' and '.join(embeddings)} are embeddings, and a module with {BY_SAMPLE!r} has "
            f"one; call them all 'embedding'"
        )
    return found


def _check_owners(
    module: nn.Module, owners: dict[int, list[tuple[str, str]]], names: dict[int, str], follows_plan: bool
) -> None:
    """Refuse weights of which nothing is said: their gradients would differ between the peers in silence."""
    for of, sites in owners.items():
        layer, word = sites[0]
        if not follows_plan and (not word.strip() or word.startswith("gather")):
            raise ConfigError(
                f"{type(module).__name__}.tensor_parallel_layers says nothing of {layer or 'the module'}, which owns "
                f"{names[of]}: name it, 'norm' for a layer with whole weights that sees a part of the sequence"
            )
        dims = {divided_dim(word, key or "weight") for word, _, key in (word.partition(" ") for _, word in sites)}
        if len(dims) > 1:
            tied = " and ".join(f"{layer} ({word})" for layer, word in sites)
            raise ConfigError(f"tensor_parallel_layers: {tied} share a weight, and are divided in different ways")
