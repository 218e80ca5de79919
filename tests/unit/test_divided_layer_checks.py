"""Layers that the tensor axis divides are torch's own, and no hook on them sees a part of something."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.precision import cast_forward
from shardwise.parallel.tensor_layers import check_layers, withhold_inputs
from shardwise.parallel.tensor_parallel import find_division
from tests.harness.hugging_face import CausalLM

LAYER = "lm.model.layers.1."


class Rounded(nn.Linear):
    """Multiplies with a rounded weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight * 8).round() / 8)


class Called(nn.Linear):
    """Does something of its own around its forward."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2  # type: ignore[no-any-return]


class Named(nn.Linear):
    """Computes what nn.Linear does."""


class Scaled(nn.Embedding):
    """Multiplies by the largest number of its table."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.weight.max()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out


class Declared(nn.Module):
    tensor_parallel_layers = {
        "embedding": "embedding", "norm": "norm", "mlp": "gather", "mlp.up": "column", "mlp.down": "row", "head": "head"
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.mlp = nn.Embedding(12, 8), nn.LayerNorm(8), Mlp()
        self.head = nn.Linear(8, 12)


def becomes(kind: type[nn.Module]) -> Callable[[nn.Module], None]:
    return lambda layer: setattr(layer, "__class__", kind)


def look(*_: Any) -> None:
    """A hook."""


def replace_forward(layer: nn.Module) -> None:
    forward = layer.forward
    layer.forward = functools.wraps(forward)(lambda x: forward(x).tanh())


WAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "class": (becomes(Rounded), r"\(Rounded\) has a forward of its own, "),
    "call": (becomes(Called), r"\(Called\) has a forward of its own, "),
    "instance": (replace_forward, r"\(Linear\) has had its forward replaced, "),
    "compiled": (
        lambda m: setattr(m, "forward", torch.compile(lambda x: x, backend="eager")),
        "has had its forward replaced, ",
    ),
    "parameter": (lambda m: m.register_parameter("A", nn.Parameter(torch.ones(4))), "owns A besides a weight and a "),
    "buffer": (lambda m: m.register_buffer("seen", torch.zeros(())), "owns seen besides a weight and a bias, "),
    "layer": (lambda m: m.add_module("adapter", nn.Linear(4, 4)), "owns adapter besides a weight and a bias, "),
    "parametrization": (torch.nn.utils.parametrizations.spectral_norm, "is parametrized "),
    "older weight norm": (torch.nn.utils.spectral_norm, "has no weight that is a parameter, "),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["self_attn.q_proj", "mlp.down_proj"])
def test_a_divided_layer_that_computes_in_its_own_way_is_refused_by_name(way: str, place: str) -> None:
    module = CausalLM()
    change, message = WAYS[way]
    change(module.get_submodule(LAYER + place))
    remedy = "a layer of its own that is not divided, or use strategy.tensor_parallel_size=1$"
    with pytest.raises(ConfigError, match=f"^strategy.tensor_parallel_size=2: {LAYER}{place} .*{message}.* {remedy}"):
        find_division(module, 2)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("embedding", becomes(Scaled), "embedding .Scaled. has a forward of its own, .* of a plain nn.Embedding is"),
        ("mlp.up", becomes(Rounded), "mlp.up .Rounded. has a forward of its own, .*'column'"),
        ("head", becomes(Rounded), "head .Rounded. has a forward of its own"),
    ],
)
def test_so_is_one_of_a_declaration(name: str, change: Callable[[nn.Module], None], message: str) -> None:
    module = Declared()
    find_division(module, 2)
    change(module.get_submodule(name))
    with pytest.raises(ConfigError, match=message):
        find_division(module, 2)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Olmo2", "Phi3", "Cohere"])
def test_the_classes_of_transformers_are_known(family: str) -> None:
    more = {"pad_token_id": 0} if family in ("Phi3", "Cohere") else {}
    assert find_division(CausalLM(family, **more), 2).dims


def test_a_subclass_that_changes_nothing_is_known() -> None:
    module = CausalLM()
    becomes(Named)(module.get_submodule(f"{LAYER}mlp.down_proj"))
    assert find_division(module, 2).dims


HOOKS = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")
BEFORE, BEHIND, BACK = HOOKS[0], HOOKS[1], HOOKS[3]
REFUSED = {  # a layer → the hooks on it that would see a part
    "mlp.down_proj": (BEFORE, BACK),
    "mlp.up_proj": (BEHIND, "full_backward_pre_hook", BACK),
    "mlp.act_fn": HOOKS,
    "self_attn.q_norm": HOOKS,
    "self_attn": (),
    "mlp": (),
    "input_layernorm": (),
}
DECLARED = {
    "embedding": HOOKS[1:], "norm": HOOKS, "mlp": HOOKS, "mlp.act": HOOKS, "mlp.up": HOOKS[1:], "mlp.down": HOOKS,
    "head": (BEFORE, BACK), "": (),
}  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("place", REFUSED)
def test_a_hook_that_sees_a_part_is_refused(place: str, hook: str) -> None:
    check_hook(CausalLM("Qwen3"), LAYER + place, hook, hook in REFUSED[place])


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("place", DECLARED)
def test_so_is_one_beside_a_declaration(place: str, hook: str) -> None:
    check_hook(Declared(), place, hook, hook in DECLARED[place])


def check_hook(module: nn.Module, name: str, hook: str, is_refused: bool) -> None:
    getattr(module.get_submodule(name), f"register_{hook}")(look)
    if is_refused:
        what = hook.removeprefix("full_").replace("_pre_hook", " pre-hook").replace("_hook", " hook")
        with pytest.raises(ConfigError, match=rf"=2: {name} .* has a {what} \(look\), which would see a rank's part"):
            find_division(module, 2)
    else:
        find_division(module, 2)


def test_a_hook_behind_a_row_layer_sees_its_output_and_not_its_input() -> None:
    seen: list[Tensor] = []
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda _, inputs, output: seen.append(output))
    withhold_inputs(layer, "mlp.down_proj", "rowwise")
    assert layer(torch.ones(4)) is seen[0]
    for looks in (lambda x: x[0], lambda x: len(x), lambda x: [*x]):
        layer = nn.Linear(4, 4)
        layer.register_forward_hook(lambda _, inputs, output, looks=looks: looks(inputs))
        withhold_inputs(layer, "mlp.down_proj", "rowwise")
        with pytest.raises(ConfigError, match=r"hook on mlp.down_proj looks at its input, of which a rank has a part"):
            layer(torch.ones(4))


def test_what_strategies_put_on_layers_later_is_not_refused() -> None:
    module = Declared()
    layers = find_division(module, 2).layers
    wrapped: Any = functools.partial(parallelize, module)
    for layer in module.modules():
        layer.register_forward_pre_hook(wrapped)
    cast_forward(module.mlp.up, torch.float32, [], cast_inputs=False)  # keeps the names of what it wraps
    module.mlp.down.forward = wrapped
    check_layers(module, layers, 2, are_wrapped=True)
    module.mlp.up.forward = look
    with pytest.raises(ConfigError, match="mlp.up .Linear. has had its forward replaced"):
        check_layers(module, layers, 2, are_wrapped=True)
