"""Sorts kernels, and operators of the CPU, by their names: what kind of work is it?"""

from __future__ import annotations

import re

COMMUNICATION, COPY = "communication", "copy"
OTHER = "other"
# The first pattern that matches decides. `copy` is no kernel but the device's copy engine and memset: the traces tell
# these apart by themselves, so that no pattern has to.
PATTERNS: dict[str, str] = {
    COMMUNICATION: r"nccl|rccl|msccl|oneccl|c10d|gloo|nvshmem|symm_mem|multimem_|one_shot_all|two_shot_all|"
    r"cross_device_reduce|DistributedDataParallel\.Reducer",
    "attention": r"flash|fmha|sdpa|scaled_dot_product|attention|attn|cudnn.*mha|mha_(fwd|bwd)",
    "convolution": r"conv(?!ert)|winograd|dgrad|wgrad|fprop|im2col|col2im|implicit_gemm|nchwToNhwc|nhwcToNchw|miopen",
    "matmul": r"gemm|gemv|cutlass|nvjet|xmma|wgmma|Cijk_|cublas|hipblas|splitKreduce|matmul|linear|einsum|triton_tem|"
    r"::_?(add|b|badd)?mm(_|$|\b)|addmm|_scaled_mm|\b(B|Add)?mmBackward|_mm_kernel|::(dot|mv|addmv)$|tensorop|"
    r"DotBackward|::mm$|::bmm$|::ger$|dot_kernel|grouped_mm|mkldnn",
    "normalisation": r"norm(?!al)|\bbn_|batch_?norm|welford|triton_(red|per)_.*(norm|rsqrt)",
    "optimizer": r"multi_tensor|multitensor|foreach|fused_?adam|adamw?(_|\b|step|kernel)|lamb_|muon|newton|optimizer|"
    r"\bsgd|adagrad|adafactor|lion",
    "copies and casts": r"copy|memcpy|memset|cast|convert|_to_copy|::to$|::clone|::contiguous|transpose|::cat$|"
    r"CatArray|chunk_cat|split_with_sizes|permute|pad_|::stack|fill",
    "reductions": r"reduce|reduction|softmax|logsumexp|nll_loss|cross_?entropy|argmax|argmin|topk|sort|radix|scan|"
    r"cumsum|"
    r"::(sum|mean|max|min|norm|var|std|any|all|amax|amin)$|(sum|mean)Backward|triton_(red|per)_|DeviceSelect|unique|"
    r"mse_loss|MseLoss",
    "elementwise": r"elementwise|vectorized|triton_poi|pointwise|triton_|gelu|silu|relu|sigmoid|tanh|dropout|index|"
    r"gather|scatter|embedding|arange|rope|rotary|where|mask|random|distribution|philox|uniform|bernoulli|randn?|"
    r"::(add|sub|mul|div|neg|pow|exp|log|sqrt|rsqrt|abs|sin|cos|erf|clamp\w*|lerp|addcmul|addcdiv|zero|ones|eq|ne|lt|gt|"
    r"le|ge|maximum|minimum|isfinite|isnan|isinf|square|reciprocal|normal|sign|floor|ceil|round|logical_\w+|bitwise_\w+)_?"
    r"$|(Add|Sub|Mul|Div|Pow|Exp|Log|Neg)Backward|tril|triu",
}
# What the summary lists, the device's copies among them; the order is that of tables and pictures.
KINDS: tuple[str, ...] = (
    "matmul", "attention", "convolution", "normalisation", "optimizer", "copies and casts", "elementwise",
    "reductions", OTHER, COMMUNICATION, COPY,
)  # fmt: skip
COMPUTE = tuple(kind for kind in KINDS if kind not in (COMMUNICATION, COPY))
# Operators of the CPU that compute nothing: views, allocations, and the nodes of autograd around the operators.
OVERHEAD = re.compile(
    r"^aten::(_?(unsafe_)?view(_as)?|_?reshape(_alias)?|as_strided_?|t|transpose|permute|slice|select|narrow|split\w*|chunk|"
    r"unbind|expand(_as)?|(un)?squeeze_?|detach_?|alias|empty\w*|new_empty\w*|set_|resize_|result_type|lift_fresh|is_\w+)$|"
    r"^detach_?$|^autograd::|Backward\d*$|AccumulateGrad|^PythonSubclass$|^ProfilerStep"
)
_COMPILED = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in PATTERNS.items()}


def kind_of(name: str) -> str:
    """The kind of a kernel or of an operator, by its name; `other` where no pattern matches."""
    return next((kind for kind, pattern in _COMPILED.items() if pattern.search(name)), OTHER)


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
    text = re.sub(r"::::", "::", text)
    parts = name.partition("<")[2]
    if text.endswith(("elementwise_kernel", "reduce_kernel", "multi_tensor_apply_kernel")):
        inner = re.findall(r"(\w*(?:[Ff]unctor|Ops|_kernel_cuda|_cuda)\w*)", parts)
        text += f" [{inner[0]}]" if inner else ""
    return text if len(text) <= longest else text[: longest - 1] + "…"
