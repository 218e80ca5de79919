"""Activation checkpointing: the backward pass computes a layer's activations again.

`full` keeps the inputs of a layer alone. `selective` also keeps the results of operations that are expensive to compute
(the Plan names them), so that what is computed again is cheap: norms, activations, additions, casts.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.config.groups import SAVED
from shardwise.errors import ConfigError

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # around the forward, the recomputation

_MATMUL = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::mv", "aten::addmv",
           "aten::linear", "aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm",
           "aten::_addmm_activation", "aten::_int_mm"}  # fmt: skip
_CONVOLUTION = {"aten::convolution", "aten::_convolution", "aten::convolution_overrideable"}
_MAXIMUM = {"aten::max", "aten::amax", "aten::aminmax"}  # of which fp8 makes the scale of a tensor
# Every kernel of scaled_dot_product_attention, variable lengths, flex_attention, and FlashAttention as a custom op
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_WRITES = "writes into a result that activation_checkpointing=selective keeps"
_REMEDY = "use activation_checkpointing=full"
# What torch says of a recomputation with other operations or other tensors than the forward pass
_OTHERWISE = ("encountered during backward but not found in storage", "original forward and recomputation",
              "during recomputation than during the original forward", "tensors have different metadata")  # fmt: skip
_COLLECTIVE = re.compile(r"_?c10d_functional(_autograd)?::")


def recomputed(
    unit: nn.Module, forward: Callable[..., Any], contexts: Callable[[], Contexts] | None = None
) -> Callable[..., Any]:
    """Wrap `forward` of `unit` so that its activations are computed again in the backward pass instead of being kept.

    What the layer keeps from call to call is updated only once, and the recomputation begins with what the forward pass
    had found. A compiled graph has no side effects that could happen twice.

    `contexts`: from `keep_results_of`; None: no result is kept. It is the same object for all layers, since a compiled
    layer depends on which one it is.
    """
    compiled: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    own = own_attributes(unit)

    def eager_contexts() -> Contexts:
        while_forward, while_recomputing = (nullcontext(), nullcontext()) if contexts is None else contexts()
        state = LayerState(unit, own)
        return (
            _Around(while_forward, state.watch, state.compare),
            _Around(while_recomputing, state.lend, state.put_back),
        )

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, **compiled, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=eager_contexts, **kwargs)

    return run


def without_caches(root: nn.Module) -> str | None:
    """Let Hugging Face's models in `root` train without a key-value cache, and return a line about it for the user.

    Their layers append keys and values to it. A layer that is computed again would append them a second time. What such
    a model generates has a cache as before, since `generate` asks for one.
    """
    configs: dict[int, Any] = {}
    for module in root.modules():
        if _caches(config := getattr(module, "config", None)):
            configs[id(config)] = config
    for config in configs.values():
        config.use_cache = False
    names = ", ".join(sorted({type(config).__name__ for config in configs.values()}))
    return f"use_cache=False in {names}: a layer that is computed again would fill its cache twice" if names else None


def _caches(config: Any) -> bool:
    return getattr(config, "use_cache", None) is True


@dataclass(frozen=True)
class _Around:
    """`inner`, outside of which `before` and `after` run: a mode that keeps results does not see what they do. It is
    entered again for every backward pass."""

    inner: AbstractContextManager[Any]
    before: Callable[[], None]
    after: Callable[[], None]

    def __enter__(self) -> None:
        self.before()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        with ExitStack() as stack:
            stack.callback(self.after)
            self.inner.__exit__(*error)


def keep_results_of(words: tuple[str, ...]) -> Callable[[], Contexts]:
    """What `checkpoint` needs to keep the results of the operations that `words` name (see `SAVED` in plan/groups.py).

    Raises:
        ConfigError: PyTorch has no such operation.
    """
    for word in words:
        if word not in SAVED and not _exists(word):
            raise ConfigError(
                f"activation_checkpointing.save=[{','.join(words)}]: PyTorch has no operation {word}; known are "
                f"{', '.join(SAVED)}, and its own by name, e.g. aten.mm"
            )
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
    return functools.partial(_contexts, words)


def _is_news(record: logging.LogRecord) -> bool:
    """Leave out torch's advice to avoid operations in place where selective checkpointing is compiled: a graph has none
    (tests/unit/test_activation_checkpointing.py)."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def _contexts(words: tuple[str, ...]) -> Contexts:
    pair: Contexts = create_selective_checkpoint_contexts(_Policy(words))  # type: ignore[no-untyped-call]
    return pair


class _Policy:
    """Says for each operation of one forward pass whether its result is kept."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = frozenset(words)
        self.products: Counter[bool] = Counter()  # matrix products so far, in the forward pass and in recomputing it
        self.kept: set[int] = set()  # the memory of the results that are kept

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not (context.is_recompute or torch.compiler.is_compiling()):
            self._refuse_write(operation, args, kwargs)
        words = self.words & _words_for(operation)
        keeps = bool(words)
        if "every_second_matmul" in words:
            keeps = self.products[context.is_recompute] % 2 == 0 or len(words) > 1
            self.products[context.is_recompute] += 1
        if keeps and not _draws_random_numbers(operation, args, kwargs):
            results = tree_leaves(getattr(context, "op_output", None))  # which torch gives since 2.12
            self.kept.update(_memory(result) for result in results if isinstance(result, Tensor))
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def _refuse_write(self, operation: Any, args: Any, kwargs: Any) -> None:
        """Refuse to write into a kept result. Behind a view torch itself would not notice it: the result of a linear
        layer is one, and `relu_` behind it would run a second time on what it has written."""
        if not self.kept or not _writes(operation):
            return
        for argument, value in zip(operation._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Tensor) and _memory(value) in self.kept:
                raise ConfigError(f"{operation} {_WRITES}; {_REMEDY}")


@functools.cache
def _words_for(operation: Any) -> frozenset[str]:
    """The words by which `save` may name an operation: those that stand for a kind, and its own names."""
    full = operation.name()  # namespace::name.overload, where the default overload has no name
    name, _, overload = full.partition(".")
    own = name.replace("::", ".")
    kinds = {
        "matmul": name in _MATMUL, "every_second_matmul": name in _MATMUL, "convolution": name in _CONVOLUTION,
        "attention": _ATTENTION.search(name) is not None, "collective": _COLLECTIVE.match(name) is not None,
        "fp8_maximum": name in _MAXIMUM,
    }  # fmt: skip
    return frozenset({own, f"{own}.{overload or 'default'}", *(kind for kind, is_it in kinds.items() if is_it)})


@functools.cache
def _writes(operation: Any) -> bool:
    return hasattr(operation, "_schema") and bool(operation._schema.is_mutable)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _draws_random_numbers(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call draws random numbers, which it must do again: those that are drawn after it would be others."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    names = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) > 0


def _exists(word: str) -> bool:
    namespace, name, *overload = word.split(".")
    found = getattr(getattr(torch.ops, namespace), name, None)
    return found is not None and (not overload or overload[0] in found.overloads())


def explain(error: RuntimeError, module: str) -> ConfigError | None:
    """What is wrong with using `selective` for this module, if that is what `error` is about."""
    text = str(error)
    if "cached during selective activation checkpoint has been mutated" in text:
        what = _WRITES
    elif "region computed under selective activation checkpoint" in text:
        what = "takes gradients twice through one forward pass, and activation_checkpointing=selective keeps results "
        what += "for one backward pass"
    elif any(part in text for part in _OTHERWISE):
        return ConfigError(
            f"{module} has a layer that does not compute the same when activation_checkpointing computes it again: it "
            f"keeps something from call to call, such as a cache, or decides by something that changes; mend it, name "
            f"other layers in units=[ClassName], or use activation_checkpointing=none"
        )
    else:
        return None
    return ConfigError(f"{module} {what}; {_REMEDY}")


# What a layer keeps from call to call in buffers and attributes, so that it can be computed again from it.

Slot = tuple[dict[str, Any], str]  # where a value is: a dictionary of a module, and the name in it


class _Found(NamedTuple):
    slot: Slot
    value: Any
    version: int | None
    copy: Any


def own_attributes(unit: nn.Module) -> list[Slot]:
    """The attributes that a layer's author has given it, and no engine yet: such as counters, and tensors beside the
    buffers. PyTorch's own layers keep nothing there."""
    usual = vars(nn.Module()).keys()
    modules = [module for module in unit.modules() if not type(module).__module__.startswith("torch.nn.")]
    return [(vars(module), name) for module in modules for name in vars(module).keys() - usual]


class LayerState:
    """The state of a layer as one forward pass has found it.

    Tensors are copied before the forward pass, and those that it has written to or replaced are kept until the layer is
    computed again, which works on copies too. BatchNorm's kernel does not show (by `_version`) that it writes to its
    averages; what it computes in training does not depend on them. What changes within a list is not seen.
    """

    def __init__(self, unit: nn.Module, own: list[Slot]) -> None:
        self.unit, self.own = unit, own
        self._found: list[_Found] = []
        self._changed: list[_Found] = []
        self._present: list[tuple[Slot, Any]] = []

    def watch(self) -> None:
        """Note what there is, before a forward pass."""
        self._found = [_Found(slot, value, _version(value), _copy(value)) for slot, value in self._values()]

    def compare(self) -> None:
        """Keep what the forward pass has changed."""
        self._changed = [
            one for one in self._found
            if one.slot[0].get(one.slot[1]) is not one.value or _version(one.value) != one.version
        ]  # fmt: skip
        self._found = []

    def lend(self) -> None:
        """Give the layer what it had, in copies."""
        self._present = list(self._values())
        for (where, name), value in [*self._present, *((one.slot, one.copy) for one in self._changed)]:
            where[name] = _copy(value)

    def put_back(self) -> None:
        """End what `lend` has begun."""
        for (where, name), value in self._present:
            where[name] = value
        self._present = []

    def has_changed_what_matters(self) -> bool:
        """Whether the forward pass has changed something that the result may depend on, which a BatchNorm or another of
        torch's layers has not. If so, all of it is undone."""
        self.compare()
        torchs = {id(m._buffers) for m in self.unit.modules() if type(m).__module__.startswith("torch.nn.modules.")}
        if all(id(one.slot[0]) in torchs for one in self._changed):
            return False
        for (where, name), value, _, copy in self._changed:
            if _is_state(value):
                with torch.no_grad():
                    value.copy_(copy)
            where[name] = value
        return True

    def _values(self) -> Iterator[tuple[Slot, Any]]:
        buffers = ((module._buffers, name) for module in self.unit.modules() for name in module._buffers)
        return ((slot, slot[0][slot[1]]) for slot in [*buffers, *self.own] if slot[1] in slot[0])


def _is_state(value: Any) -> bool:
    """Whether it is a tensor that a layer may write to: no gradient goes through it."""
    return isinstance(value, Tensor) and not value.requires_grad


def _version(value: Any) -> int | None:
    return value._version if _is_state(value) and not value.is_inference() else None


def _copy(value: Any) -> Any:
    return value.clone() if _is_state(value) else value
