"""Chooses how the loss of a language model is computed: `loss=`. nn/linear_cross_entropy.py does it."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.accelerator import vendor
from shardwise.plan.choices import arguments_of, for_module, installed
from shardwise.plan.plan import Choice, Host, Plan
from shardwise.protocols import optional

# Above this many logits in a micro-batch `auto` does not hold them at once. It is as many as a chunk has, so that below
# it nothing would be saved: a micro-batch of gpt2_124m stays below, of 4,096 tokens, and one sequence of llama3_8b is
# four times as large. In eager mode training keeps about 12 bytes for each logit, 3 GiB at this limit.
LARGE_LOGITS = 2**28

_CHUNKED = "use loss=chunked"


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """What keeps `fused` from running."""

    reason: str
    remedy: str


def choose_loss(config: RunConfig, host: Host, accelerator: str) -> Choice:
    """The way that the config names, or for `auto` the best one of those that can run.

    Raises:
        ConfigError: `fused` is named and cannot run.
    """
    shape = _shape_of_logits(config)
    obstacle = _obstacle_to_fused(config, host, accelerator, None if shape is None else shape[1])
    if config.loss == "fused" and obstacle is not None:
        raise ConfigError(f"loss=fused: {obstacle.reason}; {obstacle.remedy}")
    if config.loss != "auto":
        return Choice(config.loss, "")
    if shape is None:
        return Choice("full", "the module's config names no vocab_size and max_seq_len, from which logits are counted")
    rows, vocabulary = shape
    logits = f"a micro-batch has {rows:,} × {vocabulary:,} logits"
    if rows * vocabulary <= LARGE_LOGITS:
        return Choice("full", f"{logits}, few enough to hold them at once")
    if obstacle is None and host.gpu_capability is None:
        unknown = "the GPUs' compute capability is not known here; each run decides by the GPUs that it finds"
        obstacle = Obstacle(unknown, _CHUNKED)
    if obstacle is None:
        return Choice("fused", f"{logits}, too many to hold them at once")
    return Choice("chunked", f"{logits}, too many to hold them at once; fused cannot run: {obstacle.reason}")


def check_takes_loss(plan: Plan, module: Any) -> Plan:
    """The Plan for a LightningModule or its class, which may not let the run choose its loss.

    Raises:
        ConfigError: the user named a way, and the module has no `choose_loss`.
    """
    return for_module(plan, "loss", optional(module, "choose_loss") is not None, otherwise="full")


def explain_loss(plan: Plan) -> list[str]:
    """A line for the user, where `auto` does not hold all logits at once."""
    if plan.chosen_loss.name == "full" or not plan.chosen_loss.reason or plan.stage == "predict":
        return []
    return [f"loss={plan.chosen_loss.name}: {plan.chosen_loss.reason}"]


def _shape_of_logits(config: RunConfig) -> tuple[int, int] | None:
    """How many rows of logits a micro-batch has at most, and the vocabulary, by the arguments of the module or of its
    model; None: they do not say."""
    sizes = arguments_of(config.module)
    vocabulary, longest = sizes.get("vocab_size"), sizes.get("max_seq_len")
    if not isinstance(vocabulary, int) or not isinstance(longest, int):
        return None
    length = config.data.get("sequence_length") if isinstance(config.data, dict) else None
    return config.micro_batch_size * (min(longest, length) if isinstance(length, int) else longest), vocabulary


def _obstacle_to_fused(config: RunConfig, host: Host, accelerator: str, vocabulary: int | None) -> Obstacle | None:
    """What keeps QuACK's kernel from running, as far as this machine can tell; None: nothing."""
    if (kind := vendor(accelerator, host)) != "cuda":
        return Obstacle("its kernel runs on " + ("GPUs alone" if kind == "cpu" else "NVIDIA's GPUs alone"), _CHUNKED)
    dtype = config.precision.compute_dtype
    if dtype not in ("bfloat16", "float16"):
        name = config.precision.name
        return Obstacle(
            f"its kernel takes 16 bits, and precision={name} computes in {dtype}", f"{_CHUNKED}, or precision=bf16"
        )
    parts = vars(config.strategy).get("tensor_parallel_size", 1)
    if vocabulary is not None and vocabulary % (8 * parts):
        above = -(-vocabulary // (8 * parts)) * 8 * parts
        multiple = "8" if parts == 1 else f"8 · strategy.tensor_parallel_size = {8 * parts}"
        return Obstacle(
            f"its kernel takes a vocabulary that is a multiple of {multiple}, and vocab_size={vocabulary} is none",
            f"{_CHUNKED}, or a vocab_size of {above}",
        )
    if host.gpu_capability is None:  # a login node, say: what it has says nothing of the machine that will run
        return None
    if host.gpu_capability < (9, 0):
        found = ".".join(map(str, host.gpu_capability))
        return Obstacle(
            f"its kernel needs GPUs of compute capability 9.0 (Hopper) or later, and {host.gpu or 'this GPU'} has "
            f"{found}",
            _CHUNKED,
        )
    if not has_quack():
        return Obstacle("quack-kernels is not installed: pip install -e '.[kernels]'", _CHUNKED)
    return None


def has_quack() -> bool:
    """Whether quack-kernels is installed."""
    return installed("quack-kernels") is not None
