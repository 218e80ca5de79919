"""Context parallelism for causal language models of Hugging Face, which stay as they are.

Every rank is given whole batches. A model's `forward` is replaced by one that hands it this rank's part of the
positions, with labels that were shifted before the cut; its attention reaches other ranks' positions as
parallel/context_parallel.py says, with the masks of whole sequences; and its loss is that of whole sequences on every
rank. Transformers asks for attention and masks by a name in the model's config: both are registered under a name of
ours, and hand on to what the config has named before.

A call without labels and without gradients, as in `generate`, computes whole sequences on every rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError, class_name
from shardwise.parallel.context_parallel import ContextParallel, sum_losses
from shardwise.parallel.hugging_face_models import (
    CHANGES_WITH_LENGTH,
    LossOfWhole,
    check_divisible,
    hugging_face_models,
    of_file,
    positions_follow_padding,
    same_rotary_positions,
)

_NAME = "shardwise_context"
_KNOWS = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch", "use_cache",
          "return_dict")  # fmt: skip
_IGNORE = -100  # transformers' label of what is not predicted


def divide_models(module: nn.Module, parts: ContextParallel) -> Callable[[], None]:
    """Let each rank compute a part of the sequences that the Hugging Face models in `module` are given.

    Returns:
        What lets them compute whole sequences again.

    Raises:
        ConfigError: a model's positions reach each other in another way than by transformers' attention functions.
    """
    divided = [_Divided(model, parts) for model in hugging_face_models(module).values()]

    def put_back() -> None:
        for one in divided:
            one.put_back()

    return put_back


class _Divided:
    """One model whose sequences are divided."""

    def __init__(self, model: Any, parts: ContextParallel) -> None:
        self.model, self.parts, self.name = model, parts, class_name(model)
        self.rule = f"strategy.context_parallel_size={parts.ranks}: {self.name}"
        check_divisible(model, self.rule)
        self._forward, self._signature = model.forward, inspect.signature(model.forward)
        self._more = [p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        self._own_loss = model.loss_function
        missing = {"shift_labels", "num_items_in_batch"} - inspect.signature(self._own_loss).parameters.keys()
        if missing:
            raise ConfigError(
                f"{self.rule}: its loss_function takes no {' and no '.join(sorted(missing))}, so that it cannot be "
                f"computed on a part of each sequence; take both, as transformers' ForCausalLMLoss does"
            )
        self._longest = same_rotary_positions(model.config.get_text_config())
        self._divides = True  # whether a call computes parts
        self._is_called = False  # whether such a call is under way
        self._padding: Tensor | None = None  # the mask [B, T] that the user has given to the present call
        self._packed: tuple[Tensor, Tensor] | None = None  # its whole positions, and the number of each one's document
        self._whole, self._shifted, self._count = 0, torch.empty(0), torch.empty(0)
        self._losses = 0  # how often this call has asked for a loss
        self._kernels: dict[int, tuple[Any, str]] = {}  # a config's id → the config, and what it has named
        self._register()

    def _register(self) -> None:
        attention = import_module("transformers.modeling_utils").AttentionInterface
        masks = import_module("transformers.masking_utils").AttentionMaskInterface
        key = f"{_NAME}_{id(self)}"
        attention.register(key, self._attend)
        masks.register(key, self._make_mask)
        self._registered = attention, masks, key
        for part in self.model.modules():
            config = getattr(part, "config", None)
            kernel = getattr(config, "_attn_implementation", None)
            if kernel is not None and id(config) not in self._kernels:
                self._kernels[id(config)] = config, kernel
        for part in self.model.modules():
            interface, config = of_file(part, "ALL_ATTENTION_FUNCTIONS"), getattr(part, "config", None)
            if interface is not None and id(config) in self._kernels:
                _, kernel = self._kernels[id(config)]
                part.whole_attention = interface.get_interface(kernel, of_file(part, "eager_attention_forward"))
                part.is_eager = kernel == "eager"
        for config, _ in self._kernels.values():
            config._attn_implementation = key
        self.model.loss_function = self._loss

        @functools.wraps(self._forward)  # `generate` reads its arguments
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        self.model.forward = forward

    @property
    def _kernel(self) -> str:
        _, kernel = self._kernels[id(self.model.config)]
        return kernel

    def put_back(self) -> None:
        for config, kernel in self._kernels.values():
            config._attn_implementation = kernel
        attention, masks, key = self._registered
        for interface in (attention, masks):
            interface._global_mapping.pop(key, None)
        self.model.forward, self.model.loss_function = self._forward, self._own_loss

    # A call of the model

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs).arguments
        for more in self._more:
            bound |= bound.pop(more, {})
        given = {name: value for name, value in bound.items() if value is not None}
        if "labels" not in given and "shift_labels" not in given and not torch.is_grad_enabled():
            with self._computing_whole():
                return self._forward(*args, **kwargs)
        self._is_called = True
        try:
            output = self._forward(**self._part_of(given))
        finally:
            self._is_called = False
        if self._losses != 1:
            raise ConfigError(
                f"{self.rule} computes its loss in another way than by its loss_function; leave "
                f"strategy.context_parallel_size out"
            )
        return LossOfWhole(output[0], self.rule)

    @contextmanager
    def _computing_whole(self) -> Iterator[None]:
        self._divides = False
        try:
            yield
        finally:
            self._divides = True

    def _part_of(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments for this rank's part."""
        ranks, tokens = self.parts.ranks, given.get("input_ids")
        if "labels" not in given and "shift_labels" not in given:
            raise ConfigError(
                f"{self.rule} was called without labels where gradients are needed: this rank would have the logits of "
                f"a part of each sequence; give it labels, and it gives the loss"
            )
        unknown = [name for name, value in given.items() if name not in _KNOWS and (isinstance(value, Tensor) or value)]
        if unknown or not isinstance(tokens, Tensor) or tokens.ndim != 2:
            raise ConfigError(
                f"{self.rule} was given {', '.join(unknown) or 'no input_ids'}: of a call with labels it divides "
                f"input_ids, attention_mask, position_ids and labels alone; leave the others out"
            )
        self._whole = whole = tokens.shape[1]
        if whole % ranks:
            raise ConfigError(
                f"{self.rule}: sequences of {whole} positions, which {ranks} ranks cannot divide equally; pad them to "
                f"a multiple of {ranks} (pad_to_multiple_of={ranks} of transformers' collators)"
            )
        if whole > self._longest:
            raise ConfigError(
                f"{self.rule}: sequences of {whole} positions, and its rotary positions are others beyond "
                f"{self._longest} ({', '.join(CHANGES_WITH_LENGTH)}): ranks would disagree; give shorter sequences"
            )
        self._padding = given.get("attention_mask")
        if self._padding is not None and self._padding.shape != tokens.shape:
            raise ConfigError(
                f"{self.rule}: attention_mask has the shape {tuple(self._padding.shape)}, and input_ids "
                f"{tuple(tokens.shape)}: only a mask of the padding, of the same shape, can be divided"
            )
        positions = given.get("position_ids")
        if positions is None and self._padding is not None and positions_follow_padding(self.model):
            raise ConfigError(
                f"{self.rule} makes its positions from attention_mask, which are not known of a part; give "
                f"position_ids, too"
            )
        self._packed = None
        if positions is None:
            positions = torch.arange(whole, device=tokens.device).unsqueeze(0)
        elif self._padding is None and not given.get("use_cache", self.model.config.use_cache):  # as transformers does
            documents = import_module("transformers.masking_utils").find_packed_sequence_indices(positions)
            self._packed = None if documents is None else (positions.expand_as(tokens), documents.expand_as(tokens))
        self._shifted = given.get("shift_labels")  # type: ignore[assignment]
        if self._shifted is None:
            self._shifted = F.pad(given["labels"], (0, 1), value=_IGNORE)[:, 1:]
        self._count = given.get("num_items_in_batch", (self._shifted != _IGNORE).sum())
        self._losses = 0
        mask = torch.ones_like(tokens, dtype=torch.bool) if self._padding is None else self._padding
        own = self.parts.own
        return {
            "input_ids": own(tokens, 1), "position_ids": own(positions, 1), "labels": own(self._shifted, 1),
            "attention_mask": mask,  # whole: from its length masks have theirs
            "use_cache": False,
        }  # fmt: skip

    def _loss(self, logits: Tensor, labels: Tensor, vocab_size: int | None = None, **more: Any) -> Tensor:
        """The model's loss of whole sequences, from the logits of a part."""
        if not self._divides:
            return self._own_loss(logits, labels, vocab_size, **more)  # type: ignore[no-any-return]
        if logits.shape[:2] != labels.shape or self._whole != labels.shape[1] * self.parts.ranks:
            raise ConfigError(f"{self.rule} shifts its labels itself; leave strategy.context_parallel_size out")
        self._losses += 1
        more |= {"shift_labels": labels, "num_items_in_batch": self._count}
        return sum_losses(self._own_loss(logits, labels, vocab_size, **more), self.parts)

    # Attention

    def _make_mask(self, **asked: Any) -> Tensor | None:
        """What `create_causal_mask` and its like give: a mask of whole sequences, or of this rank's rows of them."""
        module = import_module("transformers.masking_utils")
        if not self._divides:
            make = module.AttentionMaskInterface()[self._kernel]
            return make(**asked)  # type: ignore[no-any-return]
        if not self._is_called:
            raise ConfigError(
                f"{self.rule} is not called itself, but a model inside it, whose results would be of a part of each "
                f"sequence; call it with labels, or leave strategy.context_parallel_size out"
            )
        if "allow_is_bidirectional_skip" in asked or asked["kv_length"] != self._whole:
            raise ConfigError(
                f"{self.rule} asks for a mask that is not causal; leave strategy.context_parallel_size out"
            )
        asked["kv_offset"] = 0
        if self._padding is None:
            asked["attention_mask"] = None
        if self.parts.by_keys or "eager" in {kernel for _, kernel in self._kernels.values()}:
            asked["allow_is_causal_skip"] = False
        if self._packed is not None:
            asked["mask_function"] = module.packed_sequence_compatibility_function(
                asked["mask_function"], *self._packed
            )
            asked["allow_is_causal_skip"] = False
        if not self.parts.by_keys:
            return module.sdpa_mask(**asked | {"q_offset": 0, "q_length": self._whole})  # type: ignore[no-any-return]
        rows = [
            module.sdpa_mask(**asked | {"q_offset": begin, "q_length": end - begin})
            for begin, end in self.parts.runs(self._whole)
        ]
        return torch.cat(rows, dim=2)

    def _attend(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        """`query`, `key`, `value`: [B, heads, part, D]. Gives [B, part, heads, D], as attention functions do."""
        if not self._divides:
            return layer.whole_attention(layer, query, key, value, attention_mask, **more)  # type: ignore[no-any-return]
        tensors = [name for name, given in more.items() if isinstance(given, Tensor) and name != "position_ids"]
        if tensors:
            raise ConfigError(
                f"{self.rule} gives its attention {', '.join(tensors)}, which cannot be divided; leave "
                f"strategy.context_parallel_size out"
            )
        more.pop("position_ids", None)

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            if layer.is_eager and mask is not None:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
            out: Tensor = layer.whole_attention(layer, q, k, v, mask, **more)[0]
            return out.transpose(1, 2)

        return self.parts.attend_with(query, key, value, attention_mask, attend).transpose(1, 2).contiguous(), None
