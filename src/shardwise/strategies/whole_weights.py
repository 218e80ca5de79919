"""FSDP2 frees a layer's weights around its forward and backward pass, by hooks on the tensors that go in and come out.

Where these hooks would miss, a weight is not there when the backward pass needs it (`setStorage … of size 0`). Here
the gaps are closed: outputs that are views, outputs inside objects, layers that write into their inputs, and backward
passes that are themselves differentiated, or that run within a forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.errors import ConfigError
from shardwise.parallel.precision import map_tensors

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, nn.Module, type)
# What torch says when a hook has missed
SIGNS = ("setStorage", "storage of size 0", "RegisterPostBackwardFunction")


def show_outputs(layer: nn.Module) -> None:
    """Let FSDP2's hooks find what comes out of `layer`, and let `layer` write into what comes in."""
    module: Any = layer
    state, forward = module._get_fsdp_state(), module.forward
    ways: list[Callable[..., Any]] = []  # how it is called, once the first call has shown that
    hides = True  # what it gives, in objects, as far as is known

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
        # A hook on a view is lost when somebody writes into the view.
        return map_tensors(lambda t: t.clone() if t.requires_grad and t._is_view() else t, output)

    module.forward = run


def _try_both_ways(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Callable[..., Any]]:
    """`forward`, or, if it writes into its inputs, which FSDP2 does not allow, `forward` on copies of them."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    random = _random_states()
    try:
        return forward(*args, **kwargs), forward
    except RuntimeError as error:
        if "RegisterPostBackwardFunction" not in str(error):
            raise
    with torch.no_grad():
        for buffer, kept in buffers:
            buffer.copy_(kept)
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
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(functools.partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    return states


def gives_tensors(output: Any) -> bool:
    """Whether a tensor that needs gradients is in it where everybody looks: by itself, or in a list, tuple or dict."""
    if isinstance(output, Tensor):
        return output.requires_grad
    if isinstance(output, dict):
        output = list(output.values())
    return isinstance(output, (list, tuple)) and any(map(gives_tensors, output))


def tensors_in_objects(value: Any) -> list[Tensor]:
    """Tensors that need gradients, in attributes of objects: in a graph, say. Lists, tuples and dicts, in which a
    strategy finds tensors itself, are only looked through for objects."""
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
    """Backward passes within a step, and backward passes that are differentiated again.

    FSDP2 takes every backward pass for the step's last: it reduces the gradients and frees the weights. A pass that
    `torch.autograd.grad` makes within training_step is not the last, and the graph that it leaves under `create_graph`
    needs the weights of its layers without passing their hooks. After such a pass weights stay; before the next
    backward pass all of them are gathered, and its gradients are reduced at its end.
    """

    def __init__(self, module: nn.Module, automatic: bool) -> None:
        self.layers = [m for m in module.modules() if isinstance(m, FSDPModule)]
        self.automatic = automatic  # every backward pass of the step's goes through `run`
        self.running = False
        self.gathers = False  # a graph of second order was made in this batch
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
        inner = [False]  # what the hooks of the pass that is ending saw

        def end_of_pass() -> None:
            if inner[0] or self._is_inner():
                inner[0] = False
                state._state_ctx.post_backward_final_callback_queued = False
                for other in state._state_ctx.all_states:
                    _be_idle(other)
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
        for group in _groups_of(state):
            self._hold_back(group)

    def _hold_back(self, group: Any) -> None:
        post_backward = group.post_backward

        def run(*args: Any) -> None:
            waits_for_the_end = self.gathers and not self._ending
            if not self._is_inner() and not waits_for_the_end:
                post_backward(*args)

        group.post_backward = run

    def run(self, backward: Callable[[], Any]) -> Any:
        """A backward pass of the step's."""
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

    def reshard(self) -> None:
        """Weights have changed, or are not needed any more: the next forward pass gathers them anew."""
        for layer in self.layers:
            layer.reshard()


def _groups_of(state: Any) -> list[Any]:
    """A layer's groups of parameters; torch 2.11 has one of them, or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _be_idle(state: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    if state._training_state == TrainingState.PRE_BACKWARD:
        state._training_state = TrainingState.IDLE
    for group in _groups_of(state):
        if group._training_state == TrainingState.PRE_BACKWARD:
            group._training_state = TrainingState.IDLE


def explained(error: RuntimeError, module_name: str, strategy: str) -> ConfigError | None:
    """In words, if a hook of FSDP2's has missed."""
    said = str(error)
    if not any(sign in said for sign in SIGNS):
        return None
    return ConfigError(
        f"{module_name}: under {strategy} the weights of a layer were not there in the backward pass, or a layer "
        f"writes into its input ({' '.join(said.split())[:160]}): use units=[] to treat the module as one piece, or "
        f"strategy=ddp or zero2"
    )


def weights_are_sharded(module_name: str, strategy_name: str) -> ConfigError:
    """For a step that computes with a weight outside the layer that owns it."""
    return ConfigError(
        f"{module_name}.training_step computes with weights outside the layers that own them, a penalty on "
        f"them, say: under {strategy_name} each rank holds a shard there; use weight_decay, or "
        f"strategy=ddp, zero1 or zero2"
    )
