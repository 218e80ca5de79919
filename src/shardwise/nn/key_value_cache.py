"""Keys and values of tokens that a transformer has seen already, so that a new token costs one position only.

A row's token at position p stands in slot p of every layer. Rows of different lengths are padded on the right. What a
padding leaves in a slot is overwritten by the token that gets this position, before any token looks at it.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
