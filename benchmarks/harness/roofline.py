"""The shortest step that a Llama could make: every part at the best speed that its kind reaches alone on an H200, one
after the other, with no communication that anything waits for and no idle time.

Bytes are those of fused passes: a tensor is read or written once by each pass that needs it, activations in 16 bits,
masters, gradients and moments in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Measured on an H200: matrix products of 8192³ in bf16, FlashAttention 4, a copy on the device (read plus written).
# Products in fp8 were not measured: their peak is twice that of bf16, and casts to fp8 are not counted.
MATMUL, FP8_MATMUL = 790e12, 1580e12  # operations a second
ATTENTION = {64: 522e12, 128: 600e12}  # by the width of a head; other widths as 128
MEMORY = 4.3e12  # bytes a second
CEILINGS = {
    "matmul_tflops": MATMUL / 1e12, "fp8_matmul_tflops": FP8_MATMUL / 1e12,
    "attention_tflops": {head: rate / 1e12 for head, rate in ATTENTION.items()},
    "memory_tb_per_second": MEMORY / 1e12,
}  # fmt: skip
# A master becomes a weight in 16 bits; a gradient in 16 bits becomes one in fp32, and without masters again one in 16.
CAST_BYTES = 4 + 2


@dataclass(frozen=True)
class Work:
    """What one rank does in one step."""

    model: Mapping[str, Any]  # the arguments of recipes.language_modeling.model.Transformer
    samples: float  # below 1 where ranks divide a sample
    length: int
    shards: int = 1  # over which masters, gradients and moments are divided
    fp8: bool = False  # the matrix products of the layers
    optimizer_bytes: int = 32  # see `update_bytes`
    recompute: str = "none"  # "selective": all but matrix products and attention; "full": everything
    recomputed_layers: float = 1.0  # the share of the layers

    @property
    def tokens(self) -> float:
        return self.samples * self.length


def update_bytes(*, in_8_bits: bool, weights_in_16_bits: bool) -> int:
    """Bytes for each parameter that a rank updates. `in_8_bits`: the moments.

    AdamW reads masters, gradients and two moments and writes all but the gradients; the norm for clipping reads the
    gradients once more.
    """
    weight, moment = 2 if weights_in_16_bits else 4, 1 if in_8_bits else 4
    return (weight + weight + 2 * moment) + (weight + 2 * moment) + weight


def head_of(model: Mapping[str, Any]) -> int:
    """The width of a head of the attention."""
    return int(model["dim"] // model["n_heads"])


def attention_rate(model: Mapping[str, Any]) -> float:
    """Operations a second that attention reaches at best with heads of this width."""
    return ATTENTION.get(head_of(model), ATTENTION[128])


def layer_parameters(model: Mapping[str, Any]) -> int:
    """Those of a layer's matrices."""
    head = head_of(model)
    return int(2 * model["dim"] * head * (model["n_heads"] + model["n_kv_heads"]) + 3 * model["dim"] * model["ffn_dim"])


def attention_operations(work: Work) -> float:
    """Of one forward pass through one layer: two products, in which position t looks at t + 1 positions."""
    return 4 * work.model["dim"] * work.samples * (work.length * (work.length + 1) // 2)


def layer_bytes(model: Mapping[str, Any]) -> tuple[int, int]:
    """What the passes between matrix products read and write for one token in one layer: forward, backward."""
    dim, ffn = model["dim"], model["ffn_dim"]
    key = dim // model["n_heads"] * model["n_kv_heads"]
    # A norm with the sum before it: two read, two written. Rotation: queries and keys, read and written.
    between = 2 * 4 * dim + 2 * (dim + key)
    return 2 * (between + 3 * ffn), 2 * (between + 5 * ffn)  # SwiGLU: two read and one written; three and two


def parts_ms(work: Work) -> dict[str, float]:
    """Milliseconds of a step, by the kind of work."""
    model, layers = work.model, work.model["n_layers"]
    again = work.recomputed_layers if work.recompute == "full" else 0.0
    forward, backward = layer_bytes(model)
    passes = layers * (forward * (1 + (work.recomputed_layers if work.recompute != "none" else 0)) + backward)
    head = model["vocab_size"] * model["dim"]
    parameters = layers * layer_parameters(model) + head * (1 if model["tie_embeddings"] else 2)
    # Logits are read for the softmax's sum, and read and written once more as their own gradients.
    elementwise = work.tokens * (passes + 3 * 2 * model["vocab_size"])
    casts = parameters * CAST_BYTES * (1 + 1 / work.shards)  # of masters that a rank has, of all gradients
    seconds = {
        "matmul": 2 * work.tokens * (
            layers * layer_parameters(model) * (3 + again) / (FP8_MATMUL if work.fp8 else MATMUL) + head * 3 / MATMUL
        ),
        # The backward pass computes the scores anew: it counts two and a half times.
        "attention": layers * attention_operations(work) * (3.5 + again) / attention_rate(model),
        "elementwise": (elementwise + casts) / MEMORY,
        "optimizer": parameters / work.shards * work.optimizer_bytes / MEMORY,
    }  # fmt: skip
    return {kind: value * 1e3 for kind, value in seconds.items()}


def limit(work: Work) -> dict[str, Any]:
    """The parts, their sum, and the speed that it means."""
    parts = parts_ms(work)
    total = sum(parts.values())
    return {
        "parts_ms": {kind: round(ms, 2) for kind, ms in parts.items()},
        "ms_per_step": round(total, 2),
        "tokens_per_second_per_gpu": round(work.tokens / total * 1e3, 1),
    }


def beside_limits(profile: dict[str, Any], limits: dict[str, float]) -> dict[str, Any]:
    """The parts of a profiled step, which together are the step, and what each would take at its limit."""
    kinds, step = dict(profile["kinds_ms"]), profile["step"]
    measured = {"matmul": kinds.pop("matmul", 0.0), "attention": kinds.pop("attention", 0.0),
                "optimizer": kinds.pop("optimizer", 0.0), "elementwise": sum(kinds.values()),
                "exposed communication": step["exposed_communication_ms"], "copies alone": step["copies_alone_ms"],
                "idle": step["idle_ms"]}  # fmt: skip
    parts = [{"part": part, "ms": round(ms, 3), "limit_ms": limits.get(part, 0.0)} for part, ms in measured.items()]
    return {"parts": parts, "span_ms": step["span_ms"], "communication_ms": step["communication_ms"],
            "kinds_ms": profile["kinds_ms"]}  # fmt: skip
