"""torch.compile with the options of the Plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shardwise.parallel.layer_state import LayerState
from shardwise.plan.plan import Compile

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
