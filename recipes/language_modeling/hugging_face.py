"""Maps our names of weights to Hugging Face's: `LlamaForCausalLM` is the same model with other names.

Both have the same rotary layout, two halves, so that no row is permuted.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from recipes.language_modeling.model import Transformer
from shardwise.errors import ConfigError

_TRANSFORMER = f"{Transformer.__module__}.{Transformer.__qualname__}"

_OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}

_INSIDE = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def names(node: Mapping[str, Any]) -> dict[str, str]:
    """Map the names of the module's parameters to theirs. A tied head is left out, since it is the embedding."""
    sizes = _arguments(node)
    outside = {ours: theirs for ours, theirs in _OUTSIDE.items() if not (ours == "head" and sizes["tie_embeddings"])}
    inside = {
        f"blocks.{i}.{ours}": f"model.layers.{i}.{theirs}"
        for i in range(sizes["n_layers"])
        for ours, theirs in _INSIDE.items()
    }
    return {f"model.{ours}.weight": f"{theirs}.weight" for ours, theirs in (outside | inside).items()}


def config(node: Mapping[str, Any]) -> dict[str, Any]:
    """Make config.json with keys that every version of transformers reads. There are no begin and end tokens."""
    sizes = _arguments(node)
    scaling = sizes["rope_scaling"]
    if scaling is not None:
        length = "original_max_position_embeddings"
        scaling = {"rope_type": "llama3", **scaling, length: int(scaling[length])}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes["vocab_size"],
        "hidden_size": sizes["dim"],
        "intermediate_size": sizes["ffn_dim"],
        "num_hidden_layers": sizes["n_layers"],
        "num_attention_heads": sizes["n_heads"],
        "num_key_value_heads": sizes["n_kv_heads"],
        "head_dim": sizes["dim"] // sizes["n_heads"],
        "max_position_embeddings": sizes["max_seq_len"],
        "rms_norm_eps": sizes["norm_eps"],
        "rope_theta": sizes["rope_theta"],
        "rope_scaling": scaling,
        "tie_word_embeddings": sizes["tie_embeddings"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the Transformer in `node`, the module's part of the Plan, with its defaults."""
    model = dict(node["model"])
    if (target := model.pop("_target_", None)) != _TRANSFORMER:
        raise ConfigError(f"module.model._target_={target}: Hugging Face's names are known of {_TRANSFORMER} alone")
    bound = inspect.signature(Transformer).bind(**model)
    bound.apply_defaults()
    return dict(bound.arguments)
