"""The cross-entropy of a linear head over a vocabulary, without the logits of all rows in memory at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.nn.peers import Between, Peers, share_of

# The loss of a head whose vocabulary is divided among ranks: a rank has the logits of its own tokens alone.


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


# Losses of rows of logits, and gradients written over the logits, by kernels of quack-kernels on NVIDIA GPUs.

IGNORE = -100  # a target that does not count, as torch's cross_entropy has it
NOT_HERE = -1  # the kernel's target of a row whose token another rank has: it is no column


def fused_rows(logits: Tensor, targets: Tensor, losses: Tensor, with_gradients: bool) -> None:
    """One kernel: it reads the logits once, and writes gradients over them in their own dtype."""
    forward, _ = _kernels()
    forward(logits, targets, None, losses, None, logits if with_gradients else None, None, IGNORE)


def fused_rows_of_a_part(
    logits: Tensor, targets: Tensor, losses: Tensor, with_gradients: bool, part: VocabularyPart
) -> None:
    """The same where each rank has the logits of its own tokens: [N, its tokens].

    One kernel finds the logarithm of the summed powers of each row, ranks exchange it and the target's logit, and one
    more kernel writes the gradients: three passes over the logits in place of two.
    """
    forward, backward = _kernels()
    counts, (mine, own) = targets != IGNORE, part.own(targets)
    log_sums = torch.empty_like(losses)
    forward(logits, own, None, losses, log_sums, None, None, IGNORE)
    at_target = torch.where(mine, logits.gather(1, own.unsqueeze(1)).squeeze(1).to(losses.dtype), 0.0)
    found = part.peers.gather_copies(torch.stack((log_sums, at_target)))
    log_sums = found[:, 0].logsumexp(0)
    losses.copy_(torch.where(counts, log_sums - found[:, 1].sum(0), 0.0))
    if with_gradients:
        columns = torch.where(mine, own, torch.where(counts, NOT_HERE, IGNORE))
        backward(logits, columns, torch.ones_like(losses), log_sums, logits, None, IGNORE)


@functools.cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from quack.cross_entropy import cross_entropy_bwd_out, cross_entropy_fwd_out
    except (ImportError, RuntimeError, OSError) as error:  # of CUDA's libraries as well
        raise ConfigError(
            f"loss=fused needs quack-kernels, which cannot be used here ({type(error).__name__}: {error}): "
            f"pip install -e '.[kernels]', or use loss=chunked"
        ) from error
    return cross_entropy_fwd_out, cross_entropy_bwd_out


# How many logits `chunked` computes at a time: 2,093 rows of a vocabulary of 128,256. In bf16 they and their copy in
# fp32 take 1.5 GiB. Fewer rows would make the head slower: for each chunk the sum of the weight's gradients is read and
# written once, and below about 700 rows that takes a GPU longer than the product that is added to it. `fused` needs no
# copy in fp32, and computes twice as many.
CHUNK_LOGITS = 2**28

# Write the losses of rows, given their logits and targets, and gradients into the logits if they are asked for
Rows = Callable[[Tensor, Tensor, Tensor, bool], None]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    loss: str = "chunked",
    reduction: str = "sum",
    chunk_rows: int = 0,
    part: VocabularyPart | None = None,
) -> Tensor:
    """Cross-entropy in nats between `targets` and the logits `hidden @ weight.T`.

    `hidden`: [..., D]. `weight`: [V, D], in the same dtype. `targets`: int64 [...], from 0 to V - 1; -100 does not
    count. `reduction`: "sum" over the targets that count, or "mean".
    `loss` says how it is computed, with equal results but for rounding:
      "full": all logits at once. Only this one can be differentiated twice.
      "chunked": the logits of some rows at a time, on every device and in every dtype. If a gradient is needed, the
        forward pass computes it as well, so that nothing is computed twice; that of the weight adds up in fp32.
      "fused": as chunked, and kernels of quack-kernels turn logits into losses and gradients. On NVIDIA GPUs from
        Hopper on, in 16 bits, with V, or each rank's part of it, a multiple of 8.
    `chunk_rows`: how many rows at a time; 0: as many as suit the vocabulary.
    `part`: `vocabulary_part_of(head)`. With it `weight` has this rank's tokens, and ranks exchange two or three numbers
      a row, never logits; `targets` are of the whole vocabulary and the whole sequence.

    Returns:
        A scalar, in fp32 or in the dtype of `hidden` if that is wider.

    Raises:
        ConfigError: "fused" cannot run here, or a gradient of "chunked" or "fused" is differentiated, or `weight` has
            other tokens than `part`, or a target is no token (on GPUs CUDA asserts it; "full" with `part` gives nan).
    """
    if part is not None and len(weight) != part.tokens:
        raise ConfigError(
            f"linear_cross_entropy: the weight has {len(weight)} tokens, and this rank's part of the vocabulary "
            f"{part.tokens}: in hooks weights may be whole; compute the loss in a step"
        )
    hidden = hidden if part is None else part.whole_sequence(hidden)
    if loss == "full":
        logits = F.linear(hidden, weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if part is not None:
            counts = targets.flatten() != IGNORE
            losses = part.losses(logits.flatten(0, -2), targets.flatten())
            losses = torch.where(_within(targets.flatten(), part.whole), losses, torch.nan)
            summed: Tensor = torch.where(counts, losses, 0.0).sum() / (1 if reduction == "sum" else counts.sum())
            return summed
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction=reduction)
    hidden, weight = _as_autocast_has_it(hidden), _as_autocast_has_it(weight)
    needs = torch.is_grad_enabled()
    where = ("", 0, 1, 0) if part is None else (part.peers.name, part.peers.rank, part.peers.size, part.whole)
    total: Tensor
    total, _, _ = _summed(
        hidden.flatten(0, -2), weight, targets.flatten(), loss, chunk_rows,
        needs and hidden.requires_grad, needs and weight.requires_grad, *where,
    )  # fmt: skip
    return total if reduction == "sum" else total / (targets != IGNORE).sum()


def _as_autocast_has_it(tensor: Tensor) -> Tensor:
    """The tensor in the dtype in which autocast, where it is on, lets a linear layer compute."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


# An operator of its own, so that torch.compile keeps it whole: one node in the graph, whose chunks nothing reorders and
# whose sum of gradients is updated in place. Its gradients are further results, which the backward pass scales.
@torch.library.custom_op("shardwise::linear_cross_entropy", mutates_args=())
def _summed(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss: str,
    chunk_rows: int,
    needs_hidden: bool,
    needs_weight: bool,
    group: str = "",
    rank: int = 0,
    ranks: int = 1,
    vocabulary: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss of `hidden` [N, D], and its gradients. One that is not needed is empty.

    That of the weight has the dtype of the loss, since it is a sum over chunks. `group`, `rank`, `ranks`: the peers
    that divide the `vocabulary`; "": nobody does.
    """
    part = VocabularyPart(Peers(group, rank, ranks), vocabulary) if group else None
    _check(targets, vocabulary or len(weight))
    rows = _rows_of(loss, hidden, weight, part)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    losses = hidden.new_empty(len(hidden), dtype=wide)
    hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
    weight_gradient = torch.empty_like(weight, dtype=wide) if needs_weight else None
    most = CHUNK_LOGITS * (2 if loss == "fused" else 1)
    step = chunk_rows or rows_of_a_chunk(len(hidden), len(weight) if part is None else part.most, most)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), step):
            chunk = slice(start, start + step)
            gradient = None if hidden_gradient is None else hidden_gradient[chunk]
            arguments = (hidden[chunk], weight, targets[chunk], losses[chunk], gradient, weight_gradient)
            _compute_chunk(*arguments, rows=rows, is_first=start == 0)
    if weight_gradient is not None and not len(hidden):
        weight_gradient.zero_()
    none = hidden.new_empty(0)
    return (
        losses.sum(),
        none if hidden_gradient is None else hidden_gradient,
        none.clone() if weight_gradient is None else weight_gradient,
    )


@_summed.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss: str,
    chunk_rows: int,
    needs_hidden: bool,
    needs_weight: bool,
    group: str = "",
    rank: int = 0,
    ranks: int = 1,
    vocabulary: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=wide),
        torch.empty_like(hidden) if needs_hidden else hidden.new_empty(0),
        torch.empty_like(weight, dtype=wide) if needs_weight else hidden.new_empty(0),
    )


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, weight, _, loss, *needs = inputs[:7]
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)  # else the gradients of the gradients would be made, of zeros
    ctx.call = loss, weight.dtype, *needs[1:]


def _scale_gradients(ctx: Any, scale: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    loss, weight_dtype, needs_hidden, needs_weight = ctx.call
    if torch.is_grad_enabled() or any(gradient is not None for gradient in of_gradients):
        raise ConfigError(
            f"a gradient of loss={loss} is differentiated (create_graph=True), and it is computed in the forward "
            f"pass: use loss=full"
        )
    hidden, weight = ctx.saved_tensors
    return (
        _scaled(hidden, scale, hidden.dtype) if needs_hidden and scale is not None else None,
        _scaled(weight, scale, weight_dtype) if needs_weight and scale is not None else None,
        *[None] * 9,
    )


_summed.register_autograd(_scale_gradients, setup_context=_keep_gradients)


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale * gradient`, rounded once, and without a copy in fp32."""
    if gradient.is_cuda and type(gradient) is Tensor:  # a compiler that traces this has tensors of its own
        return _compiled_scaling()(gradient, scale, dtype)
    # A scale without dims would first be rounded to the dtype of the gradient: an error of all its elements alike.
    return torch.mul(gradient, scale.reshape(1, 1), out=torch.empty_like(gradient, dtype=dtype))


@functools.cache
def _compiled_scaling() -> Callable[..., Tensor]:
    """Without a compiler two dtypes take three times as long: a kernel that loads one element at a time."""

    def scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return (gradient * scale.reshape(1, 1)).to(dtype)

    return torch.compile(scaled, dynamic=True)


def _within(targets: Tensor, vocabulary: int) -> Tensor:
    """Which targets are of the vocabulary, or do not count."""
    return (targets == IGNORE) | ((targets >= 0) & (targets < vocabulary))


def _check(targets: Tensor, vocabulary: int) -> None:
    """Refuse other targets, without waiting for a GPU."""
    good = _within(targets, vocabulary)
    message = f"targets are from 0 to {vocabulary - 1}, and -100 where none counts"
    if targets.is_cuda:
        torch._assert_async(good.all(), message)
    elif not good.all():
        raise ConfigError(f"a target is {targets[~good][0]}: {message}")


def rows_of_a_chunk(rows: int, vocabulary: int, logits: int) -> int:
    """How many rows are computed at a time: chunks of one size, a multiple of 128 rows, with no more than `logits`."""
    most = max(logits // vocabulary // 128, 1) * 128
    chunks = max(-(-rows // most), 1)
    return max(-(-rows // chunks // 128), 1) * 128


def _compute_chunk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    losses: Tensor,
    hidden_gradient: Tensor | None,
    weight_gradient: Tensor | None,
    *,
    rows: Rows,
    is_first: bool,
) -> None:
    """Write the losses of some rows and the gradient of their hidden states, and add to that of the weight.

    A function of its own, so that the logits of one chunk are gone before the next are made.
    """
    logits = torch.mm(hidden, weight.T)
    rows(logits, targets, losses, hidden_gradient is not None or weight_gradient is not None)
    if hidden_gradient is not None:
        torch.mm(logits, weight, out=hidden_gradient)
    if weight_gradient is not None:
        _add_product(weight_gradient, logits.T, hidden, is_first)


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """`total += left @ right`, without rounding to the dtype of the two; the first product replaces what is there."""
    beta = 0 if is_first else 1
    if left.is_cuda and total.dtype != left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=beta)


def _plain_rows(
    logits: Tensor, targets: Tensor, losses: Tensor, with_gradients: bool, part: VocabularyPart | None = None
) -> None:
    """Cross-entropy of rows, computed in the dtype of `losses`: if it is wider, on one more copy of the logits.

    `part`: of the vocabulary that this rank's logits are of.
    """
    counts, at = targets != IGNORE, targets.clamp(min=0).unsqueeze(1)
    highest = logits.amax(1, keepdim=True).to(losses.dtype)
    mine = None
    if part is not None:
        highest = part.peers.reduce(highest, "max")
        mine, at = part.own(at)
    below = torch.sub(logits, highest, out=logits if logits.dtype == losses.dtype else None)
    at_target = below.gather(1, at)
    powers = below.exp_()
    sums = powers.sum(1, keepdim=True)
    own_powers = at_target.exp()
    if part is not None and mine is not None:
        at_target = torch.where(mine, at_target, 0.0)
        sums, at_target = part.peers.reduce(torch.stack((sums, at_target)), "sum").unbind()
    losses.copy_(torch.where(counts, (sums.log() - at_target).squeeze(1), 0.0))
    if not with_gradients:
        return
    counts = counts.unsqueeze(1)
    torch.mul(powers, counts / sums, out=logits)
    at_row = own_powers / sums - (1.0 if mine is None else mine.to(sums.dtype))
    logits.scatter_(1, at, (at_row * counts).to(logits.dtype))


def _rows_of(loss: str, hidden: Tensor, weight: Tensor, part: VocabularyPart | None) -> Rows:
    if loss == "chunked":
        return functools.partial(_plain_rows, part=part)
    if loss != "fused":
        raise ConfigError(f"loss={loss}: must be one of full, chunked, fused")
    vocabulary = len(weight)
    if not hidden.is_cuda or hidden.itemsize != 2 or vocabulary % 8:
        raise ConfigError(
            f"loss=fused runs on a GPU, in 16 bits, with a vocabulary, or a rank's part of it, that is a multiple of "
            f"8; here are {hidden.device.type}, {str(hidden.dtype).removeprefix('torch.')} and {vocabulary}: use "
            f"loss=chunked"
        )
    return fused_rows if part is None else functools.partial(fused_rows_of_a_part, part=part)
