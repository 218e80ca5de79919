"""Small models of the families that transformers has, divided over two ranks beside the same model in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.parallel.context_hugging_face import divide_models
from shardwise.parallel.context_parallel import ContextParallel
from shardwise.parallel.tensor_parallel import TensorParallel
from tests.harness.hugging_face import IGNORE, loss_in_its_dtype

# What each config has of these is set, so that a model is small and its sliding windows are shorter than a sequence.
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "n_embd": 32, "word_embed_proj_dim": 32, "intermediate_size": 48,
    "ffn_dim": 48, "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 8, "n_head": 8, "head_dim": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "n_positions": 64, "sliding_window": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip


def make(family: str) -> Any:
    """A model of a family, by the type in its config, in fp64: with weights so large that attention matters."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    usual = transformers.AutoConfig.for_model(family)
    sizes = {name: value for name, value in SIZES.items() if hasattr(usual, name)}
    if kinds := list(dict.fromkeys(getattr(usual, "layer_types", None) or ())):  # one layer of each kind
        sizes |= {"layer_types": (kinds * 2)[: max(2, len(kinds))], "num_hidden_layers": max(2, len(kinds))}
    config = transformers.AutoConfig.for_model(family, **sizes)
    config._experts_implementation = "eager"
    model: nn.Module = getattr(transformers, CLASSES[family])(config).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.copy_(noise * 0.25 if p.ndim > 1 else p + noise * 0.05)
    model.loss_function = loss_in_its_dtype  # type: ignore[assignment]
    return model


def batch() -> dict[str, Tensor]:
    """One text is short: behind it is padding, and hardly a label is before."""
    tokens = torch.randint(3, 61, (3, 16), generator=torch.Generator().manual_seed(3))
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    labels[0, 3:], labels[1, 10:], mask[1, 10:] = IGNORE, IGNORE, 0
    positions = torch.arange(16).expand(3, 16).clone()
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask, "position_ids": positions}


def divide(model: Any, axis: str) -> Any:
    """Divide `model` over all ranks. Gives what makes a gradient that of one process."""
    world = dist.group.WORLD
    assert world is not None
    if axis == "tensor":
        tensor = TensorParallel(model, world)
        tensor.wrap(model)
        tensor.cut(model)

        def settle() -> dict[str, Tensor]:
            tensor.sum_gradients(torch.float64)
            return {name: tensor.whole(name, p.grad) for name, p in model.named_parameters() if p.grad is not None}

        return settle
    divide_models(model, ContextParallel(world, by_keys=axis == "keys", tensors=()))

    def mean() -> dict[str, Tensor]:
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for gradient in found.values():
            dist.all_reduce(gradient)
        return {name: gradient / world.size() for name, gradient in found.items()}

    return mean


def off(family: str, axis: str) -> float | str:
    """The largest relative deviation of the loss and of the gradients, or why the family is refused."""
    model = make(family)
    alone = model(**batch(), use_cache=False).loss
    alone.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    try:
        settle = divide(model, axis)
        loss = model(**batch(), use_cache=False).loss
    except ConfigError as error:
        return str(error)
    loss.backward()
    found = settle()
    assert found.keys() == expected.keys()
    numbers = [float((found[name] - whole).norm() / whole.norm().clamp(min=1e-9)) for name, whole in expected.items()]
    return max(abs(float(loss / alone) - 1), *numbers)


def every(axes: dict[str, list[str]]) -> dict[tuple[str, str], float | str]:
    """In each rank."""
    dist.init_process_group("gloo")
    try:
        return {(axis, family): off(family, axis) for axis, families in axes.items() for family in families}
    finally:
        dist.destroy_process_group()
