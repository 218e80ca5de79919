"""Wraps the `forward` of each unit in one order under every strategy, the innermost wrapper first:

    statistics in fp32, products in fp8 → exchange with peers → low precision → activation checkpointing → compile
    then the strategy shards the unit

The low-precision copies are made inside what is compiled: dynamo guards on the identity of parameters, and copies made
outside would compile every step anew. They are made inside what is checkpointed, too, so that recomputing makes them
again instead of keeping them. Checkpointing is inside what is compiled: the compiler then computes again only what the
backward pass needs, fused with it. Around a compiled layer, checkpointing would run all of its forward graph again, the
last matrix product included, which no gradient needs, and write out everything that the forward pass keeps. A layer
that is not one graph has its checkpointing outside nevertheless (see `one_graph_or`). FSDP2 and DeepSpeed use hooks on
the unit's call, around all of this.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils import stateless

from shardwise.errors import ConfigError, class_name
from shardwise.parallel.activation_checkpointing import (
    Contexts,
    LayerState,
    keep_results_of,
    own_attributes,
    recomputed,
)
from shardwise.parallel.precision import (
    ParameterSites,
    cast_forward,
    dtype_of,
    keep_statistics_in_fp32,
    parameter_sites,
)
from shardwise.parallel.units import Units
from shardwise.plan import Plan
from shardwise.plan.plan import Compile

if TYPE_CHECKING:
    from shardwise.parallel.float8 import Float8Layers  # needs torchao
    from shardwise.parallel.tensor_parallel import TensorParallel  # needs torchao


def parallelize(
    root: nn.Module, units: Units, plan: Plan, *, copied: Callable[[nn.Parameter], bool], casts_inputs: bool
) -> None:
    """Prepare `root` for its strategy, in place.

    `copied`: whether the strategy keeps a parameter whole, so that its low-precision copy is made here.
    `casts_inputs`: the strategy does not cast the inputs of units.
    """
    precision = plan.precision
    if precision.is_low:
        keep_statistics_in_fp32(root)
    if plan.compile.name != "none":
        prepare_compiler(plan.compile, len(units.modules))
    checkpointing = plan.activation_checkpointing
    contexts = keep_results_of(checkpointing.save) if checkpointing.name == "selective" else None
    for number, (_, unit) in enumerate(units.modules):
        where = parameter_sites(unit, of=copied) if precision.is_mixed else []
        replaces_tensors = precision.is_low
        if plan.capabilities.shards_parameters:  # with find_unused_parameters a zero is added to any output
            replaces_tensors = not plan.strategy.find_unused_parameters
        if casts_inputs and replaces_tensors:
            return_passed_tensors(unit)
        if precision.is_low and (casts_inputs or where):
            cast_forward(unit, dtype_of(precision.compute_dtype), where, cast_inputs=casts_inputs)
        is_checkpointed = checkpointing.name != "none" and number % checkpointing.every_n_layers == 0
        _compile_and_checkpoint(unit, plan, contexts, is_checkpointed)
        if is_checkpointed:
            refuse_functional_calls(
                [unit],
                f"activation_checkpointing={checkpointing.name} computes it again in the backward pass, with its own "
                f"weights; use activation_checkpointing=none",
                lambda parameter: torch.is_grad_enabled(),
            )


def _compile_and_checkpoint(
    unit: nn.Module, plan: Plan, contexts: Callable[[], Contexts] | None, is_checkpointed: bool
) -> None:
    forward, options = unit.forward, plan.compile

    def checkpointed_pieces() -> Callable[..., Any]:  # inside a compiled piece no result can be told from another
        return recomputed(unit, compiled(forward, options))

    own = own_attributes(unit)
    if is_checkpointed:
        unit.forward = recomputed(unit, forward, contexts)
    if options.name == "layer":
        whole = unit.forward
        unit.forward = (
            one_graph_or(whole, checkpointed_pieces, options, lambda: LayerState(unit, own))
            if is_checkpointed
            else compiled(whole, options)
        )


def prepare_float8(module: nn.Module, plan: Plan, divided: TensorParallel | None = None) -> Float8Layers | None:
    """Let the large linear layers of `module` multiply in fp8, before `parallelize`. None: the Plan has no fp8.

    `divided`: what divides layers, which has not wrapped their forward yet.
    """
    layers = find_float8(module, plan, {} if divided is None else divided.layers)
    if layers is not None:
        layers.compute()
    return layers


def find_float8(module: nn.Module, plan: Plan, divided: dict[str, str]) -> Float8Layers | None:
    """The layers of `module` that can multiply in fp8. None: the Plan has no fp8.

    `divided`: the names of layers → what they are, as `layers_of` finds them.

    Raises:
        ConfigError: no layer can, or a rank's part of one cannot.
    """
    if plan.precision.fp8 is None:
        return None
    for name in ("torchao", "torch.utils._pytree"):  # on import torchao warns of parts of its own that nobody uses here
        logging.getLogger(name).setLevel(logging.ERROR)
    from shardwise.parallel.float8 import Float8Layers
    from shardwise.parallel.tensor_parallel import divided_layers

    return Float8Layers(module, plan.precision.fp8, divided_layers(divided), plan.topology.tensor)


def roots_of(module: LightningModule) -> list[nn.Module]:
    """The modules that own the parameters outside units: the module itself, or its networks if it optimizes by hand.

    Such a module updates weights within its training_step, so each of its networks must read its weights at each call.
    A child without a forward of its own, such as an nn.ModuleList, is never called: its networks are its children.
    """
    return [module] if module.automatic_optimization else _networks(module)


def _networks(module: nn.Module) -> list[nn.Module]:
    networks: dict[nn.Module, None] = {}
    for child in module.children():
        networks |= dict.fromkeys([child] if is_called(child) else _networks(child))
    return list(networks)


def is_called(module: nn.Module) -> bool:
    """Whether `module` has a forward of its own."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def copy_outside_units(
    module: LightningModule, units: Units, plan: Plan, copied: Callable[[nn.Parameter], bool]
) -> list[ParameterSites]:
    """Let layers outside units compute on low-precision copies, too.

    The copies are made once a step. If the module optimizes by hand, each of its networks makes them at each call.

    Returns:
        The sites of the parameters that each step must copy.
    """
    inside = [unit for _, unit in units.modules]
    if module.automatic_optimization:
        return parameter_sites(module, but=inside, of=copied)
    dtype = dtype_of(plan.precision.compute_dtype)
    for child in roots_of(module):
        if child not in inside and (where := parameter_sites(child, but=inside, of=copied)):
            cast_forward(child, dtype, where, cast_inputs=False)
    return []


# torch.compile with the options of the Plan.

Function = Callable[..., Any]


def prepare_compiler(options: Compile, layers: int) -> None:
    """Set what torch has as settings of the whole process. `layers`: the number of repeated layers."""
    # Each kind of layer needs a graph for training and one for evaluation. Above the limit dynamo stops compiling.
    torch._dynamo.config.recompile_limit = max(8, 4 * layers)
    # A checkpointed layer puts low-precision copies of its weights into its modules, and takes them out at its end.
    # Dynamo traces such writes only with this setting, and a graph has no need to repeat them in the backward pass.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    settings = {
        "activation_memory_budget": 1.0 if options.memory_budget is None else options.memory_budget,
        "ban_recompute_materialized_backward": not options.recompute_elementwise,
    }
    before = {name: getattr(torch._functorch.config, name) for name in settings}
    if before != settings:  # graphs that an earlier run of this process has made would be used again
        torch._dynamo.reset()
    for name, value in settings.items():
        setattr(torch._functorch.config, name, value)


def compiled(function: Function, options: Compile, *, as_one_graph: bool = False) -> Function:
    """`function`, compiled when it is first called. `as_one_graph`: raise an error if that is not possible."""
    settings: dict[str, Any] = {}
    if options.mode == "max-autotune":  # torch's own mode of this name also switches CUDA graphs on
        settings |= {"max_autotune": True, "coordinate_descent_tuning": True}
    if options.cudagraphs:
        settings["triton.cudagraphs"] = True
    if options.overlaps_peers:  # see let_compiler_copy
        settings["_micro_pipeline_tp"] = True
    return torch.compile(function, fullgraph=as_one_graph, options=settings or None)


def one_graph_or(
    function: Function, otherwise: Callable[[], Function], options: Compile, state: Callable[[], LayerState]
) -> Function:
    """`function` as one graph; or what `otherwise` makes, from the first call on that shows that this is not possible.

    torch finds that out while it compiles, before anything of the call has run. An error of another kind comes again.
    A graph that writes to buffers computes again from what it has written, so a layer whose first call in training does
    that (`state`) is called once more, as what `otherwise` makes.
    """
    chosen, is_one_graph, is_tried = compiled(function, options, as_one_graph=True), True, False

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal chosen, is_one_graph, is_tried
        found = None
        if is_one_graph and not is_tried and torch.is_grad_enabled():
            found, is_tried = state(), True
            found.watch()
        try:
            result = chosen(*args, **kwargs)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit):
            if not is_one_graph:
                raise
            chosen, is_one_graph = otherwise(), False
            return chosen(*args, **kwargs)
        if found is not None and found.has_changed_what_matters():
            chosen, is_one_graph = otherwise(), False
            result = chosen(*args, **kwargs)
        return result

    return run


# Refuses `torch.func.functional_call` where a layer would compute with its own weights in spite of the call.

# A layer → for which of its parameters, why, and what to use
_own_weights: WeakKeyDictionary[nn.Module, tuple[Callable[[nn.Parameter], bool], str]] = WeakKeyDictionary()


def refuse_functional_calls(layers: Iterable[nn.Module], why: str, when: Callable[[nn.Parameter], bool]) -> None:
    """From now on, calls that replace parameters of `layers`, or of what is in them, raise a ConfigError with `why`.

    `when`: asked at such a call, with the parameter that it replaces.
    """
    _own_weights.update(dict.fromkeys(layers, (when, why)))
    setattr(stateless, "_functional_call", _checked)  # noqa: B010 - its type is another


def _never(parameter: nn.Parameter) -> bool:
    return False


_original = stateless._functional_call


@functools.wraps(_original)
def _checked(module: nn.Module, replaced: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if any(layer in _own_weights for layer in module.modules()):
        own = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in own.items():
            if name in replaced:
                _check(module, name, parameter)
    return _original(module, replaced, *args, **kwargs)


def _check(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    layer = module
    for part in (*name.split(".")[:-1], None):
        when, why = _own_weights.get(layer, (_never, ""))
        if when(parameter):
            raise ConfigError(f"functional_call replaces {name} of {class_name(module)}: {why}")
        if part is not None:
            layer = getattr(layer, part)


# Lets a layer return a tensor that it was given, and that it does not change, as the same tensor.
#
# Casts and the hooks of FSDP2 and DeepSpeed put other tensors in the place of a layer's inputs and outputs. But
# positions may travel through layers in a dict, and forces are the gradient of an energy by them: by another tensor
# than the one that all layers have used, it would be a part of the force, or none.


def return_passed_tensors(layer: nn.Module) -> None:
    """Let `layer` do so, whatever casts around its present `forward` and other hooks do to inputs and outputs."""
    forward = layer.forward
    given: list[Tensor] = []  # by the caller
    same: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor that forward got → this tensor, the caller's
    passed: list[Tensor | None] = []  # for each tensor that forward has returned: the caller's, if it is the same
    is_last: list[Any] = []  # the hook `after`, behind those that the strategy registers later

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        given.clear()
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            given.extend(_tensors((args, kwargs)))
            if not is_last:
                is_last.append(layer.register_forward_hook(after, with_kwargs=True))

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        got = [] if not given or torch.compiler.is_compiling() else _tensors((args, kwargs))
        if len(got) != len(given) or not got:
            return forward(*args, **kwargs)
        pairs = [(tensor, tensor._version, theirs) for tensor, theirs in zip(got, given, strict=True)]
        output = forward(*args, **kwargs)
        same.update({id(tensor): (tensor, theirs) for tensor, version, theirs in pairs if tensor._version == version})
        returned = _tensors(output)
        passed[:] = [same.get(id(tensor), (None, None))[1] for tensor in returned]
        if returned and None not in passed:  # a strategy's hooks need one: other ranks may run what this one skips
            passed[next((n for n, theirs in enumerate(passed) if theirs is not None and not theirs.is_leaf), 0)] = None
        return output

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if same:  # DeepSpeed writes its tensors into a dict of the caller
            _replace(lambda tensor: same.get(id(tensor), (tensor, tensor))[1], (args, kwargs))
        if any(tensor is not None for tensor in passed):
            found = iter(passed)
            output = _replace(lambda tensor: tensor if (theirs := next(found)) is None else theirs, output)
        for kept in (given, same, passed):
            kept.clear()
        return output

    layer.forward = run
    layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _replace(note, value)
    return found


def _replace(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Replace every tensor that needs gradients in a nest of containers; in dicts and dataclasses where they are."""
    if isinstance(value, Tensor):
        return function(value) if value.requires_grad else value
    if isinstance(value, dict):
        for key, item in value.items():
            if (other := _replace(function, item)) is not item:
                value[key] = other
    elif isinstance(value, (tuple, list)):
        items = [_replace(function, item) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return type(value)(items) if type(value) in (tuple, list) else type(value)(*items)  # a named tuple
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if (other := _replace(function, item := getattr(value, field.name))) is not item:
                object.__setattr__(value, field.name, other)
    return value
