"""What an image of each class counts in the training loss."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError, count


def given_weights(weights: str | Sequence[float], classes: int) -> Tensor:
    """fp32 [classes]: of a list; ones for "balanced", until the data are known."""
    if weights == "balanced":
        return torch.ones(classes)
    if isinstance(weights, str):
        raise ConfigError(f"module.class_weights={weights}: must be balanced, or a list of a number for each class")
    if len(weights) != classes:
        raise ConfigError(
            f"module.class_weights has {count(len(weights), 'number')}, and model.num_classes={classes}: give one for "
            f"each class, in the order of the classes"
        )
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ConfigError(
            f"module.class_weights={list(weights)}: each must be at least 0 and finite, and one above 0, e.g. 1.5"
        )
    return torch.tensor(list(weights), dtype=torch.float32)


def balanced_weights(data: Any, classes: int) -> Tensor:
    """fp32 [classes]: images / (classes * images of the class) in the training data, as scikit-learn's "balanced"."""
    train = getattr(data, "splits", {}).get("train")
    labels = getattr(train, "labels", None)
    if train is None or labels is None:
        raise ConfigError(
            "module.class_weights=balanced counts the labels of a training set that has all of them as `labels`, as "
            "those of this recipe have: give a list of a number for each class"
        )
    images = torch.bincount(torch.as_tensor(labels), minlength=classes)
    if not images.all():
        raise ConfigError(
            f"module.class_weights=balanced: class {int((images == 0).nonzero()[0])} has no training images, so that "
            f"its weight would be infinite; give a list, or a smaller num_classes"
        )
    return images.sum() / (classes * images.float())
