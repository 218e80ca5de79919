"""Changes what DeepSpeed does while it makes an engine, and undoes what ZeRO-3 does to parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from shardwise.accelerator import current_device, synchronize


@contextmanager
def full_shapes(module: LightningModule) -> Iterator[None]:
    """Give parameters their shapes inside, for code that groups them by dimensions: ZeRO-3 leaves the shape (0,)."""
    hidden = [(p, p.data) for p in module.parameters() if hasattr(p, "ds_shape") and p.shape != p.ds_shape]
    for p, data in hidden:
        p.data = data.new_empty(()).expand(p.ds_shape)
    yield
    for p, data in hidden:
        p.data = data


def count_elements(parameter: nn.Parameter) -> int:
    """The number of elements of the whole parameter, even if it is sharded."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@contextmanager
def scalars_as_vectors(unit: nn.Module) -> Iterator[None]:
    """Give parameters of shape () one dimension inside, since ZeRO-3 cannot shard them. Gathered, they have none."""
    scalars = [p for p in unit.parameters() if p.ndim == 0 and not hasattr(p, "ds_shape")]
    for p in scalars:
        p.data = p.data.view(1)
    yield
    for p in scalars:
        p.ds_shape = torch.Size()  # type: ignore[attr-defined]


@contextmanager
def without_broadcast() -> Iterator[None]:
    """Do not let DeepSpeed broadcast weights and buffers while it makes an engine.

    All ranks have the same ones already, and DeepSpeed cannot send a parameter of shape ().
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    with patch.object(DeepSpeedEngine, "_broadcast_model", lambda engine: None):
        yield


def without_nested_tensors() -> Callable[[], None]:
    """Let nn.TransformerEncoder make no nested tensors: DeepSpeed's linear layers refuse them. Returns the undoing."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def leaf_gradients_reduced_singly() -> Iterator[None]:
    """Let engines that are made inside reduce each gradient of a leaf module as soon as it is there.

    ZeRO-3 would reduce them together with the gradient of the leaf's inputs, which is too early if these need none.
    """
    from deepspeed.runtime.zero import stage3

    original, stage3.z3_leaf_parameter = stage3.z3_leaf_parameter, lambda parameter: False
    try:
        yield
    finally:
        stage3.z3_leaf_parameter = original


def keep_gradients_until_reduced(optimizer: Any) -> None:
    """Do not let memory of a gradient be used again while ZeRO-2 still reduces it on another stream (`overlap_comm`).

    DeepSpeed reduces a gradient of more elements than `reduce_bucket_size` where it lies and frees it at once, and does
    not tell the allocator which stream reads it (as of 0.19.8; gradients of buckets are copied, and ZeRO-3 tells it).
    The backward pass then writes over the gradient of an embedding, for example, before it is summed.
    """
    if not hasattr(optimizer, "average_tensor") or not optimizer.overlap_comm:
        return
    average, stream = optimizer.average_tensor, optimizer.reduction_stream

    def average_and_keep(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        done = average(tensor, *args, **kwargs)
        tensor.record_stream(stream)
        return done

    optimizer.average_tensor = average_and_keep


def before_freeing(engine_optimizer: Any, check: Callable[[], None]) -> None:
    """Call `check` before ZeRO-3 frees the weights of a layer that a backward pass has left."""
    offload = engine_optimizer.parameter_offload
    free = offload.post_sub_module_backward_function

    def check_and_free(*args: Any, **kwargs: Any) -> Any:
        check()
        return free(*args, **kwargs)

    offload.post_sub_module_backward_function = check_and_free


def before_collectives(engine: Any, module: LightningModule, add: Callable[[str], Callable[[], None]]) -> None:
    """Call what `add` has returned for a layer or parameter before its weights are gathered or its gradient reduced."""

    def before(owner: Any, method: str, call: Callable[..., None]) -> None:
        run = getattr(owner, method)

        def call_and_run(*args: Any, **kwargs: Any) -> Any:
            call(*args)
            return run(*args, **kwargs)

        setattr(owner, method, call_and_run)

    if hasattr(engine.optimizer, "reduce_ready_partitions_and_remove_grads"):  # not where it reduces all it has
        reduces = {p: add(f"reduces the gradient of {name}") for name, p in module.named_parameters()}
        before(engine.optimizer, "reduce_ready_partitions_and_remove_grads", lambda p, *_: reduces[p]())
        before(engine.optimizer, "independent_gradient_partition_epilogue", add("has no gradients left to reduce"))
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if hasattr(offload, "get_param_coordinator"):
        # Layers without weights count as well: another layer than before lets DeepSpeed forget what it gathers ahead.
        # By id, since the hash of a torchmetrics' Metric changes.
        gathers = {id(layer): add(f"gathers {name or 'the root'}") for name, layer in module.named_modules()}
        before(offload.get_param_coordinator(), "fetch_sub_module", lambda layer, *_: gathers[id(layer)]())


def release_engine(engine: Any) -> None:
    """Let an engine go that is not used any more, with its weights, gradients and optimizer state.

    DeepSpeed's hooks on gradients refer to it, in a circle that Python cannot see, and ZeRO-3 keeps a list of modules
    and a cache for the whole process (as of 0.19.8). DeepSpeed's own `destroy` leaves both, and waits for the device,
    which never ends where a rank was lost.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    for hook in getattr(engine.optimizer, "_grad_acc_hooks", ()):  # it has none if it only evaluates
        hook.remove()
    own, stack = set(engine.module.modules()), parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module not in own]  # an error leaves the layer in which it was raised
    counted: Any = Coordinator._PartitionedParameterCoordinator__params_to_release
    inspect.getclosurevars(counted).nonlocals["func"].cache_clear()


@contextmanager
def gathered(engine: Any, module: LightningModule, trained: list[nn.Parameter]) -> Iterator[None]:
    """Give these and all frozen parameters of ZeRO-3 whole weights inside, which may be written to. Collective."""
    from deepspeed.runtime.zero import GatheredParameters

    release_prefetched(engine)
    parameters: list[Any] = list(trained)
    available = [p for p in parameters if p.ds_status.name == "AVAILABLE"]
    absent = [p for p in parameters if p.ds_status.name != "AVAILABLE"]
    frozen = [p for p in module.parameters() if not p.requires_grad and hasattr(p, "ds_id")]
    whole = GatheredParameters([*frozen, *absent], modifier_rank=0)
    whole.__enter__()
    yield  # an error ends the run: DeepSpeed would refuse to free the layers that it left, and hide it
    for p in (p for p in (*frozen, *absent) if p.ndim == 0):
        p.data = p.data.reshape(1)  # DeepSpeed sends bytes, and torch cannot view a tensor without dimensions as such
    whole.__exit__(None, None, None)
    for p in available:  # DeepSpeed keeps a small one whole, and would gather its shard the next time
        shard = p.ds_tensor
        mine = p.detach().flatten()[dist.get_rank() * shard.numel() :][: shard.numel()]
        shard.data[: mine.numel()].copy_(mine)


def release_prefetched(engine: Any) -> None:
    """Wait for the weights that ZeRO-3 gathers ahead, and free them.

    Behind an evaluation it gathers weights for a backward pass that does not come. Until they have arrived, they are
    neither whole nor free, and `GatheredParameters` passes over them.
    """
    optimizer = engine.optimizer  # without one it is the offload itself
    getattr(optimizer, "parameter_offload", optimizer).get_param_coordinator()._clean_inflight_param_registry()


def finish_writes(optimizer: Any) -> None:
    """Wait for what has been written to the shards of ZeRO-3, before they are gathered.

    It gathers on a stream of its own (`overlap_comm`), which waits for no other (as of 0.19.8). DeepSpeed waits for the
    whole device when it gathers the small parameters that stay gathered; a model may have none.
    """
    device = current_device()
    if device is not None and getattr(optimizer, "persistent_parameters", None) == []:
        synchronize(device)


_SAMPLING = -1  # the number of no layer


@contextmanager
def kept_gathered(engine: Any, module: nn.Module) -> Iterator[None]:
    """Gather the weights of ZeRO-3 once for many forward passes. Collective."""
    from deepspeed.runtime.zero import GatheredParameters

    release_prefetched(engine)
    parameters: list[Any] = [p for p in module.parameters() if hasattr(p, "ds_id")]
    with GatheredParameters([p for p in parameters if p.ds_status.name == "NOT_AVAILABLE"]):
        for p in parameters:  # DeepSpeed frees a weight behind the last layer that uses it: this says that one does
            p.ds_active_sub_modules.add(_SAMPLING)
        try:
            yield
        finally:
            for p in parameters:
                p.ds_active_sub_modules.discard(_SAMPLING)
