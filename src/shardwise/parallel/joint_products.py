"""Makes one product of several that have the same input, such as a layer's query, key and value, or gate and up.

A pass of the compiler: it changes the graph, and neither modules nor weights. One product instead of three saves two
sums of gradients, each of which reads and writes a whole activation, and its matrices are larger. It joins weights that
are low-precision copies made in the graph, as under ddp: there the copies are made in one place, and joining them costs
nothing. A weight that enters the graph as it is, as under fsdp, would have to be copied, and the copy to be kept.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_LINEAR = torch._C._nn.linear


class JointProducts(CustomGraphPass):
    """Joins `linear(x, a)`, `linear(x, b)`, … of a graph as dynamo has made it, before autograd sees it."""

    def __call__(self, graph: fx.Graph) -> None:
        owner = graph.owning_module
        # What is checkpointed is a graph of its own within the graph.
        owners = [m for m in owner.modules() if isinstance(m, fx.GraphModule)] if owner is not None else []
        for inner in [graph, *(m.graph for m in owners if m.graph is not graph)]:
            for products in list(_alike(inner)):
                _join(inner, products)
        for inner_owner in owners:
            inner_owner.recompile()

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def _alike(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Products of one input, in their order, whose weights are all there before the first of them."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    found: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is _LINEAR and not node.kwargs:
            x, weight, bias = (*node.args, None)[:3]
            if _is_copy(weight) and (bias is None or _is_copy(bias)):
                found.setdefault((x, weight.meta["example_value"].dtype, bias is None), []).append(node)
    for products in found.values():
        needed = [part for node in products for part in node.args[1:] if part is not None]
        is_used_twice = len({node.args[1] for node in products}) < len(products)
        if len(products) > 1 and not is_used_twice and all(place[part] < place[products[0]] for part in needed):
            yield products


def _is_copy(weight: Any) -> bool:
    return weight.op == "call_method" and weight.target == "to" and "example_value" in weight.meta


def _join(graph: fx.Graph, products: list[fx.Node]) -> None:
    inputs = [(*node.args, None)[:3] for node in products]
    rows = [weight.meta["example_value"].shape[0] for _, weight, _ in inputs]
    with graph.inserting_before(products[0]):
        weights, biases = (
            None if inputs[0][i] is None else graph.call_function(torch.cat, ([given[i] for given in inputs],))
            for i in (1, 2)
        )
        joint = graph.call_function(_LINEAR, (inputs[0][0], weights, biases))
        parts = graph.call_method("split", (joint, rows, -1))
        for number, node in enumerate(products):
            part = graph.call_function(operator.getitem, (parts, number))
            part.meta |= node.meta
            node.replace_all_uses_with(part)
    for node in products:
        graph.erase_node(node)
