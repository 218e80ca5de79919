"""Finds writes into weights that a strategy would lose, and reads of weights that are not there.

Where weights are sharded, a layer computes with a copy that is freed behind it, and ZeRO's next step overwrites trained
weights. So what code of a step writes into them, as MoCo's key encoder or `nn.Embedding(max_norm=…)` does, is
not kept, and the run would go on as another model. ZeRO-3 leaves an empty tensor where it has freed a weight: its norm
would be 0.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
# What an empty weight has in common with the whole one. Of attributes, only these few are not.
_SAME_WHERE_EMPTY = {"requires_grad_", "is_floating_point", "is_complex", "element_size", "register_hook", "get_device",
                     "register_post_accumulate_grad_hook", "retain_grad", "__hash__", "__repr__", "__format__",
                     "data_ptr", "untyped_storage", "is_pinned", "is_inference", "has_names", "type"}  # fmt: skip
_OF_VALUES = {getattr(Tensor, name) for name in ("data", "shape", "ndim", "T", "mT", "H", "mH", "real", "imag")}


class LostWrites:
    """What a strategy puts around training steps, in which no weight is whole."""

    def __init__(self, module: nn.Module, strategy: str, zero_stage: int, reads: Mapping[str, str]) -> None:
        """`zero_stage`: of DeepSpeed; 0: FSDP2 has sharded the module. `reads`: the steps (`training_step`) whose code
        may read weights that are not there → the name by which they may: all of these are watched.
        """
        self.reads = reads
        self.module, self.strategy, self.zero_stage = module, strategy, zero_stage
        self._sharded = set[str]()  # by FSDP2
        self._batches, self._told = 0, False

    def in_step(self, step: str, *, from_the_start: bool) -> AbstractContextManager[Any]:
        """Put around each `training_step`, and around other steps. `from_the_start`: the run has not been resumed.

        Only some of the first steps are watched, as each call of torch takes a little longer, and none if something is
        compiled: the compiler would compile it once more. A resumed run computes its steps as it did before.
        """
        number = self._batches
        if step == "training_step":
            self._batches += 1
            if number == 0:
                self._sharded = {name for name, p in self.module.named_parameters() if isinstance(p, DTensor)}
        is_one_of_the_first = step == "training_step" and from_the_start and _FIRST <= number <= _LAST
        if not (is_one_of_the_first or step in self.reads):
            return nullcontext()
        if not torch._dynamo.utils.counters["frames"]:
            return _Watch(self, step, reads=self.zero_stage == 3)
        if step in self.reads and not self._told:
            self._told = True
            tell_of_reads(self.module, self.strategy, step, self.reads[step], "what torch.compile has compiled")
        return nullcontext()

    def in_set_up(self) -> AbstractContextManager[Any]:
        """Put around `configure_optimizers`, where weights are not what training begins with."""
        return _Watch(self, "configure_optimizers", reads=False)

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

    def loses_part(self, line: str) -> ConfigError:
        """The error for a write into a part of a shard, of which torch makes a gathered copy."""
        return ConfigError(
            f"training_step writes into a part of a weight or gradient ({line}): under {self.strategy} that is a copy, "
            f"and what is written is lost; write into gradients in on_before_optimizer_step and into weights in "
            f"on_train_batch_end, or use strategy=ddp"
        )

    def refuse_read(self, name: str, what: str) -> None:
        raise ConfigError(
            f"{type(self.module).__name__}.{what} reads the weight {name}, which is not there: {self.strategy} gathers "
            f"weights for the layers that run and for hooks; read weights in a hook, where they are whole "
            f"(on_train_batch_start, on_validation_batch_end); a loss of weights needs strategy=zero2 or ddp"
        )


def tell_of_reads(module: nn.Module, strategy: str, step: str, name: str, compiler: str) -> None:
    """Say that reads of weights that are not there are not found."""
    if dist.get_rank() == 0:
        print(
            f"{step} of {type(module).__name__} may read weights (it uses {name}): {strategy} has those of the layers "
            f"that run alone, others are empty there, and beside {compiler} that is not checked; read weights in a "
            f"hook, where they are whole (on_train_batch_start, on_validation_batch_end)",
            flush=True,
        )


class _Watch(TorchFunctionMode):
    def __init__(self, writes: LostWrites, where: str, *, reads: bool) -> None:
        super().__init__()
        self.writes, self.where, self.reads = writes, where, reads
        self._names = {id(p): name for name, p in writes.module.named_parameters()}
        # id of p.data → itself, p. A reference that held it would hold the weights that DeepSpeed gathers.
        self._data: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (written := _written(function, args, kwargs)) is not None and (line := _users_line()) is not None:
            for tensor in written if isinstance(written, (list, tuple)) else [written]:
                self._check(tensor, line)
        if self.reads and _reads_values(function):
            for tensor in chain.from_iterable(map(_listed, (*args, *kwargs.values()))):
                if id(tensor) in self._names and _is_freed(tensor) and (line := _users_line()) is not None:
                    self.writes.refuse_read(self._names[id(tensor)], f"{self.where} ({line})")
        result = function(*args, **kwargs)
        if getattr(function, "__self__", None) is Tensor.data and isinstance(result, Tensor):
            self._data[id(result)] = weakref.ref(result), args[0]
        return result

    def _check(self, tensor: Any, line: str) -> None:
        if not isinstance(tensor, Tensor):
            return
        if isinstance(tensor, DTensor):
            if _is_copied_part(tensor):
                raise self.writes.loses_part(line)
            return  # a write into the shard itself is kept
        name = self._name(tensor) or self._name(tensor._base) or self._sharing(tensor)
        if name is not None:
            self.writes.check(name, f"{self.where} writes into the weight {name} ({line})")

    def _name(self, tensor: Tensor | None) -> str | None:
        """The name of the weight that `tensor` is, or whose `data` it is."""
        found = self._data.get(id(tensor))
        return self._names.get(id(found[1] if found is not None and found[0]() is tensor else tensor))

    def _sharing(self, tensor: Tensor) -> str | None:
        """The name of the weight whose memory, or a part of it, `tensor` is. Weights gathered by now count."""
        if not (memory := _memory(tensor)):
            return None
        named = self.writes.module.named_parameters()
        return next((name for name, p in named if not isinstance(p, DTensor) and _memory(p) == memory), None)


def _is_copied_part(tensor: DTensor) -> bool:
    """Whether it is called a view of another DTensor and has other memory."""
    base = tensor._base
    return isinstance(base, DTensor) and _memory(tensor._local_tensor) != _memory(base._local_tensor)


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


def _reads_values(function: Any) -> bool:
    """Whether this call of torch needs the values or the shape of its tensors."""
    if getattr(function, "__name__", "") == "__get__":
        return getattr(function, "__self__", None) in _OF_VALUES
    return getattr(function, "__name__", "") not in (*_SAME_WHERE_EMPTY, "__set__")


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


def _is_freed(weight: Any) -> bool:
    """Whether ZeRO-3 has freed this weight, or has not yet received it."""
    return hasattr(weight, "ds_status") and weight.ds_status.name != "AVAILABLE"


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
