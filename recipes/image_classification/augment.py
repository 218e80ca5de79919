"""Augmentation on the device, of a whole batch at once.

Every random number is a hash of (seed, epoch, sample, purpose): what happens to an image depends on nothing else, not
on the worker that read it, its rank, its place in the batch or the kind of device. The integers are the same bits
everywhere; what is computed from them is the same up to a device's own rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import ConfigError

TRIES = 10  # rectangles drawn for one image: the first that fits is taken
GOLDEN = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a random number is for: the numbers of two purposes are unrelated."""

    CROP = 1
    FLIP = 2
    BRIGHTNESS = 3
    CONTRAST = 4
    ERASE = 5
    ERASE_AREA = 6
    MIXUP_PARTNER = 7
    MIXUP = 8


@dataclass(frozen=True)
class Draw:
    """The random numbers of some samples in one epoch."""

    seed: int
    epoch: int
    index: Tensor  # int64 [B]: the samples' places in the data set

    def bits(self, purpose: Purpose, count: int = 1) -> Tensor:
        """int64 [B, count], uniform over all 64 bits: splitmix64, its state a function of sample and purpose."""
        key = 0
        for word in (self.seed, self.epoch, purpose):
            key = mix_int(key ^ mix_int(word + GOLDEN))
        places = self.index[:, None] * count + torch.arange(count, device=self.index.device)
        return mix(places * signed(GOLDEN) + signed(key))

    def uniform(self, purpose: Purpose, count: int = 1) -> Tensor:
        """fp64 [B, count] in [0, 1)."""
        return shift(self.bits(purpose, count), 11).double() * 2.0**-53


@dataclass(frozen=True)
class Augment:
    """What is done to a training image; every part is off by default."""

    crop_scale: Sequence[float] | None = None  # least and largest share of the image's area that is kept
    crop_ratio: Sequence[float] = (3 / 4, 4 / 3)  # width / height of a crop
    flip: float = 0.0  # probability
    brightness: float = 0.0  # factor in [1 - brightness, 1 + brightness]
    contrast: float = 0.0  # likewise, around the data's mean
    erase: float = 0.0  # probability

    def __post_init__(self) -> None:
        for name in ("flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"augment.{name}={getattr(self, name)} is a probability: use one between 0 and 1")
        for name in ("brightness", "contrast"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"augment.{name}={getattr(self, name)} must be at least 0 and below 1, e.g. 0.4")
        scale, ratio = self.crop_scale, self.crop_ratio
        if scale is not None and not (len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1):
            raise ConfigError(f"augment.crop_scale={list(scale)}: two shares of the area, e.g. [0.08, 1.0]")
        if not (len(ratio) == 2 and 0 < ratio[0] <= ratio[1]):
            raise ConfigError(f"augment.crop_ratio={list(ratio)}: two ratios of width to height, e.g. [0.75, 1.333]")

    def colours_and_crop(self, images: Tensor, draw: Draw, mean: Tensor) -> Tensor:
        """Before normalisation: fp32 [B, C, H, W] in [0, 1], of the same shape and range."""
        if self.crop_scale is not None:
            images = random_resized_crop(images, draw, self.crop_scale, self.crop_ratio)
        if self.flip:
            images = torch.where(per_image(draw.uniform(Purpose.FLIP) < self.flip), images.flip(-1), images)
        # Around the image's own mean, contrast would depend in its last bits on how the batch is reduced.
        for purpose, strength, centre in (
            (Purpose.BRIGHTNESS, self.brightness, torch.zeros_like(mean)),
            (Purpose.CONTRAST, self.contrast, mean),
        ):
            if strength:
                factor = per_image(1 + strength * (2 * draw.uniform(purpose) - 1)).to(images.dtype)
                images = ((images - centre) * factor + centre).clamp(0, 1)
        return images

    def erased(self, images: Tensor, draw: Draw) -> Tensor:
        """After normalisation: a rectangle of some images becomes 0, the data's mean."""
        return random_erase(images, draw, self.erase) if self.erase else images


def random_resized_crop(images: Tensor, draw: Draw, scale: Sequence[float], ratio: Sequence[float]) -> Tensor:
    """A rectangle of each image [B, C, H, W], bilinearly stretched to the image's own size."""
    height, width = images.shape[-2:]
    left, top, w, h = rectangles(draw, Purpose.CROP, width, height, scale, ratio)
    # Not affine_grid, whose matrix product may round differently for another batch size.
    x = left[:, None] + w[:, None] * (torch.arange(width, device=images.device) + 0.5) / width
    y = top[:, None] + h[:, None] * (torch.arange(height, device=images.device) + 0.5) / height
    x, y = (2 * x / width - 1).to(images.dtype), (2 * y / height - 1).to(images.dtype)
    grid = torch.stack((x[:, None, :].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)), dim=-1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def random_erase(images: Tensor, draw: Draw, probability: float) -> Tensor:
    """Images [B, C, H, W] of which each, with `probability`, has a rectangle of zeros."""
    height, width = images.shape[-2:]
    left, top, w, h = rectangles(draw, Purpose.ERASE_AREA, width, height, (0.02, 1 / 3), (0.3, 3.3))
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device) + 0.5
    inside_x = (x >= left[:, None]) & (x < (left + w)[:, None])
    inside_y = (y >= top[:, None]) & (y < (top + h)[:, None])
    chosen = draw.uniform(Purpose.ERASE) < probability
    return images.masked_fill((inside_y[:, :, None] & (inside_x & chosen)[:, None, :])[:, None], 0.0)


def rectangles(
    draw: Draw, purpose: Purpose, width: int, height: int, scale: Sequence[float], ratio: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fp64 (left, top, width, height) [B] within the image: uniform in area and in the logarithm of the ratio."""
    area, shape, left, top = draw.uniform(purpose, 4 * TRIES).chunk(4, dim=-1)
    area = width * height * (scale[0] + (scale[1] - scale[0]) * area)
    log_ratio = math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * shape
    w, h = (area * log_ratio.exp()).sqrt(), (area / log_ratio.exp()).sqrt()
    fits = (w <= width) & (h <= height)
    first = (fits * torch.arange(TRIES, 0, -1, device=fits.device)).argmax(-1, keepdim=True)  # all misfits: any
    w, h = w.gather(-1, first).clamp(max=width), h.gather(-1, first).clamp(max=height)
    left, top = left.gather(-1, first) * (width - w), top.gather(-1, first) * (height - h)
    return left[:, 0], top[:, 0], w[:, 0], h[:, 0]


def mixup(images: Tensor, draw: Draw, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each image mixed with another of its micro-batch: (images, int64 [B] the partner's place, fp32 [B] own share).

    The one thing here that depends on more than the sample: the partners are found within the micro-batch (a ring in
    the order of a hash, so the batch's own order does not matter), since other images are not at hand. The share is
    Beta(alpha, alpha) by inversion: `table` is `beta_table(alpha)`.
    """
    order = draw.bits(Purpose.MIXUP_PARTNER)[:, 0].argsort()
    partner = torch.empty_like(order).scatter_(0, order, order.roll(1))
    place = draw.uniform(Purpose.MIXUP)[:, 0] * (len(table) - 1)
    below = place.long()
    share = torch.lerp(table[below], table[below + 1], place - below).to(images.dtype)
    weight = share[:, None, None, None]
    return images * weight + images[partner] * (1 - weight), partner, share


def beta_table(alpha: float, size: int = 4096) -> Tensor:
    """fp64 [size + 1]: the quantiles 0, 1/size, …, 1 of Beta(alpha, alpha)."""
    if not alpha > 0:
        raise ConfigError(f"mixup_alpha={alpha}: Beta(alpha, alpha) needs alpha above 0, e.g. 0.2; 0 is no mixup")
    # With t = x**alpha the density has no pole on [0, 1/2], and the other half is its mirror image.
    t = torch.linspace(0, 0.5**alpha, 16 * size + 1, dtype=torch.float64, device="cpu")
    x = t ** (1 / alpha)
    density = (1 - x) ** (alpha - 1)
    cdf = F.pad(torch.cumsum(density[1:] + density[:-1], 0), (1, 0))
    cdf = cdf / cdf[-1] / 2
    wanted = torch.linspace(0, 0.5, size // 2 + 1, dtype=torch.float64, device="cpu")
    after = torch.searchsorted(cdf, wanted).clamp(1, len(cdf) - 1)
    part = (wanted - cdf[after - 1]) / (cdf[after] - cdf[after - 1])
    lower = torch.lerp(t[after - 1], t[after], part) ** (1 / alpha)
    return torch.cat((lower, 1 - lower[:-1].flip(0)))


def per_image(values: Tensor) -> Tensor:
    """[B, 1] -> [B, 1, 1, 1]."""
    return values[:, :, None, None]


# splitmix64's finalizer (Steele et al. 2014). torch has no shifts of unsigned numbers: after an arithmetic shift of an
# int64 the copies of the sign are masked away. Products wrap around, as they should.


def mix(value: Tensor) -> Tensor:
    """A bijection of int64 in which every bit of the input changes half of the output's."""
    value = (value ^ shift(value, 30)) * signed(0xBF58476D1CE4E5B9)
    value = (value ^ shift(value, 27)) * signed(0x94D049BB133111EB)
    return value ^ shift(value, 31)


def shift(value: Tensor, by: int) -> Tensor:
    """A logical shift to the right."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def mix_int(value: int) -> int:
    """`mix` of one unsigned number, on the host."""
    value %= 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value
