"""Refuses what code of the user's would do with parts of gradients and weights as if they were whole.

Each rank of a tensor axis has such parts, and they are no DTensors, which know of what they are a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from shardwise.distributed.dtensor import listing_whole, reading_whole
from shardwise.errors import ConfigError


@contextmanager
def refused(who: str) -> Iterator[None]:
    """Refuse inside what is computed of whole gradients, since it would differ between ranks."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise read_by(who)

    with (
        reading_whole(refuse),
        listing_whole(refuse),
        patch.object(torch.nn.utils.clip_grad, "_get_total_norm", refuse),
    ):
        yield


def read_by(who: str) -> ConfigError:
    """The error for numbers that are read of parts."""
    return ConfigError(
        f"{who} reads numbers of gradients or weights, of which each rank has a part under "
        f"strategy.tensor_parallel_size: leave it out (train/gradient_norm is logged anyway, and "
        f"self.clip_gradients clips by the whole norm), or use strategy.tensor_parallel_size=1"
    )


def refuse_writes(module_name: str) -> None:
    """Refuse a write into a part of what may be a part already.

    Raises:
        ConfigError
    """
    raise ConfigError(
        f"{module_name} or a callback writes into a part of a gradient or weight (p.grad[:8] = 0, say), and under "
        f"strategy.tensor_parallel_size a rank may have a part of it: change it as a whole (p.grad.mul_(2)), or use "
        f"strategy.tensor_parallel_size=1"
    )
