"""Finds writes into weights that a strategy would lose.

Where weights are sharded, a layer computes with a copy that is freed behind it, and ZeRO's next step overwrites trained
weights. So what code of a step writes into them, as MoCo's key encoder or `nn.Embedding(max_norm=…)` does, is
not kept, and the run would go on as another model.
"""

from __future__ import annotations

import inspect
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise.errors import ConfigError

_FIRST, _LAST = 1, 8  # the batches that are watched. What is compiled is so in the one before
_NO_WRITES = ("requires_grad_", "detach_", "share_memory_")
_TORCH = Path(torch.__file__).parent
_OTHERS = ("deepspeed", "lightning", "shardwise")  # who write into weights as they must
_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "pow", "mod", "and", "or")}
_OPERATORS.add("__setitem__")


class LostWrites:
    """What a strategy puts around training steps, in which no weight is whole."""

    def __init__(self, module: nn.Module, strategy: str, zero_stage: int) -> None:
        """`zero_stage`: of DeepSpeed; 0: FSDP2 has sharded the module."""
        self.module, self.strategy, self.zero_stage = module, strategy, zero_stage
        self._sharded = set[str]()  # by FSDP2
        self._batches = 0

    def in_step(self, *, from_the_start: bool) -> AbstractContextManager[Any]:
        """Put around each training_step. `from_the_start`: the run has not been resumed.

        Only some of the first steps are watched, as each call of torch takes a little longer, and none if something is
        compiled: the compiler would compile it once more. A resumed run computes its steps as it did before.
        """
        number, self._batches = self._batches, self._batches + 1
        if number == 0:
            self._sharded = {name for name, p in self.module.named_parameters() if isinstance(p, DTensor)}
        if not from_the_start or not _FIRST <= number <= _LAST or torch._dynamo.utils.counters["frames"]:
            return nullcontext()
        return _Watch(self)

    def check(self, name: str, what: str) -> None:
        """Raises ConfigError if a write into this weight is lost. ZeRO-1 and 2 leave frozen ones alone."""
        trained = self.module.get_parameter(name).requires_grad
        if not (name in self._sharded if self.zero_stage == 0 else self.zero_stage == 3 or trained):
            return
        remedy = "write in on_train_batch_end, keep the numbers in a buffer, or use strategy=ddp"
        if self.zero_stage and trained:  # a hook that writes into them is refused, too
            remedy = "use strategy=ddp, or strategy=fsdp and write in on_train_batch_end"
        raise ConfigError(
            f"{what}: {self.strategy} computes with a copy of it there, and would lose what is written; {remedy}"
        )


class _Watch(TorchFunctionMode):
    def __init__(self, writes: LostWrites) -> None:
        super().__init__()
        self.writes = writes
        self._names = {id(p): name for name, p in writes.module.named_parameters()}
        # id of p.data → itself, p. A reference that held it would hold the weights that DeepSpeed gathers.
        self._data: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (written := _written(function, args, kwargs)) is not None and (line := _users_line()) is not None:
            sets_data = getattr(function, "__name__", "") == "__set__"
            for tensor in written if isinstance(written, (list, tuple)) else [written]:
                self._check(tensor, sets_data, line)
        result = function(*args, **kwargs)
        if getattr(function, "__self__", None) is Tensor.data and isinstance(result, Tensor):
            self._data[id(result)] = weakref.ref(result), args[0]
        return result

    def _check(self, tensor: Any, sets_data: bool, line: str) -> None:
        if not isinstance(tensor, Tensor):
            return
        found = self._data.get(id(tensor))
        weight = found[1] if found is not None and found[0]() is tensor else tensor
        name = self._names.get(id(weight)) or self._sharing(weight)
        if name is None or (isinstance(weight, DTensor) and not sets_data):  # a write into the shard itself is kept
            return
        self.writes.check(name, f"training_step writes into the weight {name} ({line})")

    def _sharing(self, tensor: Tensor) -> str | None:
        """The name of the weight whose memory, or a part of it, `tensor` is. Weights gathered by now count."""
        if isinstance(tensor, DTensor) or not (memory := _memory(tensor)):
            return None
        named = self.writes.module.named_parameters()
        return next((name for name, p in named if not isinstance(p, DTensor) and _memory(p) == memory), None)


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # it has none
        return 0


def _written(function: Any, args: Any, kwargs: Any) -> Any:
    """What this call of torch writes into, if anything."""
    name = getattr(function, "__name__", "")
    if getattr(function, "__self__", None) is Tensor.data and name == "__set__":
        return args[0]
    if function is nn.functional.embedding or function is nn.functional.embedding_bag:
        limit = args[3] if len(args) > 3 else kwargs.get("max_norm")
        return None if limit is None else args[1] if len(args) > 1 else kwargs["weight"]
    if "out" in kwargs:
        return kwargs["out"]
    if name in _OPERATORS:
        return args[0]
    if name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES:
        return args[0] if args else kwargs.get("input")
    return None


def _users_line() -> str | None:
    """The line of the user's code that has called torch; None: FSDP2 or another strategy has."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not (part := _part_of_torch(file)) and file != __file__:
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            return None if package in _OTHERS else f"{Path(file).name}, line {frame.f_lineno}"
        if part == "distributed":
            return None
        frame = frame.f_back
    return None


@cache
def _part_of_torch(file: str) -> str:
    """The folder or file of torch that a source file lies in; "" for all others."""
    path = Path(file)
    return path.relative_to(_TORCH).parts[0] if path.is_relative_to(_TORCH) else ""
