"""Several corpora as one data set, from which a run takes samples by weight.

Of each 1,000 samples of a run in a row, the block, a corpus gives a fixed number. Which places in the block these are
is a permutation that seed and block choose. So it is known without a table which sample of which corpus comes at a
position, however far that is, and a run can go on from there on any number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.data.order import permute
from shardwise.data.shard_index import load_index
from shardwise.data.tokens import TokenSequences
from shardwise.errors import ConfigError, count

BLOCK = 1000  # samples, of which each corpus gives a fixed number
MANY_EPOCHS = 4  # beyond about so many, tokens that come again teach little (Muennighoff et al. 2023)

Indices = npt.NDArray[np.int64]


class Mixture:
    """Map-style data set: the sequences of all corpora, one corpus after the other, in the order of their names.

    `weights`: how many samples of a run come from each corpus, in any unit. A corpus is read whole, in a new order each
    time, before any of it comes again.

    Raises:
        ConfigError: a weight is so small that the corpus would never come.
    """

    def __init__(self, corpora: Mapping[str, TokenSequences], weights: Mapping[str, float]) -> None:
        self.names = sorted(corpora)
        self.corpora = [corpora[name] for name in self.names]
        self.counts = counts_of(weights)  # by name, of the samples in a block
        self.sizes = np.array([len(corpus) for corpus in self.corpora], np.int64)
        self.ends = self.sizes.cumsum()
        self.shares = np.array([self.counts[name] for name in self.names], np.int64)

    def __len__(self) -> int:
        """The sequences of all corpora together."""
        return int(self.ends[-1])

    def __getitem__(self, i: int) -> dict[str, Any]:
        """What the corpus gives for this sequence."""
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {i} is outside [0, {len(self)})")
        corpus = int(np.searchsorted(self.ends, i, side="right"))
        return self.corpora[corpus][i - int(self.ends[corpus] - self.sizes[corpus])]

    def draw_for_run(self, seed: int, positions: Indices) -> Indices:
        """The index of the sample at each position of a run."""
        chosen, draws = self._draws(seed, positions)
        indices = np.empty(len(positions), np.int64)
        for c, name in enumerate(self.names):
            here = chosen == c
            epochs, at = np.divmod(draws[here], self.sizes[c])
            sequences = _permuted_by_group(at, epochs, int(self.sizes[c]), (seed, "corpus", name))
            indices[here] = sequences + self.ends[c] - self.sizes[c]
        return indices

    def _draws(self, seed: int, positions: Indices) -> tuple[Indices, Indices]:
        """For each position its corpus, and how often that corpus was drawn from before it in the run."""
        blocks, places = np.divmod(positions, BLOCK)
        chosen, draws = np.empty_like(positions), np.empty_like(positions)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            corpora, earlier = _layout(tuple(self.shares.tolist()), seed, block)
            chosen[here] = corpora[places[here]]
            draws[here] = block * self.shares[chosen[here]] + earlier[places[here]]
        return chosen, draws

    def progress_of_run(self, seed: int, samples: int) -> dict[str, float]:
        """How often each corpus has been read when a run has taken so many samples: `<name>/epochs`."""
        block, rest = divmod(samples, BLOCK)
        corpora, _ = _layout(tuple(self.shares.tolist()), seed, block)
        begun = np.bincount(corpora[:rest], minlength=len(self.shares))
        epochs = (block * self.shares + begun) / self.sizes
        return {f"{name}/epochs": float(value) for name, value in zip(self.names, epochs, strict=True)}

    def notices_for_run(self, samples: int | None) -> list[str]:
        """The shares, and how often the run will read each corpus."""
        told, often = [], []
        for name, size, share in zip(self.names, self.sizes.tolist(), self.shares.tolist(), strict=True):
            epochs = None if samples is None else samples * share / BLOCK / size
            read = "" if epochs is None else f", read {epochs:.2g} times"
            told.append(f"{name} {share / BLOCK:.1%} of {count(size, 'sequence')}{read}")
            often += [name] if epochs is not None and epochs > MANY_EPOCHS else []
        warning = f"; more than {MANY_EPOCHS} times: {', '.join(often)}" if often else ""
        return [f"mixture: {'; '.join(told)}{warning}"]

    def identity_of_data(self) -> dict[str, str]:
        """Of each corpus its digests and its share."""
        found = {}
        for name, corpus in zip(self.names, self.corpora, strict=True):
            [told] = corpus.identity_of_data().values()
            digest, _, content = told.partition("; ")
            found[name] = f"{digest}, {self.counts[name]} of {BLOCK:,} samples; {content}"
        return found


def counts_of(weights: Mapping[str, float]) -> dict[str, int]:
    """How many samples of a block each corpus gives: its share rounded down, and the rest to the largest remainders.

    Raises:
        ConfigError: a corpus gives none, or the weights are too large to be added.
    """
    total = sum(weights.values())
    if not math.isfinite(total):
        told = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
        raise ConfigError(
            f"data.corpora: the weights ({told}) add up to more than a floating point number can hold: divide all of "
            f"them by the same number, since only their shares count"
        )
    exact = {name: weights[name] / total * BLOCK for name in sorted(weights)}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: BLOCK - sum(counts.values())]:
        counts[name] += 1
    assert sum(counts.values()) == BLOCK, counts
    for name, number in counts.items():
        if not number:
            raise ConfigError(
                f"data.corpora.{name}.weight={weights[name]:g} is {weights[name] / total:.3%} of all weights, less "
                f"than one sample in {BLOCK:,}: give it at least {total / BLOCK:g}, or leave the corpus out"
            )
    return counts


def check_one_tokenizer(directories: Mapping[str, Path]) -> None:
    """Check that the shards in all `directories`, by the option that names them, hold the tokens of one tokenizer.

    Shards that do not say which tokenizer made them are known by the size of their vocabulary alone.

    Raises:
        ConfigError: two of them do not.
    """
    indices = {option: load_index(directory) for option, directory in directories.items()}
    sizes = {option: f"a vocabulary of {count(index['vocab_size'], 'token')}" for option, index in indices.items()}
    makers = {
        option: f"tokens of the tokenizer with sha256 {index['tokenizer']['sha256'][:12]}"
        for option, index in indices.items()
        if index.get("tokenizer")
    }
    for has in (sizes, makers):
        first = next(iter(has), "")
        for option, words in has.items():
            if words != has[first]:
                raise ConfigError(
                    f"{first} ({directories[first]}) has {has[first]}, and {option} ({directories[option]}) {words}: a "
                    f"model reads the tokens of one tokenizer; prepare one of them again with the other's"
                )


@lru_cache(maxsize=8)
def _layout(shares: tuple[int, ...], seed: int, block: int) -> tuple[Indices, Indices]:
    """Of each place in a block the number of its corpus, and how many places of that corpus lie before it."""
    slots = _permuted_by_group(np.arange(BLOCK), np.full(BLOCK, block), BLOCK, (seed, "block"))
    corpora = np.searchsorted(np.cumsum(shares), slots, side="right")
    earlier = np.empty(BLOCK, np.int64)
    for c, share in enumerate(shares):
        earlier[corpora == c] = np.arange(share)
    return corpora, earlier


def _permuted_by_group(values: Indices, groups: Indices, size: int, key: tuple[Any, ...]) -> Indices:
    """Permute the `values`, which lie below `size`, by a permutation that `key` and the value's group choose."""
    found = np.empty(len(values), np.int64)
    for group in np.unique(groups).tolist():
        here = groups == group
        digest = hashlib.sha256(repr((*key, group)).encode()).digest()
        found[here] = permute(values[here], size, int.from_bytes(digest[:8], "little"))
    return found
