"""Chooses the kernels of attention and of the loss: `attention=` and `loss=`. nn/ has them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from shardwise.config.schema import AttentionKernel, RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.hardware import WHERE, arguments_of, for_module, installed, vendor
from shardwise.plan.parallel_axes import context_parallel_method
from shardwise.plan.plan import Choice, Host, Plan
from shardwise.protocols import optional

# Chooses which kernel computes attention: `attention=`. nn/attention.py runs it.
#
# `obstacle` says why a kernel cannot run. A word of the user's is refused with it, and `auto` passes over
# FlashAttention 4 with it. Then torch chooses by the tensors: on the CPU its one kernel, on Hopper and Blackwell GPUs
# cuDNN, on Ampere and Ada GPUs FlashAttention 2, for 32 bits the memory-efficient kernel.

FLASH_ATTENTION_4 = "4.0.0b36"  # nn/attention_kernels.py calls its private functions: exactly this version
_CUDNN = (9, 15, 1)  # earlier ones read beyond the end of sequences whose length is no multiple of 128
_16_BITS = ("bfloat16", "float16")


@dataclass(frozen=True)
class Facts:
    """What decides whether a kernel can run. None: it is not known, and speaks against no kernel."""

    accelerator: str  # a key of WHERE
    capability: tuple[int, int] | None  # of the GPUs
    dtype: str  # of queries and keys
    deterministic: bool
    documents: bool  # whether batches hold documents to keep apart
    head_size: int | None = None
    flash_attention_4: str | None = None  # its version; None: it is not installed
    cudnn: tuple[int, ...] | None = None  # its version
    context_by_keys: bool = False  # whether attention is of a part of each sequence with all of its keys


def choose_attention(config: RunConfig, host: Host, accelerator: str) -> Choice:
    """The kernel that the config names, or for `auto` FlashAttention 4 if it can run, else torch's choice.

    Raises:
        ConfigError: the config names a kernel that cannot run.
    """
    return choose_kernel(config.attention, gather_facts(config, host, accelerator))


def choose_kernel(word: AttentionKernel, facts: Facts) -> Choice:
    """The same by the facts."""
    if word != "auto":
        if (against := obstacle(word, facts)) is not None:
            raise ConfigError(f"attention={word}: {against}; use {_others(word, facts)}")
        return Choice(word, "")
    against = obstacle("fa4", facts)
    if facts.capability is None and against is None:
        against = "the GPUs' compute capability is not known here; each run decides by the GPUs that it finds"
    if against is None:
        return Choice("fa4", "FlashAttention 4 is installed and can run")
    return Choice("sdpa", f"torch chooses by the tensors; fa4 cannot run: {against}")


def check_takes_attention(plan: Plan, module: Any) -> Plan:
    """The Plan for a LightningModule or its class, which may not let the run choose what computes attention.

    Raises:
        ConfigError: the user named a kernel, and the module has no `choose_attention`.
    """
    return for_module(plan, "attention", optional(module, "choose_attention") is not None, otherwise="own")


def explain_attention(plan: Plan) -> list[str]:
    """A line for the user about what `auto` became on a GPU."""
    if plan.chosen_attention.name == "own" or not plan.chosen_attention.reason or plan.accelerator == "cpu":
        return []
    return [f"attention={plan.chosen_attention.name}: {plan.chosen_attention.reason}"]


def obstacle(kernel: str, facts: Facts) -> str | None:
    """Why `kernel` cannot run, as a part of a sentence; None: nothing that is known speaks against it."""
    if facts.context_by_keys and kernel in ("cudnn", "flex"):
        return "strategy.context_parallel_method=keys has fewer queries than keys, which this kernel does not align"
    if facts.context_by_keys and facts.documents and kernel in ("flash", "fa4") and facts.accelerator != "cpu":
        return "strategy.context_parallel_method=keys keeps documents apart by a mask, and this kernel takes none"
    rules = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "flex": _flex, "fa4": _fa4}
    rule = rules.get(kernel)
    return None if rule is None else rule(facts)  # math takes everything


def _others(kernel: str, facts: Facts) -> str:
    fit = [word for word in ("cudnn", "flash", "efficient") if word != kernel and obstacle(word, facts) is None]
    return " or ".join(f"attention={word}" for word in (*fit[:1], "auto"))


def _fa4(facts: Facts) -> str | None:
    major = None if facts.capability is None else facts.capability[0]
    limit = 128 if major == 10 else 256
    if facts.accelerator != "cuda":
        return f"FlashAttention 4 runs on Hopper and Blackwell GPUs, and this run is on {WHERE[facts.accelerator]}"
    if major not in (None, 9, 10):
        return f"FlashAttention 4 runs on GPUs of compute capability 9.x and 10.x, and these have {_of(facts)}"
    if facts.dtype not in _16_BITS:
        return f"FlashAttention 4 computes in 16 bits, and the precision computes in {facts.dtype}"
    if not _takes(facts, of=8, most=limit):
        return f"FlashAttention 4 takes heads of a multiple of 8, up to {limit}, and the model's have {facts.head_size}"
    if facts.flash_attention_4 != FLASH_ATTENTION_4 and facts.capability is not None:  # that of a login node is not
        found = f"where {facts.flash_attention_4} is" if facts.flash_attention_4 else "which is not"
        return f'it needs the package flash-attn-4 {FLASH_ATTENTION_4}, {found} installed: pip install -e ".[kernels]"'
    return None


def _cudnn(facts: Facts) -> str | None:
    if facts.accelerator != "cuda":
        gpus = "GPUs" if facts.accelerator == "cpu" else WHERE["cuda"]
        return f"cuDNN runs on {gpus}, and this run is on {WHERE[facts.accelerator]}"
    if facts.capability is not None and facts.capability < (8, 0):
        return f"cuDNN's attention needs compute capability 8.0, and these GPUs have {_of(facts)}"
    if facts.dtype not in _16_BITS:
        return f"cuDNN's attention computes in 16 bits, and the precision computes in {facts.dtype}"
    if facts.deterministic:
        return "with deterministic=true torch does not run it: its backward pass adds in any order"
    if facts.documents:
        return "torch has no cuDNN kernel that keeps documents apart, as data.document_mask=true asks for"
    if not _takes(facts, of=8, most=128):
        return f"cuDNN's attention takes heads of a multiple of 8, up to 128, and the model's have {facts.head_size}"
    if facts.cudnn is not None and facts.cudnn < _CUDNN:
        have, need = (".".join(map(str, numbers)) for numbers in (facts.cudnn, _CUDNN))
        return f"cuDNN {have} is wrong for some lengths, and {need} is the first that is not: take a newer torch"
    return None


def _flash(facts: Facts) -> str | None:
    if facts.accelerator == "cpu":
        return None  # torch's CPU kernel of this name takes every dtype and any mask
    if facts.capability is not None and facts.capability < (8, 0):
        return f"FlashAttention 2 needs compute capability 8.0, and these GPUs have {_of(facts)}"
    if facts.dtype not in _16_BITS:
        return f"FlashAttention 2 computes in 16 bits, and the precision computes in {facts.dtype}"
    by_8 = facts.documents or facts.context_by_keys  # then it is torch's variable-length attention
    if not _takes(facts, of=8 if by_8 else 1, most=256):
        rule = "a multiple of 8, up to 256," if by_8 else "at most 256"
        return f"FlashAttention 2 takes heads of {rule} and the model's have {facts.head_size}"
    return None


def _efficient(facts: Facts) -> str | None:
    if facts.accelerator == "cpu":
        return "torch's memory-efficient kernel runs on GPUs, and this run is on the CPU"
    if facts.dtype == "float64":
        return "torch's memory-efficient kernel does not compute in float64"
    if facts.dtype == "bfloat16" and facts.capability is not None and facts.capability < (8, 0):
        return f"torch's memory-efficient kernel needs compute capability 8.0 for bfloat16, and these have {_of(facts)}"
    of = 8 if facts.dtype in _16_BITS else 4
    if not _takes(facts, of=of, most=None):
        return (
            f"torch's memory-efficient kernel takes heads of a multiple of {of}, and the model's have {facts.head_size}"
        )
    return None


def _flex(facts: Facts) -> str | None:
    if facts.accelerator == "cpu":
        return "flex_attention has no backward pass on the CPU"
    if facts.capability is not None and facts.capability < (8, 0):
        return f"flex_attention is tested from compute capability 8.0 on, and these GPUs have {_of(facts)}"
    if facts.dtype == "float64":
        return "flex_attention does not compute in float64"
    if facts.head_size is not None and facts.head_size < 16:
        return f"flex_attention takes heads of at least 16, and the model's have {facts.head_size}"
    return None


def _takes(facts: Facts, *, of: int, most: int | None) -> bool:
    size = facts.head_size
    return size is None or (size % of == 0 and (most is None or size <= most))


def _of(facts: Facts) -> str:
    assert facts.capability is not None
    return ".".join(map(str, facts.capability))


def gather_facts(config: RunConfig, host: Host, accelerator: str) -> Facts:
    """What is known before a rank starts. Packages are looked up and not imported."""
    cudnn = installed("nvidia-cudnn-cu13") or installed("nvidia-cudnn-cu12")
    data = config.data if isinstance(config.data, dict) else {}
    return Facts(
        accelerator=vendor(accelerator, host),
        capability=host.gpu_capability,
        dtype=config.precision.compute_dtype,
        deterministic=config.deterministic,
        documents=bool(data.get("document_mask")),
        head_size=_head_size(config.module),
        flash_attention_4=installed("flash-attn-4") if find_spec("cutlass") else None,  # it is written in CuTe
        context_by_keys=context_parallel_method(config) == "keys",
        cudnn=None if cudnn is None else tuple(int(number) for number in cudnn.split(".")[:3] if number.isdigit()),
    )


def _head_size(module: Any) -> int | None:
    """By the arguments of the module or of its model; None: they do not say."""
    sizes = arguments_of(module)
    dim, heads = sizes.get("dim"), sizes.get("n_heads")
    return dim // heads if isinstance(dim, int) and isinstance(heads, int) and heads > 0 else None


# Chooses how the loss of a language model is computed: `loss=`. nn/linear_cross_entropy.py does it.

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
