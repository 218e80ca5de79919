"""Makes the Plan from RunConfig and Host, with every number that follows from others. It does not need torch."""

from shardwise.plan.plan import Host, Plan
from shardwise.plan.resolve import make_plan

__all__ = ["Host", "Plan", "make_plan"]
