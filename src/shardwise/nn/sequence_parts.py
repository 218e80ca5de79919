"""Sequences of which this rank computes a part: what a model needs to know of it under context parallelism.

Every layer but attention looks at each position by itself. parallel/context_parallel.py puts here how attention reaches
the positions of other ranks, and nn/attention.py asks for it, so that a model knows no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor


class SequenceParts(Protocol):
    """How the sequences of the present batch are divided over ranks."""

    ranks: int

    def layout(self, positions: Tensor, documents: Tensor | None, *, makes_masks: bool) -> dict[str, Any]:
        """What attention needs to know of this rank's part.

        `positions`: int64 [T] or [B, T], those of whole sequences; `documents`: int64 [B, T], the number of each
        token's document. `makes_masks`: the kernel needs a mask for queries of the last positions alone.

        Returns:
            `positions`, those of this rank. And `masks`, if it computes these alone and `makes_masks`: what each run of
            them may look at, bool [B or 1, 1, run, keys up to its end].
        """

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: dict[str, Any], kernel: str, attention: Callable[..., Tensor]
    ) -> Tensor:
        """Attention of this rank's positions, [B, heads, T, head_dim]. `attention`: that of one rank."""


_parts: SequenceParts | None = None  # of this process's run


def sequence_parts() -> SequenceParts | None:
    """How sequences are divided over ranks; None: every rank computes whole sequences."""
    return _parts


def use_sequence_parts(parts: SequenceParts | None) -> None:
    """Let attention of this process work on parts of sequences from now on; None: on whole ones again."""
    global _parts
    _parts = parts


@contextmanager
def whole_sequences() -> Iterator[None]:
    """Inside, every rank computes whole sequences, such as a text that a hook gives to the model."""
    parts = sequence_parts()
    use_sequence_parts(None)
    try:
        yield
    finally:
        use_sequence_parts(parts)
