"""How much a reader of a strategy has to know: methods, fields, and the files that plain ddp needs."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import Any

import pytest

from shardwise.strategies.fsdp import FsdpStrategy
from shardwise.strategies.pipelined import PipelinedStrategy
from shardwise.strategies.zero.strategy import ZeroStrategy
from tests.harness.patience import run_patiently
from tests.harness.rooms import MODULES

MOST_METHODS, MOST_FIELDS = 60, 20
MOST_FILES_OF_DDP = 70


def of_ours(kind: type[Any]) -> list[type[Any]]:
    return [one for one in kind.__mro__ if one.__module__.startswith("shardwise.")]


def fields_of(kind: type[Any]) -> set[str]:
    """What methods of ours assign to `self`."""
    trees = [ast.parse(textwrap.dedent(inspect.getsource(one))) for one in of_ours(kind)]
    stored = (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    return {n.attr for n in stored if isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self"}


@pytest.mark.parametrize("kind", [FsdpStrategy, ZeroStrategy, PipelinedStrategy])
def test_a_strategy_is_small_with_all_that_it_inherits(kind: type[Any]) -> None:
    """Parts that a strategy has keep it so: what hooks see of weights, how it shards, the step under way."""
    methods = {name for one in of_ours(kind) for name, value in vars(one).items() if is_method(value)}
    assert len(methods) <= MOST_METHODS, sorted(methods)
    assert len(fields_of(kind)) <= MOST_FIELDS, sorted(fields_of(kind))


def is_method(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, property) or hasattr(value, "func")


def test_plain_ddp_knows_no_other_engine_and_no_axis() -> None:
    code = "import sys, shardwise.strategies.ddp; print(*(m for m in sys.modules if m in sys.argv))"
    found = run_patiently([sys.executable, "-c", code, *MODULES], 60).stdout.split()
    files = [module for module in found if MODULES[module].stat().st_size]  # many folders have an empty __init__.py
    assert 20 < len(files) <= MOST_FILES_OF_DDP, sorted(files)
    others = ("fsdp", "zero", "pipeline", "shared_batches", "tensor_parallel", "context_parallel", "float8", "hugging")
    assert not [module for module in files if any(word in module for word in others)]
