"""How much a batch counts in the loss, as the module says."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardwise.errors import ConfigError, class_name
from shardwise.protocols import optional


def weigher_of(module: Any) -> Callable[[Any], float] | None:
    """`loss_weight` of `module`, or None. What it gives is a number, also where it is a tensor of one element.

    Raises:
        ConfigError: by what is returned: the module gives no number from 0 on.
    """
    weigh = optional(module, "loss_weight")
    if weigh is None or not module.automatic_optimization:  # which weighs its micro-batches itself
        return None

    def number_of(batch: Any) -> float:
        weight = number = weigh(batch)
        with suppress(RuntimeError, ValueError):  # of several elements
            number = weight.item() if hasattr(weight, "item") else weight
        if not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            given = f"a tensor of shape {tuple(weight.shape)}" if hasattr(number, "shape") else repr(number)
            raise ConfigError(
                f"{class_name(module)}.loss_weight gave {given}: it must give one number from 0 on, how many tokens "
                f"of the batch count, say"
            )
        return number

    return number_of
