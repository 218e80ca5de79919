"""What a trace holds, in columns: the device's work, what the host did meanwhile, and where steps begin and end.

Times are whole nanoseconds of one clock. Names are numbers: `names[name]` is the text. What is summed over intervals of
time stands here too, and which kind of work a kernel is, by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
UNKNOWN = np.iinfo(np.int64).min  # when a kernel was launched that no launch in the trace belongs to


class Step(NamedTuple):
    """One profiled step on the host, in ns."""

    number: int
    begin: int
    end: int


@dataclass(frozen=True)
class HostEvents:
    """Events of one kind on the host, in the order in which they begin; n in each column."""

    name: Times
    begin: Times  # ns
    end: Times
    thread: Times
    link: Times  # connects a launch with its kernels; -1: nothing is connected

    def __len__(self) -> int:
        return len(self.begin)

    def where(self, mask: NDArray[np.bool_]) -> HostEvents:
        return HostEvents(self.name[mask], self.begin[mask], self.end[mask], self.thread[mask], self.link[mask])

    @staticmethod
    def of(rows: Iterable[tuple[int, int, int, int, int]]) -> HostEvents:
        """Rows of name, begin, end, thread, link."""
        columns = np.array(sorted(rows, key=lambda row: row[1]), dtype=np.int64).reshape(-1, 5).T
        return HostEvents(*columns)


@dataclass(frozen=True)
class DeviceEvents:
    """What the device ran, in the order in which it began: kernels, copies, memsets. On CPU: the host's operations."""

    name: Times
    begin: Times  # ns
    end: Times
    lane: Times  # the stream; on CPU the thread
    kind: Times  # a number of KINDS
    launched: Times  # when the host launched it; UNKNOWN: the trace does not have it
    thread: Times  # which launched it; -1: not known

    def __len__(self) -> int:
        return len(self.begin)

    def where(self, mask: NDArray[np.bool_]) -> DeviceEvents:
        columns = (self.name, self.begin, self.end, self.lane, self.kind, self.launched, self.thread)
        return DeviceEvents(*(column[mask] for column in columns))


@dataclass(frozen=True)
class Trace:
    """A trace of some steps of one rank."""

    source: Path
    names: list[str]
    device: DeviceEvents
    launches: HostEvents  # calls of CUDA's or HIP's runtime and driver, the synchronising ones too
    operations: HostEvents  # torch's operators
    annotations: HostEvents  # record_function, NVTX ranges
    frames: HostEvents  # Python's functions, where stacks were recorded
    steps: tuple[Step, ...]  # never empty
    is_cpu: bool  # no kernel was recorded: the operations of the host play the device's part
    device_name: str = ""
    host_name: str = ""
    rank: int | None = None
    notes: tuple[str, ...] = ()  # what a reader of the figures has to know

    @property
    def main_thread(self) -> int:
        """The thread of the steps' annotations; without them the one that launched most."""
        begins = {step.begin for step in self.steps}
        mine = [
            int(t) for t, b in zip(self.annotations.thread, self.annotations.begin, strict=True) if int(b) in begins
        ]
        known = self.device.thread[self.device.thread >= 0]
        return mine[0] if mine else int(np.bincount(known).argmax()) if len(known) else -1


@dataclass(frozen=True)
class Union:
    """Intervals that neither overlap nor touch, in order."""

    begin: Times
    end: Times

    @staticmethod
    def of(begin: Times, end: Times) -> Union:
        keep = end > begin
        begin, end = begin[keep], end[keep]
        if not len(begin):
            return Union(begin, end)
        order = np.argsort(begin, kind="stable")
        begin, reached = begin[order], np.maximum.accumulate(end[order])
        is_first = np.append(True, begin[1:] > reached[:-1])
        is_last = np.append(is_first[1:], True)
        return Union(begin[is_first], reached[is_last])

    def clipped(self, begin: int, end: int) -> Union:
        return Union.of(np.clip(self.begin, begin, end), np.clip(self.end, begin, end))

    def gaps(self, begin: int, end: int) -> Union:
        """What of [begin, end) is in no interval."""
        inside = self.clipped(begin, end)
        return Union.of(np.append(begin, inside.end), np.append(inside.begin, end))

    def overlap(self, begin: Times, end: Times) -> Times:
        """ns of each [begin, end) that lie in the intervals."""
        return np.asarray(np.maximum(self._until(np.maximum(end, begin)) - self._until(begin), 0), dtype=np.int64)

    def has(self, times: Times) -> NDArray[np.bool_]:
        """Which times lie in an interval."""
        at = np.searchsorted(self.begin, times, side="right") - 1
        return (at >= 0) & (times < self.end[np.maximum(at, 0)]) if len(self.begin) else np.zeros(len(times), bool)

    @property
    def total(self) -> int:
        return int((self.end - self.begin).sum())

    def _until(self, times: Times) -> Times:
        """ns of the intervals that lie before each time."""
        lengths = self.end - self.begin
        at = np.searchsorted(self.begin, times, side="right")
        before = np.append(0, np.cumsum(lengths))[at]
        last = np.maximum(at - 1, 0)
        beyond = self.end[last] - np.minimum(times, self.end[last]) if len(lengths) else np.zeros(len(times), np.int64)
        return np.asarray(before - np.where(at > 0, beyond, 0), dtype=np.int64)


@dataclass(frozen=True)
class Activity:
    """Between two neighbouring edges nothing begins or ends: how many events of each kind were under way there."""

    lengths: Times  # ns, m
    active: NDArray[np.int64]  # kinds x m

    @staticmethod
    def of(begin: Times, end: Times, kind: Times, kinds: int, window: tuple[int, int]) -> Activity:
        begin, end = np.clip(begin, *window), np.clip(end, *window)
        edges = np.unique(np.concatenate([begin, end, np.array(window, dtype=np.int64)]))
        change = np.zeros((kinds, len(edges)), dtype=np.int64)
        np.add.at(change, (kind, np.searchsorted(edges, begin)), 1)
        np.add.at(change, (kind, np.searchsorted(edges, end)), -1)
        return Activity(np.diff(edges), np.cumsum(change, axis=1)[:, :-1])

    def total(self, mask: NDArray[np.bool_]) -> int:
        return int(self.lengths[mask].sum())

    def shares(self, rows: list[int]) -> NDArray[np.float64]:
        """ns of each of these kinds. Where several run at once, each gets its part of that time, so that the sum is
        that of the union."""
        active = self.active[rows]
        running = active.sum(axis=0)
        weight = np.divide(self.lengths, running, out=np.zeros(len(running)), where=running > 0)
        return np.asarray((active * weight).sum(axis=1))


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
