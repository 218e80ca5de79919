"""Models of transformers in a module: which there are, and whether ranks can divide the sequences of one."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from shardwise.errors import ConfigError

_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
CHANGES_WITH_LENGTH = ("dynamic", "longrope")  # rope types whose frequencies depend on the longest position
_OWN_MASKS = {"doge"}  # types of models that make their masks from keys
_KERNELS = ("sdpa", "eager")


def hugging_face_models(module: nn.Module) -> dict[str, nn.Module]:
    """The outermost models of transformers in `module`, by name. Where transformers was not imported there are none."""
    if "transformers.modeling_utils" not in sys.modules:
        return {}
    kind = import_module("transformers.modeling_utils").PreTrainedModel
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        if isinstance(part, kind) and not any(name.startswith(f"{outer}.") or outer == "" for outer in found):
            found[name] = part
    return found


def check_divisible(model: Any, rule: str) -> None:
    """Raises `ConfigError` for a model whose positions reach each other in another way than by attention functions.

    `rule`: how a message begins, with the model's name.
    """
    config = model.config
    one_rank = "leave strategy.context_parallel_size out"
    known = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {name for one in known for name in ((one,) if isinstance(one, str) else one)}
    if not any(kind.__name__ in names for kind in type(model).__mro__):
        raise ConfigError(f"{rule} is no causal language model that computes its loss; {one_rank}")
    others = set(getattr(config.get_text_config(), "layer_types", None) or _ATTENTION) - set(_ATTENTION)
    others |= {type(part).__name__ for part in model.modules() if isinstance(part, nn.Conv1d)}
    others |= {config.model_type} & _OWN_MASKS
    if others or not model._supports_attention_backend:
        why = f" ({', '.join(sorted(others))})" if others else ""
        raise ConfigError(
            f"{rule}: its positions reach each other in another way than by transformers' attention functions{why}; "
            f"{one_rank}"
        )
    if getattr(config.get_text_config(), "output_router_logits", False):
        raise ConfigError(
            f"{rule}: output_router_logits=True adds a loss that is no sum over positions; set it to False"
        )
    for part in model.modules():
        kernel = getattr(getattr(part, "config", None), "_attn_implementation", None)
        if kernel is not None and kernel not in _KERNELS:
            raise ConfigError(
                f"{rule} has attn_implementation={kernel!r}, and only {', '.join(_KERNELS)} can compute a part of "
                f"each sequence; load it with attn_implementation='sdpa'"
            )


def same_rotary_positions(config: Any) -> float:
    """The length up to which rotary positions are the same for sequences of any length."""
    given = getattr(config, "rope_parameters", None) or {}
    longest = float("inf")
    for one in (given, *given.values()):
        if isinstance(one, dict) and one.get("rope_type") in CHANGES_WITH_LENGTH:
            longest = min(longest, one.get("original_max_position_embeddings") or config.max_position_embeddings)
    return longest


def positions_follow_padding(model: nn.Module) -> bool:
    """Whether a model has embeddings of positions that it counts by the mask of the padding, such as OPT's."""
    embeddings = (part for part in model.modules() if isinstance(part, nn.Embedding))
    return any("attention_mask" in inspect.signature(part.forward).parameters for part in embeddings)


def of_file(layer: nn.Module, name: str) -> Any:
    """What stands under `name` in the file of a layer's class, or of one that it derives from."""
    files = (sys.modules.get(kind.__module__) for kind in type(layer).__mro__)
    return next((found for file in files if (found := getattr(file, name, None)) is not None), None)


class LossOfWhole:
    """What a divided model gives: its loss, as an attribute or the first of a tuple. Nothing else is whole."""

    def __init__(self, loss: Tensor, rule: str) -> None:
        self.loss, self._rule = loss, rule

    def __getitem__(self, key: Any) -> Tensor:
        if key in (0, "loss"):
            return self.loss
        raise self._refusal(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal(name)

    def _refusal(self, what: Any) -> ConfigError:
        return ConfigError(
            f"{self._rule} gives its loss alone: of {what!r} this rank has a part of each sequence. In validation it "
            f"gives whole logits if it is called without labels"
        )
