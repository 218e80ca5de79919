"""What counting alone reaches on a validation split: a model must be better."""

import math

import numpy as np
import numpy.typing as npt

from shardwise.data.tokens import TokenShards
from shardwise.errors import DataError


def unigram_bigram_baselines(train: TokenShards, validation: TokenShards, vocab_size: int) -> dict[str, float]:
    """The losses, in nats per token, that counting alone reaches on `validation`. A model must be better.

    Fitted on at most the first 20M tokens of `train`, measured on at most the first 2M of `validation`. `unigram`:
    p(b) = (n(b) + 1) / (n + V). `bigram`, for V <= 1024 only (its table has V² entries), interpolates by Witten-Bell:
    p(b|a) = (n(ab) + d(a) p(b)) / (n(a) + d(a)), d(a) = max(1, distinct followers of a). Both predict the same tokens.
    """
    counts = _count(train, 20_000_000, vocab_size, order=1)
    unigram = (counts + 1) / (counts.sum() + vocab_size)
    measured = _count(validation, 2_000_000, vocab_size, order=1)
    measured[int(validation.tokens(0, 1)[0])] -= 1  # no model predicts the first token
    baselines = {"unigram": _cross_entropy(measured, unigram)}
    if vocab_size <= 1024:
        pairs = _count(train, 20_000_000, vocab_size, order=2).reshape(vocab_size, vocab_size)
        followers = np.maximum((pairs > 0).sum(axis=1, keepdims=True), 1)
        bigram = (pairs + followers * unigram) / (pairs.sum(axis=1, keepdims=True) + followers)
        baselines["bigram"] = _cross_entropy(_count(validation, 2_000_000, vocab_size, order=2), bigram.ravel())
    return baselines


def _cross_entropy(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    total = int(counts.sum())
    return float(-(counts @ np.log(probabilities)) / total) if total else math.nan


def _count(shards: TokenShards, limit: int, vocab_size: int, order: int) -> npt.NDArray[np.int64]:
    """Count each token (order 1, [V]) or each pair of neighbours (order 2, [V * V])."""
    counts = np.zeros(vocab_size**order, np.int64)
    limit, step = min(limit, len(shards)), 1 << 20
    for start in range(0, limit - order + 1, step):
        chunk = shards.tokens(start, min(step + order - 1, limit - start)).astype(np.int64)
        if (largest := int(chunk.max())) >= vocab_size:
            raise DataError(
                f"{shards.directory} holds the token {largest}, and its index has vocab_size {vocab_size}: every token "
                f"must be below that; prepare the directory again"
            )
        keys = chunk if order == 1 else chunk[:-1] * vocab_size + chunk[1:]
        counts += np.bincount(keys, minlength=len(counts))
    return counts
