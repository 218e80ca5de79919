"""Tensor parallelism: each rank computes with its part of the weights, and has its part of the sequence in between.

A module says what its layers are (`tensor_parallel_layers` of protocols.py), or a Hugging Face model in it does (see
tensor_plan.py). The weights become plain tensors, each a part of the whole one; strategies shard these parts as they
shard whole weights. Where a pass needs no gradients every rank has the whole sequence, so that a text may have any
length: the same numbers, for more communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.distributed.dtensor import local_part
from shardwise.distributed.mesh import gather_in_order, sum_over
from shardwise.distributed.parameters import keep_notes
from shardwise.distributed.rng import OwnDraws
from shardwise.errors import ConfigError
from shardwise.nn.peers import Between, Peers, share_of
from shardwise.parallel.tensor_layers import (
    BY_SAMPLE,
    DIVIDES_ACTIVATIONS,
    DIVIDES_VOCABULARY,
    WRAPPERS,
    check_layers,
    divided_dim,
    say_sizes,
    sees_a_part,
    withhold_inputs,
)
from shardwise.parallel.tensor_plan import (
    CheckedCopies,
    Owners,
    check_packed,
    check_said,
    declared_layers,
    planned_layers,
)
from shardwise.parallel.units import Units

# In torch's errors about shapes
_SHAPES = ("size of tensor", "unflatten", "cannot be multiplied", "invalid for input of size", "Expected size")


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
        self._layers_are_checked = self._loss_is_checked = False

    def begin_batch(self) -> None:
        """Before each training step: all of its passes divide the same dim.

        Raises:
            ConfigError: a layer was changed after set-up, or has a hook that would see a part of something.
        """
        if not self._layers_are_checked:
            self._layers_are_checked = True
            check_layers(self.module, self.layers, self.peers.size, are_wrapped=True)
            for name, layer in self.module.named_modules():
                withhold_inputs(layer, name, self.layers.get(name, ""))
        self._between.begin_batch()

    def check_loss(self, loss: Tensor) -> None:
        """Compare the loss of the run's first pass among the ranks, which have the same samples. Collective.

        Raises:
            ConfigError: it is not the same on all of them, so that it was computed from a part of something.
        """
        if self._loss_is_checked:
            return
        self._loss_is_checked = True
        found = gather_in_order(self.group, loss.detach().float().reshape(1)).nan_to_num().tolist()
        largest, difference = max(map(abs, found)), max(found) - min(found)
        if difference > 1e-5 * largest:
            raise ConfigError(
                f"strategy.tensor_parallel_size={self.peers.size}: ranks with the same samples have found losses that "
                f"differ by {difference / largest:.2g} of their size. The step computes with a part of something: "
                f"hidden states, of which a rank has some positions, or the weight of an embedding or a head, of which "
                f"it has some rows. Compute with logits, which are whole, and let weight_decay hold weights down; or "
                f"leave strategy.tensor_parallel_size out"
            )

    def explain(self, error: RuntimeError) -> None:
        """Add to an error about shapes what shapes a rank has."""
        if any(sign in str(error) for sign in _SHAPES):
            error.add_note(
                f"strategy.tensor_parallel_size={self.peers.size}: a rank has 1/{self.peers.size} of the outputs of "
                f"column layers and of the positions between layers. Do heads and key heads divide by it, has each "
                f"layer the word that it is in tensor_parallel_layers, and does nothing else count whole sizes?"
            )

    def wrap(self, part: nn.Module, name: str = "") -> None:
        """Let the layers in `part`, which stands in the module as `name`, exchange what they need. Once for each."""
        for inner, layer in part.named_modules(prefix=name):
            if (word := self.layers.get(inner)) is not None:
                WRAPPERS[self._embedding if word == BY_SAMPLE else word](layer, self.peers, self._between)
                withhold_inputs(layer, inner, word)

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
    check_layers(module, layers, ranks)
    names = {id(p): name for name, p in module.named_parameters()}
    owners: Owners = {}
    dims, seen_in_part = dict[str, int](), set[str]()
    for name, layer in module.named_modules():
        word = layers.get(name, "")
        for key, p in layer._parameters.items():
            if p is None:
                continue
            owners.setdefault(id(p), []).append((name, word, key))
            if sees_a_part(word, key):
                seen_in_part.add(names[id(p)])
            elif (dim := divided_dim(word, key)) is not None:
                _check_size(module, names[id(p)], word, p.shape[dim], dim, ranks)
                dims[names[id(p)]] = dim
    if not follows_plan:
        check_said(module, owners, names)
        check_packed(module, layers)
    _check_tied(owners)
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


def _check_tied(owners: Owners) -> None:
    """Refuse a weight that its layers divide in different ways."""
    for sites in owners.values():
        if len({divided_dim(word, key) for _, word, key in sites}) > 1:
            tied = " and ".join(f"{layer} ({word})" for layer, word, _ in sites)
            raise ConfigError(f"tensor_parallel_layers: {tied} share a weight, and are divided in different ways")
