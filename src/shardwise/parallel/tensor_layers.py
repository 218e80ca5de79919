"""What is put around the forward of a layer that ranks divide. All of it is traced when the layer is compiled.

The words are those of a module's own declaration, and the styles those of a Hugging Face model's plan. Between layers
with words a rank has a part of each sequence, or some of the samples, and between layers with styles all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from shardwise.errors import ConfigError, class_name
from shardwise.nn.linear_cross_entropy import VocabularyPart
from shardwise.nn.peers import SEQUENCE, Between, Peers, share_of

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


# What the layers that ranks divide must be: what torch makes of their class, and watched by nobody who sees a part.
#
# A rank multiplies with its part of a weight and adds up with its peers. A forward of somebody's own would see a part
# of the weight or not be called at all, and a hook would see a part of an input or an output: other numbers, without a
# word.

# As they are before anybody has replaced them
_FORWARDS: dict[type, Any] = {kind: kind.forward for kind in (nn.Linear, nn.Embedding)}
_CALL = nn.Module.__call__
_PART_GOES_IN = ("norm", "gather", "row", "head", ROW, SEES_SOME_HEADS)
_PART_COMES_OUT = ("norm", "gather", *COLUMNS, "row", "embedding", BY_SAMPLE, COLUMN, SEES_SOME_HEADS)
_SPREADS = (*COLUMNS, "row", COLUMN, ROW)  # between the first and the last of them a rank has some of the features
_OURS = ("shardwise.", "torch.distributed.", "torch._dynamo.")


def check_layers(module: nn.Module, layers: dict[str, str], ranks: int, *, are_wrapped: bool = False) -> None:
    """Refuse layers that compute in their own way, and hooks that would see a part of something.

    `layers`: names of layers → what they are. `are_wrapped`: strategies have replaced their forward.

    Raises:
        ConfigError
    """
    rule = f"strategy.tensor_parallel_size={ranks}"
    for name, layer in module.named_modules():
        word = layers.get(name, "")
        kind: Any = CLASSES.get(word)
        if divided_dim(word, "weight") is None or not isinstance(layer, kind):  # it is what a pipeline has put there
            continue
        if (what := _own_way(layer, kind, are_wrapped)) is not None:
            raise ConfigError(
                f"{rule}: {name} ({class_name(layer)}) {what}, and each rank has a part of it ({word!r}), with which "
                f"only the forward of a plain nn.{kind.__name__} is computed; keep what it does besides in a "
                f"layer of its own that is not divided, or use strategy.tensor_parallel_size=1"
            )
    for name, layer, goes_in, comes_out in _places(module, layers):
        if (what := _hook_on_part(layer, goes_in, comes_out)) is not None:
            raise ConfigError(
                f"{rule}: {name} ({class_name(layer)}) has {what}, which would see a rank's part of what one device "
                f"has there; put it on a layer around the divided ones, or use strategy.tensor_parallel_size=1"
            )


def withhold_inputs(layer: nn.Module, name: str, word: str) -> None:
    """Let hooks on `layer` that see its whole output not look at its input, of which a rank has a part."""
    if word in _PART_GOES_IN and word not in _PART_COMES_OUT:
        for key, hook in layer._forward_hooks.items():
            if not _is_ours(hook):
                layer._forward_hooks[key] = _WithoutInput(hook, name)


class _WithoutInput:
    """A forward hook that is given something else in place of the input."""

    def __init__(self, hook: Callable[..., Any], name: str) -> None:
        self.hook, self._withheld = hook, _Withheld(name)

    def __call__(self, layer: nn.Module, inputs: Any, *others: Any) -> Any:
        return self.hook(layer, self._withheld, *others)


class _Withheld:
    """Stands for the input of a layer."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, key: Any) -> Any:
        raise ConfigError(
            f"strategy.tensor_parallel_size: a forward hook on {self._name} looks at its input, of which a rank has a "
            f"part; its output is whole: use that alone, or strategy.tensor_parallel_size=1"
        )

    def __iter__(self) -> Iterator[Any]:
        yield self[0]

    def __len__(self) -> int:
        return len(self[0])


def _own_way(layer: nn.Module, kind: type[Any], is_wrapped: bool) -> str | None:
    """In which way a layer that is divided is not what `kind` is; None: it is."""
    forward = type(layer).forward
    # The embeddings of transformers multiply each row by a number, or normalize it; they are called with a rank's rows.
    known = kind is nn.Embedding and str(getattr(forward, "__module__", "")).startswith("transformers.")
    if is_parametrized(layer):
        return "is parametrized (torch.nn.utils.parametrize)"
    if "forward" in vars(layer) and not (is_wrapped and _is_ours(vars(layer)["forward"])):
        return "has had its forward replaced"
    if (forward is not _FORWARDS[kind] and not known) or type(layer).__call__ is not _CALL:
        return "has a forward of its own"
    owned = dict(layer.named_parameters(recurse=False))
    if "weight" not in owned:
        return "has no weight that is a parameter"
    others = [*(key for key in owned if key not in ("weight", "bias")), *(key for key, _ in layer.named_children())]
    others += [key for key, buffer in layer.named_buffers(recurse=False) if not known or buffer.numel() != 1]
    return f"owns {', '.join(others)} besides a weight and a bias" if others else None


def _places(module: nn.Module, layers: dict[str, str]) -> Iterator[tuple[str, nn.Module, bool, bool]]:
    """Layers that are given a part of something, or give it, with their names."""
    spread = [name for name, word in layers.items() if word in _SPREADS]
    owners = {name.rpartition(".")[0] for name in spread}
    around = {outer for name in spread for outer in _prefixes(name)}
    for name, layer in module.named_modules():
        if (word := layers.get(name)) is not None:
            yield name, layer, word in _PART_GOES_IN, word in _PART_COMES_OUT
        elif name not in around:
            nearest = next((outer for outer in reversed([*_prefixes(name)]) if outer in around), None)
            if nearest in owners:  # such as an activation function beside the divided layers
                yield name, layer, True, True


def _prefixes(name: str) -> Iterator[str]:
    """The names of what `name` is in, from the module on."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts)))


def _hook_on_part(layer: nn.Module, goes_in: bool, comes_out: bool) -> str | None:
    hooks: dict[str, tuple[bool, Iterable[Any]]] = {
        "forward pre-hook": (goes_in, layer._forward_pre_hooks.values()),
        "forward hook": (comes_out, layer._forward_hooks.values()),
        "backward pre-hook": (comes_out, layer._backward_pre_hooks.values()),
        "backward hook": (goes_in or comes_out, layer._backward_hooks.values()),
    }
    for what, (sees_part, registered) in hooks.items():
        if sees_part and (own := [hook for hook in registered if not _is_ours(hook)]):
            return f"a {what} ({getattr(own[0], '__qualname__', type(own[0]).__name__)})"
    return None


def _is_ours(function: Any) -> bool:
    """Whether it is not a user's: it is written in this repository, or in what it shards and compiles with."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    written_in = getattr(function, "__globals__", {"__name__": type(function).__module__})  # not those of what it wraps
    return str(written_in["__name__"]).startswith(_OURS)
