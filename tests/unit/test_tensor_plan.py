"""Which layers of a Hugging Face model are divided, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardwise.errors import ConfigError
from shardwise.parallel.tensor_parallel import layers_of
from tests.harness.hugging_face import CausalLM


class Own(nn.Module):
    """A model with a plan, built as those of transformers are: a property of the class."""

    def __init__(self, **plan: str) -> None:
        super().__init__()
        self.config = None
        self.linear, self.embed, self.scale = nn.Linear(4, 4), nn.Embedding(8, 4), nn.Parameter(nn.Linear(1, 4).weight)
        self.plan = plan

    @property
    def tp_plan(self) -> dict[str, str]:
        return self.plan


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_the_plan_of_a_family_names_every_matrix(family: str) -> None:
    module = CausalLM(family)
    layers, follows_plan = layers_of(module, 2)
    assert follows_plan
    matrices = {name for name, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Embedding)}
    assert matrices <= layers.keys()
    norms = {name for name in layers if name.endswith(("q_norm", "k_norm"))}
    assert layers.keys() == matrices | norms and len(norms) == (4 if family == "Qwen3" else 0)


REFUSALS: dict[str, tuple[Any, str]] = {
    "no plan": (
        lambda: gpt2(),
        "GPT2LMHeadModel does not say how .* no Hugging Face model in it that brings",
    ),
    "experts": (lambda: CausalLM("Mixtral"), "which is not supported yet|and only colwise"),
    "heads": (lambda: CausalLM(num_key_value_heads=1), "=2 does not divide num_key_value_heads=1 of LlamaForCausalLM"),
    "made up": (lambda: Own(linear="packed_colwise"), "says 'packed_colwise' of linear, and only colwise, rowwise, "),
    "class": (
        lambda: Own(embed="colwise"),
        "says 'colwise' of embed, which an nn.Linear can be, and it is an Emb",
    ),
    "parameter": (lambda: Own(scale="colwise"), "divides the parameter scale .colwise., which is not supported yet"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_divided_is_refused_by_name(case: str) -> None:
    made, message = REFUSALS[case]
    with pytest.raises(ConfigError, match=message):
        layers_of(made(), 2)
