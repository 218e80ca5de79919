"""What a module may give for the weight of a batch in the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardwise.data.loaders import weigher_of
from shardwise.errors import ConfigError


class Weighs:
    automatic_optimization = True

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def loss_weight(self, batch: Any) -> Any:
        return self.weight


@pytest.mark.parametrize("weight", [3, 2.5, 0, torch.tensor(3), torch.tensor([2.5]), np.int64(3), np.float32(0.5)])
def test_one_number_from_zero_on_is_taken(weight: Any) -> None:
    weigh = weigher_of(Weighs(weight))
    assert weigh is not None and weigh(None) == float(weight) and isinstance(weigh(None), (int, float))


@pytest.mark.parametrize(
    ("weight", "given"),
    [
        (-1, "-1"),
        (float("nan"), "nan"),
        (None, "None"),
        ("3", "'3'"),
        (torch.ones(2, 3), "a tensor of shape .2, 3."),
    ],
)
def test_anything_else_is_refused(weight: Any, given: str) -> None:
    weigh = weigher_of(Weighs(weight))
    assert weigh is not None
    with pytest.raises(ConfigError, match=f"Weighs.loss_weight gave {given}: it must give one number from 0 on"):
        weigh(None)
