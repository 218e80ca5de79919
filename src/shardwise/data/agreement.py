"""Checks that the ranks read different samples, in one order."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data.user_loader import name_of
from shardwise.distributed.collectives import gather_objects
from shardwise.errors import ConfigError

# Gives the group of all hosts, which is made when it is first needed.
Group = Callable[[], "dist.ProcessGroup | None"]


def smallest(number: int, group: Group) -> int:
    """The smallest `number` of all ranks. Collective, on the hosts."""
    if count_ranks() == 1:
        return number
    lowest = torch.tensor(number)
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group())
    return int(lowest)


def count_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def check_distinct(first: list[Any], second: list[Any] | None, loader: Any, purpose: str, group: Group) -> None:
    """Check that all ranks have different first samples, unless these equal the `second` ones. Collective.

    Raises:
        ConfigError: two ranks have the same first samples.
    """
    if count_ranks() == 1:
        return
    digest = _digest(first)
    distinct = None if not first or (second and _digest(second) == digest) else digest
    digests = gather_objects(group(), distinct)
    for rank, found in enumerate(digests):
        if found is not None and found in digests[:rank]:
            raise ConfigError(
                f"the {purpose} data {name_of(loader)} keeps an order of its own, and ranks {digests.index(found)} and "
                f"{rank} of {count_ranks()} read the same samples: split it by rank where it is read. RANK and "
                f"WORLD_SIZE are in the environment; use datasets.distributed.split_dataset_by_node(dataset, rank, "
                f"world_size), webdataset.split_by_node, or itertools.islice(samples, rank, None, world_size) in its "
                f"__iter__; worker processes split their rank's part again (torch.utils.data.get_worker_info)"
            )


def _digest(value: Any) -> str | None:
    """A digest that is equal for equal samples; None if the samples cannot be pickled."""
    sums = hashlib.sha256()

    def add(value: Any) -> None:
        sums.update(type(value).__name__.encode())
        if isinstance(value, Tensor) and value.layout == torch.strided:
            value = value.as_subclass(Tensor)  # a subclass may answer other than torch does
            sums.update(f"{value.dtype}{tuple(value.shape)}".encode())
            sums.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                add(key)
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            sums.update(pickle.dumps(value))

    try:
        add(value)
    except Exception:  # of whatever a stranger's object does when it is looked at
        return None
    return sums.hexdigest()


def check_same_order(digest: str, name: str, purpose: str, group: Group) -> None:
    """Check that a sampler of the class `name` gives all ranks the same order, which has this digest. Collective.

    Raises:
        ConfigError: two ranks have different orders.
    """
    if count_ranks() > 1 and len(set(gather_objects(group(), digest))) > 1:
        raise ConfigError(
            f"the {purpose} loader's {name} gives ranks different samples, and what it gives is dealt out over "
            f"the ranks here: let it give every rank the order of the whole data set, from torch's random numbers, "
            f"which are seeded before each epoch, or from set_epoch(epoch)"
        )
