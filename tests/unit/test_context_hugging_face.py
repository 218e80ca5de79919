"""Which models of Hugging Face can compute a part of each sequence, and what a call of them may be given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.parallel.context_hugging_face import divide_models
from shardwise.parallel.context_parallel import ContextParallel
from shardwise.parallel.hugging_face_models import LossOfWhole, hugging_face_models
from tests.harness.hugging_face import SIZES, CausalLM

TOKENS = torch.arange(24).view(2, 12)


def parts(by_keys: bool = True) -> ContextParallel:
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, group_name="made up")
    return ContextParallel(group, by_keys=by_keys, tensors=())


@pytest.fixture
def divided() -> Iterator[Callable[..., Any]]:
    """Gives a model whose sequences two ranks divide."""
    undo = []

    def divide(module: nn.Module) -> nn.Module:
        undo.append(divide_models(module, parts()))
        return module

    yield divide
    for put_back in undo:
        put_back()


def made(family: str, suffix: str = "ForCausalLM", **more: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES | more)
    model: nn.Module = getattr(transformers, f"{family}{suffix}")(config)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no head": (lambda: made("Llama", "Model"), "LlamaModel is no causal language model that computes its loss"),
    "another task": (lambda: made("Llama", "ForSequenceClassification"), "is no causal language model"),
    "recurrent": (lambda: made("Mamba"), "MambaForCausalLM: its positions reach each other in another way than by"),
    "of both kinds": (
        lambda: made("Lfm2", layer_types=["conv", "full_attention"]),
        r"Lfm2ForCausalLM: its positions .* attention functions \(Conv1d, conv\)",
    ),
    "routers' loss": (lambda: made("Mixtral", output_router_logits=True), "output_router_logits=True adds a loss"),
    "kernel": (lambda: made("Llama", attn_implementation="flex_attention"), "'flex_attention', and only sdpa, eager"),
    "bidirectional": (lambda: made("Bert", "LMHeadModel"), "asks for a mask that is not causal"),
    "loss": (lambda: with_loss(lambda logits, labels, vocab_size: logits.mean()), "takes no num_items_in_batch and no"),
    "rotary positions": (
        lambda: made("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=8),
        "sequences of 12 positions, and its rotary positions are others beyond 8 .dynamic, longrope.",
    ),
}  # fmt: skip


def with_loss(loss: Any) -> nn.Module:
    model: Any = made("Llama")
    model.loss_function = loss
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_divided_is_refused_by_name(case: str, divided: Callable[..., Any]) -> None:
    make, message = MODELS[case]
    with pytest.raises(ConfigError, match=f"strategy.context_parallel_size=2: {message}|{message}"):
        divided(make())(input_ids=TOKENS, labels=TOKENS)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"input_ids": TOKENS}, "called without labels where gradients are needed"),
    "embeddings": ({"inputs_embeds": torch.ones(2, 12, 32), "labels": TOKENS}, "was given inputs_embeds: of a call"),
    "some logits": ({"input_ids": TOKENS, "labels": TOKENS, "logits_to_keep": 1}, "was given logits_to_keep: of a"),
    "another mask": (
        {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": torch.ones(2, 1, 12, 12)},
        r"attention_mask has the shape \(2, 1, 12, 12\), and input_ids \(2, 12\)",
    ),
    "an odd length": (
        {"input_ids": TOKENS[:, :11], "labels": TOKENS[:, :11]},
        "sequences of 11 positions, which 2 ranks cannot divide equally; pad them to a multiple of 2",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_cannot_be_divided_is_refused(case: str, divided: Callable[..., Any]) -> None:
    arguments, message = CALLS[case]
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM.*{message}"):
        divided(made("Llama"))(**arguments)


def test_a_model_inside_is_not_called_by_itself(divided: Callable[..., Any]) -> None:
    model: Any = divided(made("Llama"))
    for mask in (None, torch.ones_like(TOKENS)):
        with pytest.raises(ConfigError, match="LlamaForCausalLM is not called itself, but a model inside it"):
            model.model(input_ids=TOKENS, attention_mask=mask)


def test_nothing_but_the_loss_of_a_part_can_be_looked_at() -> None:
    output, loss = LossOfWhole(torch.ones(()), "a rule"), torch.ones(())
    assert output.loss == output["loss"] == output[0] == loss
    for look in (lambda: output.logits, lambda: output["logits"], lambda: output[1], lambda: tuple(output)):
        with pytest.raises(ConfigError, match="a rule gives its loss alone: of .* this rank has a part"):
            look()


def test_the_outermost_models_are_found_and_are_as_before_in_the_end() -> None:
    module: Any = CausalLM("Llama")
    assert list(hugging_face_models(module)) == ["lm"] and not hugging_face_models(nn.Linear(2, 2))
    before = module.lm.forward, module.lm.loss_function
    put_back = divide_models(module, parts())
    assert module.lm.config._attn_implementation.startswith("shardwise")
    put_back()
    assert (module.lm.forward, module.lm.loss_function) == before and module.lm.config._attn_implementation == "sdpa"
    module.lm(input_ids=TOKENS, labels=TOKENS).loss.backward()
