"""What a module says of its layers for tensor parallelism, `tensor_parallel_layers` of protocols.py, and mistakes."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from shardwise.errors import ConfigError, a_or_an
from shardwise.parallel.divided_layers import BY_SAMPLE, CLASSES, WORDS
from shardwise.protocols import optional

# A parameter's id → the layers that own it: name, word, and the parameter's name there
Owners = dict[int, list[tuple[str, str, str]]]


def declared_layers(module: nn.Module) -> dict[str, str]:
    """The names of layers → what they are, as `module` and its parts declare it.

    Raises:
        ConfigError: a declaration means no layer, or one of another class.
    """
    found: dict[str, str] = {}
    names = [name for name, _ in module.named_modules()]
    for prefix, owner in module.named_modules():
        for pattern, word in (optional(owner, "tensor_parallel_layers") or {}).items():
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


def check_said(module: nn.Module, owners: Owners, names: dict[int, str]) -> None:
    """Refuse parameters of which nothing is said: their gradients would differ between the peers in silence.

    `names`: a parameter's id → its name.

    Raises:
        ConfigError
    """
    for of, sites in owners.items():
        for layer, word, _ in sites:
            if word == "gather":
                raise ConfigError(
                    f"{type(module).__name__}.tensor_parallel_layers: {layer} is 'gather' and owns {names[of]}, which "
                    f"sees some of the heads: move it into a layer of its own inside {layer}, and call that 'norm'"
                )
            if not word:
                raise ConfigError(
                    f"{type(module).__name__}.tensor_parallel_layers says nothing of {layer or 'the module'}, which "
                    f"owns {names[of]}: name it, 'norm' for a layer with whole weights that sees a part of the sequence"
                )


def check_packed(module: nn.Module, layers: dict[str, str]) -> None:
    """Refuse several matrices in one, such as query, key and value: a rank would have some of them and not others.

    Raises:
        ConfigError
    """
    for name in (name for name, word in layers.items() if word == "gather"):
        inside = {inner: layers[inner] for inner in layers if inner.startswith(f"{name}.")}
        linear: dict[str, Any] = {inner: module.get_submodule(inner) for inner in inside}
        takes = max((linear[inner].in_features for inner, word in inside.items() if word == "row"), default=None)
        for inner, word in inside.items():
            if takes is not None and word == "column" and linear[inner].out_features > takes:
                raise ConfigError(
                    f"tensor_parallel_layers: {inner} is 'column' and has {linear[inner].out_features} outputs, and "
                    f"the 'row' behind it takes {takes}: if these are several matrices in one (query, key and value), "
                    f"a rank would have all of one and nothing of another. Make each an nn.Linear of its own. If what "
                    f"belongs together lies side by side (query, key and value of one head), call it "
                    f"'column_in_groups'"
                )
