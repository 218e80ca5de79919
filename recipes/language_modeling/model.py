"""A Llama-shaped decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.nn.attention import SDPA, Layout, cached_attention, causal_attention, document_layout, whole_layout
from shardwise.nn.generation import KeyValueCache, LayerCache
from shardwise.nn.numerics import no_autocast_in_16_bits


class ResidualLinear(nn.Linear):
    """A projection whose output is added to the residual stream. It starts smaller by 1/sqrt(2 * n_layers)."""


class RotaryEmbedding(nn.Module):
    """Rotates the two halves of each head (the Hugging Face layout) by position; tables are fp32, [T, head_dim / 2].

    Every attention owns its tables. As arguments of a block, strategies would cast them to the compute dtype.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float, scaling: Mapping[str, float] | None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self.register_buffer("cos", torch.empty(max_seq_len, head_dim // 2, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(max_seq_len, head_dim // 2, dtype=torch.float32), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fills the tables on their device, with the same bits on every device."""
        if self.cos.is_meta:
            return
        # The angles are computed on the CPU in fp64: in fp32 those at position 8191 would be wrong by 5e-4.
        positions = torch.arange(len(self.cos), dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, rotary_frequencies(self.head_dim, self.theta, self.scaling))
        self.cos = angles.cos().to(self.cos.device, torch.float32)
        self.sin = angles.sin().to(self.sin.device, torch.float32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos.dtype != torch.float32:  # module.bfloat16(), as DeepSpeed calls it, must not round positions
            self.cos, self.sin = torch.empty_like(self.cos).float(), torch.empty_like(self.sin).float()
            self.reset_buffers()
        return self

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[B, T, H, head_dim] -> the same shape and dtype, rotated in fp32 or better.

        `positions`: int64 [B, T]; None: 0 to T - 1 in every row.
        """
        at = slice(x.shape[1]) if positions is None else positions
        cos, sin = self.cos[at].unsqueeze(-2), self.sin[at].unsqueeze(-2)
        first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention in which n_heads / n_kv_heads queries share one key and value."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = ResidualLinear(n_heads * self.head_dim, dim, bias=False)
        self.rotary = rotary
        self.kernel = SDPA  # what computes attention: nn/attention.py

    def forward(self, x: Tensor, cache: LayerCache | None = None, layout: Layout | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]. With a cache, the tokens come after those that are in it."""
        # The number of heads comes from the weights: under tensor parallelism a rank holds only some heads.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        at = cache.positions if cache is not None else None if layout is None else layout.get("positions")
        q, k, v = self.rotary(q, at).transpose(1, 2), self.rotary(k, at).transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            y = cached_attention(q, *cache.add(k, v))
        else:
            y = causal_attention(q, k, v, layout, self.kernel)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = ResidualLinear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class TransformerBlock(nn.Module):
    """The layer that repeats. It is sharded, compiled and checkpointed as one unit."""

    def __init__(self, attention: Attention, feed_forward: FeedForward, dim: int, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, cache: LayerCache | None = None, layout: Layout | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D], in the dtype of x and the weights. `layout`: of packed documents."""
        # If weights and input are in 16 bits, autocast would cast every norm and the residual stream to fp32 and back.
        # F.rms_norm computes its statistics in fp32 without it.
        with no_autocast_in_16_bits(self.ffn_norm.weight):
            x = x + self.attention(self.attention_norm(x), cache, layout)
            out: Tensor = x + self.feed_forward(self.ffn_norm(x))
            return out


class Transformer(nn.Module):
    """Computes hidden states from tokens. It owns `head` and does not call it: the loss uses its weight."""

    _no_split_modules: ClassVar[list[str]] = ["TransformerBlock"]
    tensor_parallel_layers: ClassVar[dict[str, str]] = {
        "embedding": "embedding_by_sample",
        "blocks.*.attention_norm": "norm",
        "blocks.*.attention": "gather",
        "blocks.*.attention.wq": "column",
        "blocks.*.attention.wk": "column",
        "blocks.*.attention.wv": "column",
        "blocks.*.attention.wo": "row",
        "blocks.*.ffn_norm": "norm",
        "blocks.*.feed_forward": "gather",
        "blocks.*.feed_forward.w1": "column",
        "blocks.*.feed_forward.w3": "column",
        "blocks.*.feed_forward.w2": "row",
        "norm": "norm",
        "head": "head",
    }

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        ffn_dim: int,
        max_seq_len: int,
        rope_theta: float = 500000.0,
        rope_scaling: Mapping[str, float] | None = None,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "dim": dim, "n_layers": n_layers, "n_heads": n_heads,
                 "n_kv_heads": n_kv_heads, "ffn_dim": ffn_dim, "max_seq_len": max_seq_len}  # fmt: skip
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"model.{name}={value}: must be at least 1")
        if dim % (2 * n_heads):
            near = max(1, round(dim / (2 * n_heads))) * 2 * n_heads
            fitting = [n for n in range(n_kv_heads, dim + 1, n_kv_heads) if dim % (2 * n) == 0]
            heads = [f" or model.n_heads={n}" for n in sorted(fitting, key=lambda n: abs(n - n_heads))[:1]]
            raise ConfigError(
                f"model.{dim=} is not a multiple of 2 * model.n_heads = {2 * n_heads}; use model.dim={near}"
                f"{''.join(heads)}"
            )
        if n_heads % n_kv_heads:
            raise ConfigError(f"{n_heads=} is not a multiple of {n_kv_heads=}; use a divisor of {n_heads}")
        scaling = None if rope_scaling is None else {name: float(value) for name, value in rope_scaling.items()}
        self.vocab_size, self.dim, self.n_layers, self.max_seq_len = vocab_size, dim, n_layers, max_seq_len
        self.tie_embeddings, self.head_dim, self.attention_kernel = tie_embeddings, dim // n_heads, SDPA
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList()
        for _ in range(n_layers):
            rotary = RotaryEmbedding(dim // n_heads, max_seq_len, rope_theta, scaling)
            attention = Attention(dim, n_heads, n_kv_heads, rotary)
            self.blocks.append(TransformerBlock(attention, FeedForward(dim, ffn_dim), dim, norm_eps))
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        block_matmul = dim * (dim // n_heads) * 2 * (n_heads + n_kv_heads) + 3 * dim * ffn_dim
        self._matmul_parameters = n_layers * block_matmul + vocab_size * dim
        for module in self.modules():
            self.init_module_weights(module)

    def forward(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        *,
        documents: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """int64 [B, T] -> final hidden states [B, T, D]; no logits. A cache says where in the texts the tokens are.

        `documents`: int64 [B, T], the number of each token's document. Then each document is computed as if it were
        alone. `starts`: their `document_starts`, if the data has made them.
        """
        if tokens.shape[1] > self.max_seq_len:
            raise ValueError(
                f"sequence of {tokens.shape[1]} tokens is longer than max_seq_len={self.max_seq_len}; "
                "shorten the sequence or raise max_seq_len"
            )
        x: Tensor = self.embedding(tokens)
        layout: Layout | None
        if documents is not None:
            layout = document_layout(documents, starts, x.dtype, self.head_dim, self.attention_kernel)
        else:
            layout = whole_layout(tokens, x.dtype, self.head_dim, self.attention_kernel) if cache is None else None
        for i, block in enumerate(self.blocks):
            # Only what there is: a hook on a block, and what is compiled of it, sees no more.
            more = {"layout": layout} if layout is not None else {"cache": cache.layers[i]} if cache is not None else {}
            x = block(x, **more)
        with no_autocast_in_16_bits(self.norm.weight):  # as in the blocks
            hidden: Tensor = self.norm(x)
            return hidden

    def choose_attention(self, kernel: str) -> None:
        """Let every layer compute attention with this kernel of `causal_attention`."""
        self.attention_kernel = kernel
        for module in self.modules():
            if isinstance(module, Attention):
                module.kernel = kernel

    @torch.no_grad()
    def init_module_weights(self, module: nn.Module) -> None:
        """Fills the weights of `module`, without its children, in place: normal(0.02), less on the residual stream."""
        if module is self.head and self.tie_embeddings:
            # Each of the two got its own parameter when it left the meta device. This ties them again.
            self.head.weight = self.embedding.weight
        elif isinstance(module, nn.Linear | nn.Embedding):
            shrink = math.sqrt(2 * self.n_layers) if isinstance(module, ResidualLinear) else 1.0
            nn.init.normal_(module.weight, std=0.02 / shrink)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, RotaryEmbedding):
            module.reset_buffers()

    def count_parameters(self) -> int:
        """The number of parameters before sharding. A tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def training_flops(self, sequences: int, length: int) -> int:
        """Floating-point operations that a forward and its backward need: docs/metrics.md has the formula.

        A backward counts as two forwards, and recomputing does not count. The products with weights include those with
        the head at every position, and not the embedding's lookup. Attention has two products, in which position t
        looks at t + 1 positions.
        """
        weights = 2 * self._matmul_parameters * length
        attention = 2 * 2 * self.n_layers * self.dim * (length * (length + 1) // 2)
        return 3 * sequences * (weights + attention)


def rotary_frequencies(head_dim: int, theta: float, scaling: Mapping[str, float] | None) -> Tensor:
    """Radians per position, fp64 [head_dim / 2] on the CPU. `scaling` stretches long wavelengths, as in Llama 3.1."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies = theta**-exponents
    if scaling is None:
        return frequencies
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: not changed; 0: slower by `factor`
    return frequencies * (keep + (1 - keep) / scaling["factor"])
