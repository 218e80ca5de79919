"""Checks the parts of a config that have a `_target_`, for the Plan."""

from __future__ import annotations

from typing import Any

from shardwise.config.bind import as_yaml
from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.plan import Host
from shardwise.plan.rules import check_plain

MOST_WORKERS = 16  # each has memory of its own, and more than this many seldom read faster


def data_node(node: Any, host: Host, ranks_per_node: int) -> dict[str, Any] | None:
    """The node of the data; None if it names no class, and the module's own loaders are used.

    `num_workers: auto` becomes a number: the CPUs of a rank without the one that the rank itself needs.
    """
    if not isinstance(node, dict) or node.get("_target_", "") is not None:
        made = target_node("data", _without_nulls(node))
        if made.get("num_workers") == "auto":
            cpus = host.cpus // ranks_per_node if host.cpus_per_rank is None else host.cpus_per_rank
            made = made | {"num_workers": min(max(cpus - 1, 0), MOST_WORKERS)}
        return made
    if options := _options("data", node):
        raise ConfigError(
            f"{options[0]}: an option of no class; give data._target_=package.Data, or leave it out: the module's own "
            f"loaders take no options"
        )
    return None


def _without_nulls(node: Any) -> Any:
    """The node, with None for each node directly below that names no class."""
    if not isinstance(node, dict):
        return node
    made = {}
    for key, value in node.items():
        is_null = isinstance(value, dict) and value.get("_target_", "") is None
        if is_null and (options := _options(f"data.{key}", value)):
            raise ConfigError(
                f"{options[0]}: an option of no class; give data.{key}._target_=package.Class, or leave it out"
            )
        made[key] = None if is_null else value
    return made


def _options(key: str, node: dict[str, Any]) -> list[str]:
    return [f"{key}.{name}={as_yaml(value)}" for name, value in node.items() if name != "_target_"]


def target_node(key: str, node: Any) -> dict[str, Any]:
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{key} names no class: give {key}._target_=package.Class")
    check_plain(key, node)
    return node


def logger_nodes(config: RunConfig) -> dict[str, dict[str, Any]]:
    loggers = named_nodes("loggers", config.loggers)
    for name, node in loggers.items():
        if node.get("log_model"):
            raise ConfigError(
                f"loggers.{name}.log_model={as_yaml(node['log_model'])}: a checkpoint is a folder in this program's "
                f"own format, and no tracker is given one; leave it out, and upload what shardwise export writes"
            )
    return loggers


def named_nodes(key: str, nodes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The nodes by name, without those that the user has set to null."""
    return {name: target_node(f"{key}.{name}", node) for name, node in nodes.items() if node is not None}
