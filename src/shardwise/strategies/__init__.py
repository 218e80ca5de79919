"""Chooses the Lightning strategy for a Plan. Each has its own file."""

from __future__ import annotations

from shardwise.plan import Plan
from shardwise.strategies.base import PlannedStrategy


def build_strategy(plan: Plan) -> PlannedStrategy:
    match plan.strategy.name:
        case "ddp":
            from shardwise.strategies.ddp import DdpStrategy

            return DdpStrategy(plan)
        case "fsdp" | "fsdp_hybrid" if plan.topology.pipeline > 1:
            from shardwise.strategies.pipelined import PipelinedStrategy

            return PipelinedStrategy(plan)
        case "fsdp" | "fsdp_hybrid":
            from shardwise.strategies.fsdp import FsdpStrategy

            return FsdpStrategy(plan)
        case "zero1" | "zero2" | "zero3":
            from shardwise.strategies.zero.strategy import ZeroStrategy

            return ZeroStrategy(plan)
