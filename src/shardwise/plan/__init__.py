"""RunConfig + Host → Plan: every number that follows from others is decided here, without torch."""

from shardwise.plan.plan import Host, Plan
from shardwise.plan.resolve import make_plan

__all__ = ["Host", "Plan", "make_plan"]
