"""Continues texts token by token: draws from a model's logits, and keeps what it has computed in a cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_LOWEST_TEMPERATURE = 1e-6


class Generates(Protocol):
    """What a module must offer so that texts can be continued with it. protocols.py says the same for users."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    def make_cache(self, rows: int, length: int) -> Any: ...

    def next_token_logits(self, tokens: Tensor, lengths: list[int], cache: Any) -> Tensor: ...


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. `temperature` 0 takes the most likely one.

    `top_k`: only from as many of the most likely tokens. `top_p`: only from the fewest tokens that together have this
    probability, after the temperature.

    Raises:
        ValueError: a value is out of its range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: must be at least 0; 0 takes the most likely token")
        if 0 < self.temperature < _LOWEST_TEMPERATURE:  # the logits divided by it would be infinite
            raise ValueError(
                f"temperature={self.temperature}: must be at least {_LOWEST_TEMPERATURE}, or 0, which takes the most "
                f"likely token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: must be at least 1, or null for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1")

    def draw(self, logits: Tensor, generator: torch.Generator | Sequence[torch.Generator] | None = None) -> Tensor:
        """[B, V] -> int64 [B]. With one generator for each row, a row's draw does not depend on the others."""
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = self._kept(logits.float() / self.temperature).softmax(-1)
        if generator is None or isinstance(generator, torch.Generator):
            return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        rows = zip(probabilities, generator, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=own) for row, own in rows])

    def _kept(self, logits: Tensor) -> Tensor:
        """The logits, and -inf where a token is not to be drawn."""
        if self.top_k is not None:
            lowest = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < lowest, -math.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=True)
            p = ordered.softmax(-1)
            drop = p.cumsum(-1) - p >= self.top_p  # those before it have the probability already
            logits = logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)
        return logits


@torch.no_grad()
def continue_texts(
    model: Generates,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    device: torch.device,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    vocab_size: int | None = None,
) -> Iterator[list[int]]:
    """Yield a new token for each prompt, `max_new_tokens` times. Each prompt has at least one token.

    A row is continued as it would be alone. The model sees at most `context_length` tokens: the last ones of a longer
    prompt. When these are full, the later half of them is computed once more, from position 0, and the rest is
    forgotten. Tokens from `vocab_size` on are never drawn.
    """
    limit = model.context_length
    texts = [list(prompt[-limit:]) for prompt in prompts]
    longest = max(map(len, texts)) + max_new_tokens
    cache, new = model.make_cache(len(texts), min(limit, longest)), texts
    for _ in range(max_new_tokens):
        logits = model.next_token_logits(_pad(new, device), list(map(len, new)), cache)[:, :vocab_size]
        drawn: list[int] = sampling.draw(logits, generator).tolist()
        yield drawn
        texts, new = [[*text, token] for text, token in zip(texts, drawn, strict=True)], [[token] for token in drawn]
        if any(len(text) > limit for text in texts):
            texts = [text[-max(1, limit // 2) :] if len(text) > limit else text for text in texts]
            cache, new = model.make_cache(len(texts), limit), texts


def _pad(rows: list[list[int]], device: torch.device) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


# Keys and values of tokens that a transformer has seen already, so that a new token costs one position only.
#
# A row's token at position p stands in slot p of every layer. Rows of different lengths are padded on the right. What a
# padding leaves in a slot is overwritten by the token that gets this position, before any token looks at it.


class LayerCache:
    """The keys and values of one layer, [B, n_kv_heads, length, head_dim], with memory for all of `length` at once."""

    positions: Tensor  # int64 [B, T] of the tokens that are being added
    used: int  # the slots that these tokens may look at
    is_first: bool  # whether they are the first

    def __init__(self, length: int) -> None:
        self.length = length
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add those of the new tokens, [B, n_kv_heads, T, head_dim].

        Returns:
            The keys and values of all tokens so far, and which of them each new token may look at, as a bool
            [B, 1, T, used]. None: the tokens are the first, and each looks at itself and those before it.
        """
        if self.keys is None or self.values is None:
            shape = (*keys.shape[:2], self.length, keys.shape[3])
            self.keys, self.values = keys.new_zeros(shape), values.new_zeros(shape)
        slots = self.positions[:, None, :, None].expand_as(keys)
        self.keys.scatter_(2, slots, keys)
        self.values.scatter_(2, slots, values)
        if self.is_first:
            return keys, values, None
        visible = torch.arange(self.used, device=keys.device) <= self.positions[:, None, :, None]
        return self.keys[:, :, : self.used], self.values[:, :, : self.used], visible


class KeyValueCache:
    """The caches of all layers, for `rows` of at most `length` tokens each."""

    def __init__(self, layers: int, rows: int, length: int) -> None:
        self.length = length
        self.lengths = [0] * rows  # how many tokens of each row are in the cache
        self.layers = [LayerCache(length) for _ in range(layers)]

    def begin(self, tokens: Tensor, lengths: list[int]) -> None:
        """Say which tokens come next: int64 [B, T], of which the first `lengths[b]` of row b count.

        Raises:
            ValueError: they would not fit.
        """
        before, new = self.lengths, tokens.shape[1]
        used = max(before) + new
        if used > self.length:
            raise ValueError(f"{used} tokens do not fit into a cache of {self.length}")
        positions = torch.tensor(before, device=tokens.device)[:, None] + torch.arange(new, device=tokens.device)
        for layer in self.layers:
            layer.positions, layer.used, layer.is_first = positions, used, not any(before)
        self.lengths = [length + more for length, more in zip(before, lengths, strict=True)]
