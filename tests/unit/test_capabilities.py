"""The table of what strategies can do: nobody else asks for a strategy's name, and the docs print it."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

import pytest

from benchmarks.pages.numerics import FEATURES
from benchmarks.report import with_tables
from shardwise.plan.capabilities import STRATEGIES, Capabilities
from tests.harness.rooms import MODULES, ROOT, nodes_of, room_of

TABLE = "shardwise.plan.capabilities"
NAMES = STRATEGIES.keys() | {"zero", "hybrid"}  # and what names begin or end with
PARTS = ("startswith", "endswith", "removeprefix", "removesuffix", "partition", "fullmatch", "match", "search")
FACTS = {"entry", "entry_of_pipeline", "package", "shards", "has_replicas", "uses_dtensors", "owns_step", "options",
         "with_more_shards", "sends_less", "sends_less_between_nodes"}  # fmt: skip


def asked_for(node: ast.AST) -> Iterator[ast.AST | None]:
    """What a node compares something with."""
    if isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PARTS:
        yield from node.args
    elif isinstance(node, ast.MatchValue):
        yield node.value
    elif isinstance(node, ast.Dict):
        yield from node.keys
    elif isinstance(node, ast.Attribute) and node.attr == "zero_stage":  # what a name ends with
        yield ast.Constant("zero")


def names_in(nodes: Iterator[ast.AST]) -> list[str]:
    """Names of strategies that something is compared with."""
    asked = [one for node in nodes for one in asked_for(node) if one is not None]
    inside = [x for one in asked for x in (one.elts if isinstance(one, (ast.Tuple, ast.List, ast.Set)) else [one])]
    return [one.value for one in inside if isinstance(one, ast.Constant) and one.value in NAMES]


def test_a_strategys_name_is_compared_in_the_table_and_in_strategies_alone() -> None:
    found = {
        module: names
        for module, path in MODULES.items()
        if module not in (TABLE, "shardwise") and room_of(module) != "strategies"
        if (names := names_in(iter(nodes_of(path))))
    }
    assert not found, "ask for what a strategy can do: plan/capabilities.py"


@pytest.mark.parametrize(
    "code",
    ['name == "ddp"', 'name in ("ddp", "x")', 'name.startswith("zero")', 'x = {"fsdp": 1}[name]',
     'match name:\n    case "zero1" | "zero2": pass', "strategy.zero_stage == 3"],
)  # fmt: skip
def test_the_reader_of_names_sees_each_way_to_ask(code: str) -> None:
    assert names_in(ast.walk(ast.parse(code)))


def test_the_docs_print_the_table() -> None:
    page = (ROOT / "docs/numerics.md").read_text()
    assert with_tables(page) == page, "run python benchmarks/report.py"
    reasons = {field.name for field in dataclasses.fields(Capabilities)} - FACTS
    assert reasons == FEATURES.keys(), "benchmarks/pages/numerics.py says how a user asks for each feature"
