"""Sorts kernels, and operators of the CPU, by their names: what kind of work is it?"""

from __future__ import annotations

import re

# `copy` is no kernel but the device's copy engine and memset: the traces tell these apart by themselves.
COMMUNICATION, COPY, OTHER = "communication", "copy", "other"
# The first pattern that matches decides. Kernels that Inductor has made name all that was fused: their prefix decides.
# `kernel_cutlass_` begins the name of everything that is written in CuTe's language, whatever it does.
PATTERNS: tuple[tuple[str, str], ...] = (
    (
        COMMUNICATION,
        r"nccl|rccl|msccl|oneccl|c10d|gloo|nvshmem|symm_mem|multimem_|one_shot_all|two_shot_all|cross_device_reduce",
    ),
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|attention|attn|cudnn.*mha|mha_(fwd|bwd)"),
    ("matmul", r"^triton_tem_"),
    ("optimizer", r"^triton_.*(foreach|adam)"),
    ("copies and casts", r"_foreach_copy|multi_tensor_apply_kernel<.*\bCopy(Functor)?<"),
    ("normalisation", r"^triton_(red|per)_.*(norm|rsqrt)"),
    ("reductions", r"^triton_(red|per)_"),
    ("copies and casts", r"^triton_poi_fused_(_|to_copy|clone|copy|cat|transpose|permute|t|view|\d)+$"),
    ("elementwise", r"^triton_(poi|for)_|cpp_fused"),
    (
        "convolution",
        r"conv(?!ert)|winograd|dgrad|wgrad|fprop|im2col|col2im|implicit_gemm|nchwToNhwc|nhwcToNchw|miopen",
    ),
    (
        "matmul",
        r"gemm|gemv|(?<!kernel_)cutlass|nvjet|xmma|wgmma|Cijk_|cublas|hipblas|splitKreduce|matmul|(?<!bi)(?<!tri)linear|einsum|"
        r"::_?(add|b|badd)?mm$|addmm|_scaled_mm|_(grouped_)?mm_|\b(B|Add)?mmBackward|::(dot|mv|addmv|ger)$|tensorop|"
        r"DotBackward|dot_kernel|grouped_mm|mkldnn",
    ),
    (
        "optimizer",
        r"multi_?tensor|foreach|fused_?(adam|sgd)|adamw?(_|\b|step|kernel)|lamb_|\bmuon|newton|optimizer|\bsgd|adagrad|"
        r"adafactor|\blion",
    ),
    ("normalisation", r"(layer|batch|group|instance|rms)_?norm|\bbn_|welford|GammaBeta|RowwiseMoments|norm_(fwd|bwd)"),
    (
        "copies and casts",
        r"copy|memcpy|memset|(?<!with)(?<!out)(?<!no)(?<!no_)(?<!broad)cast|convert|quantize|::to$|::clone|::contiguous|"
        r"transpose|::cat$|::flatten_dense_tensors$|CatArray|chunk_cat|split_with_sizes|permute|::stack$|fill",
    ),
    (
        "reductions",
        r"reduce|reduction|softmax|logsumexp|nll_loss|cross_?entropy|argmax|argmin|topk|sort|radix|scan|cumsum|unique|"
        r"::(sum|mean|max|min|norm|linalg_vector_norm|var|std|any|all|amax|amin)$|(sum|mean)Backward|DeviceSelect|mse_loss",
    ),
    (
        "elementwise",
        r"elementwise|vectorized|triton_|pointwise|gelu|glu|silu|relu|sigmoid|tanh|dropout|index|gather|scatter|embedding|"
        r"compute_grad_weight|arange|rope|rotary|where|mask|random|distribution|philox|uniform|bernoulli|randn?|thrust|"
        r"::(add|sub|mul|div|neg|pow|exp|log|sqrt|rsqrt|abs|sin|cos|erf|clamp\w*|lerp|addcmul|addcdiv|zero|eq|ne|lt|"
        r"gt|le|ge|maximum|minimum|isfinite|isnan|isinf|square|reciprocal|normal|sign|floor|ceil|round|logical_\w+|"
        r"bitwise_\w+|__\w+__|(full|ones|zeros)(_like)?)_?$|(Add|Sub|Mul|Div|Pow|Exp|Log|Neg)Backward|tril|triu|pad_",
    ),
)
# What the summary lists, the device's copies among them; the order is that of tables and pictures.
KINDS: tuple[str, ...] = (
    "matmul", "attention", "convolution", "normalisation", "optimizer", "copies and casts", "elementwise",
    "reductions", OTHER, COMMUNICATION, COPY,
)  # fmt: skip
COMPUTE = tuple(kind for kind in KINDS if kind not in (COMMUNICATION, COPY))
# Operators of the CPU that compute nothing: views, allocations, a number for Python, and what stands around operators:
# autograd's nodes and Functions, on which FSDP2 and DeepSpeed hang hooks: their Python is the host's own time.
OVERHEAD = re.compile(
    r"^aten::(_?(unsafe_)?view(_as)?|_?reshape(_alias)?|as_strided_?|t|transpose|permute|slice|select|narrow|split\w*|chunk|"
    r"unbind|expand(_as)?|(un)?squeeze_?|detach_?|alias|empty\w*|new_empty\w*|set_|resize_|result_type|lift_fresh|is_\w+|"
    r"(un)?flatten|unflatten_dense_tensors|resolve_(conj|neg)|promote_types|item|_local_scalar_dense)$|"
    r"^detach_?$|^\w*Function\w*$|^autograd::|Backward\d*$|AccumulateGrad|^PythonSubclass$|^ProfilerStep"
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in PATTERNS)


def kind_of(name: str) -> str:
    """The kind of a kernel or of an operator, by its name; `other` where no pattern matches."""
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)


def kind_numbers(names: list[str]) -> list[int]:
    """For each name the number of its kind in KINDS."""
    return [KINDS.index(kind_of(name)) for name in names]


def short_name(name: str, longest: int = 60) -> str:
    """A kernel's name without return type, arguments and template arguments, at most `longest` characters."""
    depth, kept = 0, []
    for letter in name.replace("(anonymous namespace)", "").replace("->", ""):
        depth += letter in "<("
        if not depth:
            kept.append(letter)
        depth -= letter in ">)" and depth > 0
    text = "".join(kept).strip().removeprefix("void ").strip() or name
    text = text.rpartition(" ")[2] if text.startswith(("int ", "bool ", "float ")) else text
    text = re.sub(r"::(::)+", "::", text).removeprefix("::")
    parts = name.partition("<")[2]
    if text.endswith(("elementwise_kernel", "reduce_kernel", "multi_tensor_apply_kernel")):
        inner = re.findall(r"(\w*(?:[Ff]unctor|Ops|_kernel_cuda|_cuda)\w*)", parts)
        text += f" [{inner[0]}]" if inner else ""
    return text if len(text) <= longest else text[: longest - 1] + "…"
