"""Where code of the user's sees shards, writes into parts of them reach the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.distributed.parameters import is_hooked_behind_sums
from shardwise.errors import ConfigError
from shardwise.lightning_internals.hooks import runs_own_code
from shardwise.optim.optimizers import has_hooks_of_others

_NOTHING = nullcontext()


class ShardsInHooks:
    """What is put around code of the user's, and taken away around what Lightning does inside it."""

    def __init__(self, module: LightningModule, refuse: Callable[[], None] | None) -> None:
        """`refuse`: called in front of a write into a part, and raises."""
        self.module, self.refuse = module, refuse
        self._modes: list[WritableViews | None] = []

    def around_hook(self, hook: str, around: AbstractContextManager[None] = _NOTHING) -> AbstractContextManager[None]:
        """What is put around a hook in which weights are not gathered, beside `around`."""
        return self.writable(around) if runs_own_code(hook, self.module) else around

    def around_step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """What is put around a step: an optimizer that has the shards may write into parts, and so may hooks on it."""
        has_shards = not hasattr(optimizer, "sharded_parameters")
        return self.writable() if has_shards or has_hooks_of_others(optimizer) else nullcontext()

    def watch_hooks(self, group: Any) -> None:
        """Let hooks behind the sums of gradients do so, which FSDP2 calls for this group of weights."""
        post_backward = group.post_backward

        def run(*args: Any) -> None:
            hooked = any(is_hooked_behind_sums(parameter.sharded_param) for parameter in group.fsdp_params)
            with self.writable() if hooked else _NOTHING:
                post_backward(*args)

        group.post_backward = run

    @contextmanager
    def writable(self, around: AbstractContextManager[None] = _NOTHING) -> Iterator[None]:
        """Inside, a write into a part of a shard is one into the weight or gradient."""
        mode = WritableViews(self.refuse)
        self._modes.append(mode)
        try:
            with around, mode:
                yield
        finally:
            self._modes.pop()
        lay_out_gradients(self.module)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, what runs is not the hook's own: operations take the time that they take without it."""
        mode: Any = self._modes[-1] if self._modes else None
        if mode is None:
            yield
            return
        self._modes.append(None)
        mode.__exit__(None, None, None)
        try:
            yield
        finally:
            mode.__enter__()
            self._modes.pop()


def lay_out_gradients(module: nn.Module) -> None:
    """Shard gradients as their weights are, where a hook has set others: `p.grad = p.grad.flip(0)`."""
    for p in module.parameters():
        gradient: Any = p.grad
        if isinstance(p, DTensor) and isinstance(gradient, DTensor) and gradient.placements != p.placements:
            p.grad = gradient.detach().redistribute(placements=p.placements)  # type: ignore[attr-defined]


# Views of sharded tensors that are views, as those of other tensors are.
#
# Of rows of a DTensor, say, torch makes a copy, gathered from all ranks. What is written into the copy is lost, without
# a word. Inside `WritableViews`, a view is one of a whole tensor, and what is written into that reaches the shards.

aten: Any = torch.ops.aten
_SAME = (aten.detach.default, aten.alias.default)
_TURNED = (aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default)  # they stay sharded
_OF_ONE_DIM = (aten.slice.Tensor, aten.select.int)
_OF_EQUALS = ("avg", "max", "min")  # ways to reduce in which each rank may have the result
# What torch says of a write that it cannot do to a shard
_SIGNS = ("mixed torch.Tensor and DTensor", "require placement changes", "as_strided not supported with DTensor")


class _Version:
    """How often a tensor was written into. Tensors that share their memory share it."""

    def __init__(self) -> None:
        self.writes = 0

    def count(self) -> None:
        """Count a write."""
        self.writes += 1


class _Whole:
    """The whole tensor of which views of a sharded one are views."""

    def __init__(self, base: DTensor, version: _Version) -> None:
        self.base, self.version, self.seen = base, version, version.writes
        self.values = _replicated(base)

    def refresh(self) -> None:
        """Take what was written into the shards. Collective."""
        if self.seen != self.version.writes:
            self.values._local_tensor.copy_(_replicated(self.base)._local_tensor)
            self.seen = self.version.writes

    def write_back(self) -> None:
        """Write this rank's part into its shard."""
        base, part = self.base, self.base._local_tensor
        placements = [Replicate() if p.is_partial() else p for p in base.placements]
        with torch.no_grad():
            part.copy_(self.values.redistribute(placements=placements)._local_tensor)
            for dim, p in enumerate(base.placements):
                if p.is_partial() and not any(map(p.is_partial, _OF_EQUALS)) and base.device_mesh.get_local_rank(dim):
                    part.zero_()  # the sum over all ranks is what the first one has
        self.version.count()
        self.seen = self.version.writes


class WritableViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what is written into a part of a DTensor is written into the DTensor, and is no copy's.

    Views gather the tensor; this is collective, as are all operations with DTensors. `refuse` is called in front of a
    write into a part, and raises, where each rank holds something else than shards of whole tensors.
    """

    def __init__(self, refuse: Callable[[], Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refuse = refuse
        self._versions = _by_identity()  # DTensor → _Version
        self._wholes = _by_identity()  # view → _Whole

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor not in types:
            return function(*args, **kwargs)
        for tensor in _dtensors([*args, *kwargs.values()]):
            if (whole := self._wholes.get(tensor)) is not None:
                whole.refresh()
        if function.is_view and isinstance(args[0], DTensor):
            return self._view(function, args, kwargs)
        written = list(_dtensors(_written(function, args, kwargs)))
        if self.refuse is not None and any(tensor in self._wholes for tensor in written):
            self.refuse()
        try:
            output = function(*args, **kwargs)
        except RuntimeError as error:  # NotImplementedError is one, too
            if not written or not (isinstance(error, NotImplementedError) or any(s in str(error) for s in _SIGNS)):
                raise
            return self._write_whole(function, args, kwargs, written)
        for tensor in written:
            if (whole := self._wholes.get(tensor)) is not None:
                whole.write_back()
            else:
                self._version(tensor).count()
        return output

    def _write_whole(self, function: Any, args: Any, kwargs: Any, written: list[DTensor]) -> Any:
        """Write into whole tensors what cannot be written into shards."""
        wholes = {id(tensor): self._whole(tensor) for tensor in written}

        def local(tensor: Any) -> Any:
            if not isinstance(tensor, DTensor):
                return tensor
            if tensor not in self._wholes:  # a view is one of the whole tensor already
                tensor = (wholes.get(id(tensor)) or self._whole(tensor)).values
            return tensor._local_tensor

        function(*tree_map(local, args), **tree_map(local, kwargs))
        for whole in wholes.values():
            whole.write_back()
        return written[0] if function._schema.returns else None

    def _view(self, function: Any, args: Any, kwargs: Any) -> Any:
        of = args[0]
        whole = self._wholes.get(of)
        if whole is None and not self._stays(function, of, args):
            whole = self._whole(of)
            args = (whole.values, *args[1:])
        output = function(*args, **kwargs)
        for view in _dtensors([output]):
            if whole is None:
                self._versions[view] = self._version(of)
            else:
                self._wholes[view] = whole
        return output

    def _stays(self, function: Any, tensor: DTensor, args: Any) -> bool:
        """Whether torch makes a view of the shard in any case."""
        if function in _SAME or (self.refuse is None and all(p.is_replicate() for p in tensor.placements)):
            return True
        if self.refuse is not None:
            return False
        if function in _OF_ONE_DIM:
            dim = (args[1] if len(args) > 1 else 0) % tensor.ndim
            return all(p.is_replicate() or (p.is_shard() and not p.is_shard(dim)) for p in tensor.placements)
        return function in _TURNED

    def _version(self, tensor: DTensor) -> _Version:
        version: _Version = self._versions.setdefault(tensor, _Version())
        return version

    def _whole(self, tensor: DTensor) -> _Whole:
        """The whole tensor that there is already, if a view of it is still there, or a new one."""
        found: _Whole | None = self._wholes.get(tensor)
        if found is None:
            found = next((whole for whole in list(self._wholes.values()) if whole.base is tensor), None)
        if found is None:
            return _Whole(tensor, self._version(tensor))
        found.refresh()
        return found


def _replicated(tensor: Any) -> DTensor:
    with torch.no_grad():
        whole: DTensor = tensor.detach().redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return whole


def _by_identity() -> Any:
    """A dict whose keys are tensors, which live no longer for it."""
    return WeakIdKeyDictionary()


def _written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes into."""
    return [
        args[number] if number < len(args) else kwargs.get(argument.name)
        for number, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _dtensors(values: Any) -> Iterator[DTensor]:
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _dtensors(value)


@contextmanager
def assigning_whole() -> Iterator[None]:
    """Inside, `p.data = new` of a DTensor is written into its shards; torch would forget it.

    What `p.data` has given before keeps the old values, as it would for any other tensor.
    """
    own: Any = Tensor.data
    given = _by_identity()  # a tensor → what its `data` is

    def get(tensor: Any) -> Any:
        data = own.__get__(tensor)
        given.setdefault(tensor, _by_identity())[data] = True
        return data

    def assign(tensor: Any, new: Any) -> None:
        if new.shape != tensor.shape or new.dtype != tensor.dtype or new.device != tensor.device:
            raise ConfigError(
                f"p.data = {_described(new)}: the weight is sharded, and is {_described(tensor)}; give it a tensor of "
                f"that shape, dtype and device, or use strategy=ddp"
            )
        for data in given.pop(tensor, {}):
            data._local_tensor = data._local_tensor.clone()
        if not isinstance(new, DTensor):
            new = DTensor.from_local(new.detach(), tensor.device_mesh, run_check=False)
        with torch.no_grad():
            tensor.detach().copy_(new)

    before = vars(DTensor).get("data")
    DTensor.data = property(get, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del DTensor.data
        else:
            DTensor.data = before


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"
