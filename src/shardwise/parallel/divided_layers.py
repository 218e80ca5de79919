"""What is put around the forward of a layer that ranks divide. All of it is traced when the layer is compiled.

The words are those of a module's own declaration, and the styles those of a Hugging Face model's plan. Between layers
with words a rank has a part of each sequence, or some of the samples, and between layers with styles all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.nn.peers import SEQUENCE, Between, Peers, share_of
from shardwise.nn.vocabulary_part import VocabularyPart

BY_SAMPLE = "embedding_by_sample"
COLUMNS = ("column", "column_in_groups")
WORDS = (*COLUMNS, "row", "embedding", BY_SAMPLE, "head", "gather", "norm")
COLUMN, ROW, HEAD, EMBEDDING = "colwise", "rowwise", "colwise_gather_output", "embedding_rowwise"
SPLIT = "rowwise_split_input"
SEES_SOME_HEADS = "replicated_with_grad_allreduce"
STYLES = (COLUMN, ROW, SPLIT, HEAD, EMBEDDING, SEES_SOME_HEADS)
# Word or style → the dim of the weight that is divided
_CUT = {**dict.fromkeys(COLUMNS, 0), "row": 1, "embedding": 0, BY_SAMPLE: 0, "head": 0, COLUMN: 0, ROW: 1, SPLIT: 1,
        HEAD: 0, EMBEDDING: 0}  # fmt: skip
CLASSES = {**dict.fromkeys(COLUMNS, nn.Linear), "row": nn.Linear, "embedding": nn.Embedding, BY_SAMPLE: nn.Embedding,
           "head": nn.Linear, COLUMN: nn.Linear, ROW: nn.Linear, SPLIT: nn.Linear, HEAD: nn.Linear,
           EMBEDDING: nn.Embedding}  # fmt: skip
DIVIDES_ACTIVATIONS = ("embedding", BY_SAMPLE, "gather", *COLUMNS, "row")  # behind or in which a rank has some of them
DIVIDES_VOCABULARY = ("embedding", BY_SAMPLE, "head", EMBEDDING, HEAD)


def divided_dim(word: str | None, key: str) -> int | None:
    """The dim along which a layer's parameter `key` is divided; None: it is whole."""
    if word not in _CUT or (key == "bias" and word in ("row", ROW, SPLIT)):
        return None
    return _CUT[word] if key == "weight" else 0


def sees_a_part(word: str | None, key: str) -> bool:
    """Whether the gradient of a layer's whole parameter `key` is of a part of the sequence or of the heads."""
    return word in ("norm", SEES_SOME_HEADS) or (word == "row" and key == "bias")


def _cuts_sequence() -> bool:
    return torch.is_grad_enabled()


def _summed(whole: Tensor, peers: Peers, between: Between) -> Tensor:
    """The sum over the peers: this rank's part of it, or all of it where no gradient is needed."""
    if not _cuts_sequence():
        return peers.reduce(whole, "sum")
    if whole.shape[between.dim] % peers.size:
        raise ConfigError(
            f"strategy.tensor_parallel_size={peers.size} does not divide a sequence of {whole.shape[SEQUENCE]}: give "
            f"training data of such a length"
        )
    return peers.scatter_sum(whole, between.dim)


def _replace_forward(layer: nn.Module, forward: Callable[..., Any]) -> None:
    layer.forward = forward


def _gather_input(layer: nn.Module, peers: Peers, between: Between) -> None:
    forward = layer.forward

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(peers.gather(x, between.dim) if _cuts_sequence() else x, *args, **kwargs)

    _replace_forward(layer, run)


def _product(layer: Any, x: Tensor) -> Tensor:
    """What the weight of a linear layer gives without its bias, in fp8 if the layer multiplies so."""
    return layer.fp8_product(x) if hasattr(layer, "fp8_product") else F.linear(x, layer.weight)


def _sum_output(layer: Any, peers: Peers, between: Between) -> None:
    def run(x: Tensor) -> Tensor:
        total = _summed(_product(layer, x), peers, between)
        return total if layer.bias is None else total + layer.bias

    _replace_forward(layer, run)


def _look_up(layer: nn.Module, peers: Peers, between: Between) -> None:
    _divide_embedding(layer, peers, lambda part: _summed(part, peers, between))


def _look_up_by_sample(layer: nn.Module, peers: Peers, between: Between) -> None:
    """Each rank has whole sequences of some samples, where these divide: nothing is copied to put them together."""

    def total(part: Tensor) -> Tensor:
        if _cuts_sequence() and not between.choose(part, peers.size):
            raise ConfigError(
                f"strategy.tensor_parallel_size={peers.size} divides the samples of one pass of a training step and "
                f"not those of another, which has {part.shape[0]}: give all passes of a step such numbers, or call the "
                f"embedding 'embedding' in tensor_parallel_layers, which divides sequences"
            )
        return _summed(part, peers, between)

    _divide_embedding(layer, peers, total)


def _look_up_whole(layer: nn.Module, peers: Peers, between: Between) -> None:
    _divide_embedding(layer, peers, peers.sum_copies)


def _divide_embedding(layer: nn.Module, peers: Peers, total: Callable[[Tensor], Tensor]) -> None:
    assert isinstance(layer, nn.Embedding)
    if layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq:
        raise ConfigError(
            "strategy.tensor_parallel_size: an nn.Embedding with max_norm, sparse or scale_grad_by_freq is not "
            "divided; leave these out"
        )
    forward, part = layer.forward, VocabularyPart(peers, layer.num_embeddings)

    def run(tokens: Tensor) -> Tensor:
        mine, own = part.own(tokens)
        return total(torch.where(mine.unsqueeze(-1), forward(own), 0.0))

    _replace_forward(layer, run)


def _divide_vocabulary(layer: nn.Module, peers: Peers, between: Between) -> None:
    """A head that is called gives all logits; the loss uses its weight alone, see nn/linear_cross_entropy.py."""
    assert isinstance(layer, nn.Linear)
    forward = layer.forward
    layer.vocabulary_part = VocabularyPart(peers, layer.out_features, between)  # type: ignore[assignment]

    def run(hidden: Tensor) -> Tensor:
        part: Any = layer.vocabulary_part
        whole: Tensor = part.whole_logits(forward(part.whole_sequence(hidden)))
        return whole

    _replace_forward(layer, run)


# Those of a Hugging Face plan


def _copy_input(layer: Any, peers: Peers, between: Between) -> None:
    forward = layer.forward
    layer.forward = lambda x: forward(peers.copies(x))


def _sum_whole_output(layer: Any, peers: Peers, between: Between) -> None:
    def run(x: Tensor) -> Tensor:
        total = peers.sum_copies(_product(layer, x))
        return total if layer.bias is None else total + layer.bias

    layer.forward = run


def _split_input(layer: Any, peers: Peers, between: Between) -> None:
    """Its input is whole on every rank, since what stands before it gathers its output (`colwise_gather_output`)."""
    _sum_whole_output(layer, peers, between)
    forward, each = layer.forward, layer.in_features // peers.size
    layer.forward = lambda x: forward(peers.copies(x).narrow(-1, peers.rank * each, each))


def _give_whole_logits(layer: Any, peers: Peers, between: Between) -> None:
    forward, part = layer.forward, VocabularyPart(peers, layer.out_features)
    layer.forward = lambda x: part.whole_logits(forward(peers.copies(x)))


def _leave(layer: nn.Module, peers: Peers, between: Between) -> None:
    """Nothing is done in the forward pass."""


WRAPPERS: dict[str, Callable[[nn.Module, Peers, Between], None]] = {
    **dict.fromkeys(COLUMNS, _leave),
    "row": _sum_output,
    "embedding": _look_up,
    BY_SAMPLE: _look_up_by_sample,
    "head": _divide_vocabulary,
    "gather": _gather_input,
    "norm": _leave,
    COLUMN: _copy_input,
    ROW: _sum_whole_output,
    SPLIT: _split_input,
    HEAD: _give_whole_logits,
    EMBEDDING: _look_up_whole,
    SEES_SOME_HEADS: _leave,
}


def say_sizes(layer: nn.Module, peers: Peers) -> None:
    """Let a layer that was divided say its own sizes."""
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.Embedding):
        start, size = share_of(layer.num_embeddings, peers.size, peers.rank)
        layer.num_embeddings = size
        if (padding := layer.padding_idx) is not None:  # its row gets no gradient, on the rank that has it
            layer.padding_idx = padding - start if start <= padding < start + size else None
