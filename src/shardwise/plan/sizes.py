"""Computes the number of ranks, of micro-batches in a step, and of steps."""

from __future__ import annotations

from shardwise.config.schema import RunConfig
from shardwise.errors import ConfigError
from shardwise.plan.accelerator import check_devices
from shardwise.plan.plan import Host
from shardwise.plan.topology import Topology, make_topology


def resolve_topology(config: RunConfig, host: Host, accelerator: str) -> Topology:
    for word, given, started in (("nodes", config.nodes, host.nodes), ("devices", config.devices, host.devices)):
        if given is not None and started is not None and given != started:
            raise ConfigError(
                f"{word}={given}, but {host.launcher} started {started}: leave {word} out, or make them equal"
            )
    nodes = config.nodes if config.nodes is not None else host.nodes or 1
    devices = config.devices if config.devices is not None else host.devices or 1
    for word, value in (("nodes", nodes), ("devices", devices)):
        if value < 1:
            raise ConfigError(f"{word}={value}: must be at least 1")
    if nodes > 1 and host.launcher == "local":
        raise ConfigError(
            f"nodes={nodes}: a local launch is one node; use nodes=1, or start train.py on every node: "
            f"shardwise submit nodes={nodes} …, srun, or torchrun"
        )
    if (per_node := config.cluster.devices_per_node) is not None:
        if per_node < 1:
            raise ConfigError(f"cluster.devices_per_node={per_node}: must be at least 1, or null")
        if devices > per_node:
            raise ConfigError(
                f"devices={devices} is more than a node of cluster={config.cluster.name} has, {per_node}; use "
                f"devices={per_node} or fewer, and more nodes"
            )
    check_devices(devices, nodes, accelerator, host)
    options = vars(config.strategy)
    axes = {axis: options.get(f"{axis}_parallel_size", 1) for axis in ("context", "tensor", "pipeline")}
    return make_topology(config.strategy.name, nodes, devices, options.get("shard_size"), **axes)


def accumulation_steps(config: RunConfig, topology: Topology) -> int:
    micro, batch, ranks = config.micro_batch_size, config.global_batch_size, topology.data_parallel_size
    step = micro * ranks
    if batch % step:
        below, above = batch // step * step, (batch // step + 1) * step
        near = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"global_batch_size={batch} is not a multiple of micro_batch_size * data_parallel_size = "
            f"{micro} * {ranks}; use {near}"
        )
    return batch // step


def check_train_batches(config: RunConfig, accumulate: int) -> int | None:
    batches = config.max_train_batches
    if batches is not None and (batches < 1 or batches % accumulate):
        near = " or ".join(str(n * accumulate) for n in (batches // accumulate, batches // accumulate + 1) if n > 0)
        raise ConfigError(
            f"max_train_batches={batches}: must be a multiple of the {accumulate} micro-batches that each rank has in "
            f"a step; use {near}"
        )
    return batches


def duration(config: RunConfig) -> tuple[int | None, int | None]:
    given = {
        w: getattr(config, w) for w in ("max_steps", "max_epochs", "max_samples") if getattr(config, w) is not None
    }
    if len(given) != 1:
        lengths = ", ".join(f"{word}={value}" for word, value in given.items()) or "none of them"
        others = " ".join(f"{word}=null" for word in list(given)[:-1])
        raise ConfigError(
            f"exactly one of max_steps, max_epochs, max_samples says how long to train; given: {lengths}; "
            + (f"add {others}" if given else "give max_steps=N")
        )
    word, value = next(iter(given.items()))
    if value < 1:
        raise ConfigError(f"{word}={value}: must be at least 1")
    if word == "max_epochs":
        return None, value
    if word == "max_steps":
        return value, None
    if value % config.global_batch_size:
        steps = value // config.global_batch_size
        near = " or ".join(str(n * config.global_batch_size) for n in (steps, steps + 1) if n)
        raise ConfigError(
            f"max_samples={value} is not a multiple of global_batch_size={config.global_batch_size}; use {near}"
        )
    return value // config.global_batch_size, None
