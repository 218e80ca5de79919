"""Chooses the Lightning strategy for a Plan. Each has its own file."""

from __future__ import annotations

from importlib import import_module

from shardwise.plan import Plan
from shardwise.strategies.base import PlannedStrategy


def build_strategy(plan: Plan) -> PlannedStrategy:
    does = plan.capabilities
    module, _, name = (does.entry if plan.topology.pipeline == 1 else does.entry_of_pipeline).rpartition(".")
    strategy: PlannedStrategy = getattr(import_module(module), name)(plan)
    return strategy
