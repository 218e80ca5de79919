"""Finds writes into weights that a strategy would lose.

Where weights are sharded, a layer computes with a copy that is freed behind it, and ZeRO's next step overwrites trained
weights. So what code of a step writes into them, as MoCo's key encoder or `nn.Embedding(max_norm=…)` does, is
not kept, and the run would go on as another model.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise.errors import ConfigError

_FIRST, _LAST = 1, 8  # the batches that are watched. What is compiled is so in the one before
_NO_WRITES = ("requires_grad_", "detach_", "share_memory_", "retain_grad_")
_TORCH = Path(torch.__file__).parent
_OTHERS = ("deepspeed", "lightning", "shardwise")  # who write into weights as they must
_SUBSCRIPT = ("__setitem__", "__delitem__")
_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "pow", "mod", "and", "or")}


class LostWrites:
    """What a strategy puts around training steps, and around hooks in which no weight is whole."""

    def __init__(self, module: nn.Module, strategy: str, zero_stage: int) -> None:
        """`zero_stage`: of DeepSpeed; 0: FSDP2 has sharded the module."""
        self.module, self.strategy, self.zero_stage = module, strategy, zero_stage
        self._sharded = set[str]()  # by FSDP2
        self._batches = 0

    def is_lost(self, name: str, weight: Tensor) -> bool:
        """Whether a write into this weight would be. ZeRO-1 and 2 leave frozen weights alone."""
        if self.zero_stage:
            return self.zero_stage == 3 or weight.requires_grad
        return name in self._sharded

    def in_step(self, *, from_the_start: bool) -> AbstractContextManager[Any]:
        """Put around each training_step. `from_the_start`: the run has not been resumed.

        Only some of the first steps are watched, as each call of torch takes a little longer, and none if something is
        compiled: the compiler would compile it once more. A resumed run computes its steps as it did before.
        """
        number, self._batches = self._batches, self._batches + 1
        self._sharded |= {name for name, p in self.module.named_parameters() if isinstance(p, DTensor)}
        if not from_the_start or not _FIRST <= number <= _LAST or torch._dynamo.utils.counters["frames"]:
            return nullcontext()
        return self.within("training_step")

    def within(self, where: str) -> AbstractContextManager[Any]:
        return _Watch(self, where)

    def refuse(self, name: str, where: str) -> None:
        raise ConfigError(
            f"{where} writes into the weight {name}{_line()}: {self.strategy} computes with a copy of it there, and "
            f"would lose what is written; write in on_train_batch_end, keep the numbers in a buffer, or use "
            f"strategy=ddp"
        )


class _Watch(TorchFunctionMode):
    def __init__(self, writes: LostWrites, where: str) -> None:
        super().__init__()
        self.writes, self.where = writes, where
        self._names = {id(p): name for name, p in writes.module.named_parameters()}
        self._data: dict[int, tuple[Tensor, Tensor]] = {}  # id of p.data → itself, p

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (written := _written(function, args, kwargs)) is not None and _is_of_the_user():
            sets_data = getattr(function, "__name__", "") == "__set__"
            for tensor in written if isinstance(written, (list, tuple)) else [written]:
                self._check(tensor, sets_data)
        result = function(*args, **kwargs)
        if getattr(function, "__self__", None) is Tensor.data and isinstance(result, Tensor):
            self._data[id(result)] = result, args[0]
        return result

    def _check(self, tensor: Any, sets_data: bool) -> None:
        if not isinstance(tensor, Tensor):
            return
        weight = self._data.get(id(tensor), (None, tensor))[1]
        name = self._names.get(id(weight)) or self._sharing(weight)
        if name is None or (isinstance(weight, DTensor) and not sets_data):  # a write into the shard itself is kept
            return
        if self.writes.is_lost(name, dict(self.writes.module.named_parameters())[name]):
            self.writes.refuse(name, self.where)

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
        limited = kwargs.get("max_norm") is not None or (len(args) > 3 and isinstance(args[3], float))
        return (args[1] if len(args) > 1 else kwargs["weight"]) if limited else None
    if "out" in kwargs:
        return kwargs["out"]
    if name in _SUBSCRIPT or name in _AUGMENTED:
        return args[0]
    if name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES:
        return args[0] if args else kwargs.get("input")
    return None


def _is_of_the_user() -> bool:
    """Whether code of the user has called torch: neither FSDP2's nor another strategy's."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_filename == __file__:
            frame = frame.f_back
            continue
        if not path.is_relative_to(_TORCH):
            return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OTHERS
        if path.is_relative_to(_TORCH / "distributed"):
            return False
        frame = frame.f_back
    return False


def _line() -> str:
    """Where the user's code does it."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if not path.is_relative_to(_TORCH) and name not in _OTHERS:
            return f" ({path.name}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""
