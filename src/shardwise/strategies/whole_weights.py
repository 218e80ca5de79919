"""Closes gaps in the hooks by which FSDP2 gathers a layer's weights and frees them again.

The hooks are on the tensors that enter and leave a layer. If a hook is missed, a weight is not there when the backward
pass needs it (`setStorage … of size 0`). That happens with outputs that are views or inside objects, with layers that
write into their inputs, and with backward passes that are differentiated again or run within a forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise import accelerator
from shardwise.errors import ConfigError
from shardwise.parallel.precision import map_tensors

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, nn.Module, type)
# torch's messages when a hook was missed.
SIGNS = ("setStorage", "storage of size 0", "RegisterPostBackwardFunction")


def show_outputs(layer: nn.Module) -> None:
    """Let FSDP2's hooks find the outputs of `layer`, and let `layer` write into its inputs."""
    module: Any = layer
    state, forward = module._get_fsdp_state(), module.forward
    ways: list[Callable[..., Any]] = []  # the way to call the layer, which the first call finds
    hides = True  # whether the layer may give tensors inside objects

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        nonlocal hides
        before = {id(tensor) for tensor in tensors_in_objects((args, kwargs))} if hides else set()
        if not ways:
            output, way = _try_both_ways(module, forward, args, kwargs)
            ways.append(way)
        else:
            output = ways[0](*args, **kwargs)
        hides = not isinstance(output, Tensor) and not gives_tensors(output)
        for tensor in tensors_in_objects((output, args, kwargs)) if hides else ():
            if id(tensor) not in before and tensor.grad_fn is not None:
                tensor.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]
        # A write into a view would remove the hook on it.
        return map_tensors(lambda t: t.clone() if t.requires_grad and t._is_view() else t, output)

    module.forward = run


def _try_both_ways(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Callable[..., Any]]:
    """Call `forward`; if it writes into its inputs, which FSDP2 does not allow, call it on copies of them."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    random = _random_states()
    try:
        return forward(*args, **kwargs), forward
    except RuntimeError as error:
        if "RegisterPostBackwardFunction" not in str(error):
            raise
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for restore in random:
        restore()

    def on_copies(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(_copy, args), map_tensors(_copy, kwargs)
        return forward(*args, **kwargs)

    return on_copies(*args, **kwargs), on_copies


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.requires_grad else tensor


def _random_states() -> list[Callable[[], None]]:
    states: list[Callable[[], None]] = [functools.partial(torch.set_rng_state, torch.get_rng_state())]
    if (device := accelerator.current_device()) is not None:
        states.append(functools.partial(accelerator.set_random_state, accelerator.random_state(device), device))
    return states


def gives_tensors(output: Any) -> bool:
    """Whether `output` is a tensor that needs gradients, or a list, tuple or dict that has one in it."""
    if isinstance(output, Tensor):
        return output.requires_grad
    if isinstance(output, dict):
        output = list(output.values())
    return isinstance(output, (list, tuple)) and any(map(gives_tensors, output))


def tensors_in_objects(value: Any) -> list[Tensor]:
    """Find tensors that need gradients in the attributes of objects.

    Strategies find tensors in lists, tuples and dicts by themselves: these are only searched for objects.
    """
    found: list[Tensor] = []
    _search(value, False, set(), found)
    return found


def _search(value: Any, inside: bool, seen: set[int], found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        if inside and value.requires_grad and id(value) not in seen:
            seen.add(id(value))
            found.append(value)
        return
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    if isinstance(value, dict):
        parts: Any = value.values()
    elif isinstance(value, (list, tuple, set)):
        parts = value
    else:
        inside, parts = True, list(_attributes(value))
    seen.add(id(value))
    for part in parts:
        _search(part, inside, seen, found)


def _attributes(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield getattr(value, name)


class InnerBackwards:
    """Allows backward passes within a step, and backward passes that are differentiated again.

    FSDP2 treats every backward pass as the last of the step: it reduces the gradients and frees the weights. But a pass
    that `torch.autograd.grad` makes within training_step is not the last. With `create_graph` its graph needs the
    weights of layers without calling their hooks. So weights stay after such a pass. Before the next backward pass all
    of them are gathered, and its gradients are reduced at its end.
    """

    def __init__(self, module: nn.Module, automatic: bool) -> None:
        self.layers = [m for m in module.modules() if isinstance(m, FSDPModule)]
        self.automatic = automatic  # if so, every last backward pass goes through `run`
        self.running = False
        self.gathers = False  # whether a pass of this batch may be differentiated again
        self._ending = False
        for layer in self.layers:
            self._watch(layer._get_fsdp_state())

    def begin_batch(self) -> None:
        self.gathers = False

    def _is_inner(self) -> bool:
        if torch.is_grad_enabled():
            self.gathers = True
            return True
        return self.automatic and not self.running

    def _watch(self, state: Any) -> None:
        end = state._root_post_backward_final_callback
        inner = [False]  # whether the hooks of this pass ran in an inner pass

        def end_of_pass() -> None:
            if inner[0] or self._is_inner():
                inner[0] = False
                state._state_ctx.post_backward_final_callback_queued = False
                for other in state._state_ctx.all_states:
                    _mark_idle(other)
                return
            self._ending = True
            end()
            self._ending = False

        before = state._pre_backward

        def pre_backward(gradient: Tensor) -> Tensor:
            inner[0] = self._is_inner()
            result: Tensor = before(gradient)
            return result

        state._root_post_backward_final_callback = end_of_pass
        state._pre_backward = pre_backward
        for group in groups_of(state):
            self._hold_back(group)

    def _hold_back(self, group: Any) -> None:
        post_backward = group.post_backward

        def run(*args: Any) -> None:
            waits_for_the_end = self.gathers and not self._ending
            if not self._is_inner() and not waits_for_the_end:
                post_backward(*args)

        group.post_backward = run

    def run(self, backward: Callable[[], Any]) -> Any:
        """Run the step's own backward pass."""
        if self.gathers:
            for layer in self.layers:
                layer.unshard()
        self.running = True
        try:
            return backward()
        finally:
            self.running = False
            if self.gathers:
                self.reshard()

    def end(self) -> None:
        """End a backward pass in which there was nothing to differentiate: reduce what had added up before it."""
        with torch.no_grad():  # as in a backward pass
            for layer in self.layers:
                if (state := layer._get_fsdp_state())._is_root:
                    state._root_post_backward_final_callback()

    def reshard(self) -> None:
        """Free the gathered weights, so that the next forward pass gathers them again; also those gathered ahead."""
        free_layers(self.layers)


def free_layers(layers: Iterable[FSDPModule]) -> None:
    """Free what is gathered, so that the next pass gathers the weights of then; also what was gathered ahead."""
    for layer in layers:
        for group in groups_of(layer._get_fsdp_state()):
            group.wait_for_unshard()
        layer.reshard()


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of a layer. In torch 2.11 there is at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _mark_idle(state: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    if state._training_state == TrainingState.PRE_BACKWARD:
        state._training_state = TrainingState.IDLE
    for group in groups_of(state):
        if group._training_state == TrainingState.PRE_BACKWARD:
            group._training_state = TrainingState.IDLE


def explain(error: RuntimeError, module_name: str, strategy: str) -> ConfigError | None:
    """An error that the user understands, if `error` comes from a missed hook of FSDP2."""
    text = str(error)
    if "attempting to run aten" in text:  # torchao's, of a weight that was gathered in fp8
        return ConfigError(
            f"{module_name}: under {strategy} precision=fp8 a weight is in fp8, and something computes with it outside "
            f"the forward of its linear layer: name that layer in precision.fp8.keep_in_bf16, or use strategy=ddp"
        )
    if "mixed torch.Tensor and DTensor" in text:
        return ConfigError(
            f"{module_name}: under {strategy} something computes with weights outside the forward of the layer that is "
            f"gathered for it, by another method of that layer or with a part of it: use units=[] to treat the module "
            f"as one piece, or strategy=ddp or zero2"
        )
    if not any(sign in text for sign in SIGNS):
        return None
    return ConfigError(
        f"{module_name}: under {strategy} the weights of a layer were not there in the backward pass, or a layer "
        f"writes into its input ({' '.join(text.split())[:160]}): use units=[] to treat the module as one piece, or "
        f"strategy=ddp or zero2"
    )


@contextmanager
def explaining_parts(hook: str, strategy: Any) -> Iterator[None]:
    """Say what to do where a hook mixes parts of weights with other tensors."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ConfigError(
            f"{hook} of {strategy.module_name} or of a callback computes with weights and other tensors: under "
            f"{strategy.plan.strategy.name} weights are DTensors there, of which each rank has a part; put `with "
            f"shardwise.gathered_weights(module):` around it, or give whole_weights_in=[{hook}]"
        ) from error


def check_loss(loss: Tensor, module_name: str, strategy_name: str) -> None:
    """Refuse a loss that a step cannot learn from.

    Raises:
        ConfigError: it is not one number, or a part of a sharded weight.
    """
    if loss.numel() != 1:
        raise ConfigError(f"training_step returned a loss of shape {tuple(loss.shape)}: it must be a scalar")
    if isinstance(loss, DTensor):
        raise weights_are_sharded(module_name, strategy_name)


def weights_are_sharded(module_name: str, strategy_name: str) -> ConfigError:
    """The error for a step that computes with a weight outside the layer that owns it."""
    return ConfigError(
        f"{module_name}.training_step computes with weights outside the layers that own them, a penalty on "
        f"them, say: under {strategy_name} each rank holds a shard there; use weight_decay, or "
        f"strategy=ddp, zero1 or zero2"
    )
