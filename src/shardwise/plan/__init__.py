"""The Plan: a run's config with every decision made, which ranks read. `resolve.make_plan` makes it, without torch."""

from shardwise.plan.plan import Host, Plan

__all__ = ["Host", "Plan"]
