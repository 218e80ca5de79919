"""Chooses the parameters that Muon has, and makes its groups. Whoever has another optimizer need not import Muon."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

from torch import Tensor, nn

from shardwise.errors import ConfigError

LAYERS = "layers"
MATRICES, OTHERS = "muon", "adamw"  # the algorithms of groups


class Matrices(Protocol):
    """How a function of a whole matrix is computed where a rank may hold a part of it."""

    def rows(self, parameter: Tensor) -> int:
        """The number of rows of the whole matrix."""

    def map(
        self,
        parameters: list[Tensor],
        give: Callable[[Tensor], Tensor],
        function: Callable[[Tensor], Tensor],
        take: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Call `take(parameter, result)` for each parameter, with this rank's rows of `function` of its whole matrix.

        `give` makes this rank's rows of the matrix of a parameter, [rows, columns]. Collective.
        """


def choose_matrices(module: nn.Module, layers: Sequence[nn.Module], which: str | list[str]) -> set[str]:
    """The names of the parameters that Muon has.

    `layers`: those that repeat. `which`: "layers" for the matrices in them, or patterns of names.

    A matrix is a parameter with two dimensions, or the weight of a convolution that mixes all channels. The weight of
    an embedding is none: each of its rows is a vector by itself.

    Raises:
        ConfigError: `which` names no matrix.
    """
    candidates = _matrices(module)
    if which == LAYERS:
        inside = {id(p) for layer in layers for p in layer.parameters()}
        chosen = {name for name, p in candidates.items() if id(p) in inside}
        if not chosen:
            raise ConfigError(
                f"optimizer.matrices=layers: {type(module).__name__} has no matrix in a layer that repeats; name the "
                f"layers, e.g. units=[Block], or the matrices, e.g. optimizer.matrices=['*.weight']"
            )
        return chosen
    if not isinstance(which, list) or not which or not all(isinstance(pattern, str) for pattern in which):
        raise ConfigError(f"optimizer.matrices={which}: must be layers, or a list of patterns of parameters' names")
    for pattern in which:
        if not any(fnmatchcase(name, pattern) for name in candidates):
            raise ConfigError(f"optimizer.matrices: {pattern} is the name of no matrix; there are {_some(candidates)}")
    return {name for name in candidates if any(fnmatchcase(name, pattern) for pattern in which)}


def _matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable matrices, by name."""
    rows_apart = {id(layer.weight) for layer in module.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))}
    kernels = {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and layer.groups == 1
    }
    return {
        name: p
        for name, p in module.named_parameters()
        if p.requires_grad and (p.ndim == 2 or id(p) in kernels) and id(p) not in rows_apart
    }


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "") or "none"


def describe_choice(module: nn.Module, chosen: set[str]) -> str:
    """A line for the user: what Muon has, and which large weights beside it have too many dimensions for it."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    share = sum(trained[name].numel() for name in chosen) / max(sum(p.numel() for p in trained.values()), 1)
    known = _matrices(module)
    stacks = [name for name, p in trained.items() if p.ndim > 2 and p.numel() > max(p.shape) and name not in known]
    names = _some(_kinds(name for name in trained if name in chosen))
    passed = f", weights of 3 and more dimensions among them ({_some(_kinds(stacks))})" if stacks else ""
    return (
        f"optimizer: Muon has {len(chosen):,} {'matrix' if len(chosen) == 1 else 'matrices'}, {share:.1%} of the "
        f"trained parameters ({names}); AdamW has the others{passed}"
    )


def _kinds(names: Iterable[str]) -> list[str]:
    """The names with `*` for the number of a layer, each once."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))


def muon_groups(groups: list[dict[str, Any]], chosen: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Divide each group into one of Muon's and one of AdamW's, those of Muon first."""
    ids = {id(p) for p in chosen}
    made = [
        {**group, "params": [p for p in group["params"] if (id(p) in ids) == is_muon], "algorithm": algorithm}
        for is_muon, algorithm in ((True, MATRICES), (False, OTHERS))
        for group in groups
    ]
    return [group for group in made if group["params"]]
