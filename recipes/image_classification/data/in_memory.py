"""Images that lie in memory: scikit-learn's digits, and noise for measuring."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.image_classification.data.base import ImageData, Sample
from shardwise.data.order import permute
from shardwise.errors import ConfigError


class InMemory(Dataset[Sample]):
    """Images that are there already: uint8 [N, C, H, W], repeated to `length` samples."""

    def __init__(self, images: Tensor, labels: Tensor, length: int | None = None) -> None:
        self.images, self.labels, self.length = images, labels, length or len(images)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        place = range(self.length)[index] % len(self.images)  # past the end: IndexError
        return {"image": self.images[place], "label": self.labels[place], "index": index}


class Digits(ImageData):
    """scikit-learn's 1,797 handwritten digits of 8×8 grey pixels: 70 % train, 15 % validation, 15 % test."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        batch_size: int,
        num_classes: int = 10,
        channels: int = 1,
        image_size: int = 8,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_classes, channels, image_size, mean, std, batch_size, num_workers)
        if (num_classes, channels, image_size) != (10, 1, 8):
            raise ConfigError(
                f"data.num_classes={num_classes} data.channels={channels} data.image_size={image_size}: the digits "
                f"are what they are; leave them at 10, 1 and 8"
            )

    def make_split(self, split: str) -> Dataset[Sample]:
        # Here, since it takes a second that other data need not spend.
        try:
            from sklearn.datasets import load_digits  # type: ignore[import-untyped]
        except ImportError as error:
            raise ConfigError(f"data=digits needs scikit-learn ({error}): pip install -r requirements.txt") from None

        digits = load_digits()
        total = len(digits.images)
        order = permute(np.arange(total, dtype=np.int64), total, key=0)  # the same on every platform, unlike numpy's
        borders = {"train": (0, 0.7), "validation": (0.7, 0.85), "test": (0.85, 1)}[split]
        chosen = order[round(total * borders[0]) : round(total * borders[1])]
        pixels = (digits.images[chosen] * (255 / 16)).round().astype(np.uint8)
        labels = digits.target[chosen].astype(np.int64)
        return InMemory(torch.from_numpy(pixels)[:, None], torch.from_numpy(labels))


class SyntheticImages(ImageData):
    """Noise, for measuring: `distinct` random images made once in memory, handed out `samples` times an epoch."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        batch_size: int,
        num_classes: int = 1000,
        channels: int = 3,
        image_size: int = 224,
        samples: int = 65536,
        distinct: int = 256,
        validation_samples: int = 1024,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_classes, channels, image_size, mean, std, batch_size, num_workers)
        for name, value in (("samples", samples), ("distinct", distinct), ("validation_samples", validation_samples)):
            if value < 1:
                raise ConfigError(f"data.{name}={value}: must be at least 1")
        self.samples, self.distinct, self.validation_samples = samples, distinct, validation_samples

    def setup(self, stage: str) -> None:
        """Makes the images once, for all splits."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.distinct, self.channels, self.image_size, self.image_size)
        self.images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(0, self.num_classes, shape[:1], generator=generator)
        super().setup(stage)

    def make_split(self, split: str) -> Dataset[Sample]:
        return InMemory(self.images, self.labels, self.samples if split == "train" else self.validation_samples)
