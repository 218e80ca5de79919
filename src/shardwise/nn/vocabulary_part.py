"""The loss of a head whose vocabulary is divided among ranks: a rank has the logits of its own tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.nn.peers import Between, Peers, share_of


@dataclass(frozen=True)
class VocabularyPart:
    """Which rows of a whole vocabulary of `whole` tokens this rank has.

    `between`: how ranks divide activations outside of the layers that are divided, with gradients; None: not at all.
    `when_whole`: called where the parts are put together, behind the last of these layers.
    """

    peers: Peers
    whole: int
    between: Between | None = None
    when_whole: Callable[[], None] | None = field(default=None, compare=False)

    @property
    def start(self) -> int:
        return share_of(self.whole, self.peers.size, self.peers.rank)[0]

    @property
    def tokens(self) -> int:
        """How many tokens this rank has."""
        return share_of(self.whole, self.peers.size, self.peers.rank)[1]

    @property
    def most(self) -> int:
        """The tokens of a rank, at most: ranks that each have their own number must agree on sizes by it."""
        return share_of(self.whole, self.peers.size, 0)[1]

    def own(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens are this rank's, and their rows in its part; 0 for others."""
        mine = (tokens >= self.start) & (tokens < self.start + self.tokens)
        return mine, torch.where(mine, tokens - self.start, 0)

    def whole_sequence(self, hidden: Tensor) -> Tensor:
        """The hidden states of whole sequences of all samples, [..., T, D], of this rank's part."""
        if self.between is None or not torch.is_grad_enabled():
            return hidden
        if self.when_whole is not None:
            self.when_whole()
        return self.peers.gather(hidden, self.between.dim)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of each row, from this rank's logits [N, its tokens]; ranks exchange two numbers a row."""
        mine, at = self.own(targets)
        at_target = torch.where(mine, logits.gather(1, at.unsqueeze(1)).squeeze(1), 0.0)
        found = self.peers.gather_copies(torch.stack((logits.logsumexp(1), at_target)))
        return found[:, 0].logsumexp(0) - found[:, 1].sum(0)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """[..., its tokens] -> [..., whole], of which every rank computes the same."""
        padded = nn.functional.pad(logits, (0, self.most - logits.shape[-1]))
        parts = self.peers.gather_copies(padded).unbind()
        sizes = [share_of(self.whole, self.peers.size, rank)[1] for rank in range(self.peers.size)]
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)


def vocabulary_part_of(head: Any) -> VocabularyPart | None:
    """The part of a head that is divided by tensor parallelism; None: this rank has all of it."""
    found: VocabularyPart | None = getattr(head, "vocabulary_part", None)
    return found
