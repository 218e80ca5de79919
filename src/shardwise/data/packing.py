"""Packed sequences that know their documents, so that attention and loss can stay inside each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import default_collate

from shardwise.data.tokens import TokenSequences, TokenShards
from shardwise.nn.attention import document_starts

IGNORE = -100  # a target that does not count, as torch's cross_entropy has it


class DocumentSequences(TokenSequences):
    """`TokenSequences` in which a token predicts only tokens of its own document.

    A document that begins or ends outside a sequence is cut there: its parts are documents of their own.

    Raises:
        DataError: the shards do not say where documents end.
    """

    def __init__(self, shards: TokenShards, sequence_length: int) -> None:
        super().__init__(shards, sequence_length)
        shards.document_ends(0, 0)

    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
        """`tokens`, `targets` and `documents`, all int64 [sequence_length]. A target in another document is -100."""
        sample, start = super().__getitem__(i), i * self.sequence_length
        number = np.zeros(self.sequence_length + 1, np.int64)
        number[self.shards.document_ends(start, self.sequence_length) - start] = 1
        number = number.cumsum()
        inside = number[1:] == number[:-1]
        return {**sample, "targets": np.where(inside, sample["targets"], IGNORE), "documents": number[:-1]}


def collate_documents(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collate, and add `document_starts`, which on a GPU would make the host wait."""
    batch: dict[str, Any] = default_collate(list(samples))
    return {**batch, "document_starts": document_starts(batch["documents"])}
