"""From the bytes of an image file to uint8 of one size."""

import io
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from shardwise.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png")
# What Pillow raises for a file that is not an image, is cut short or would be larger than memory.
UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError, ArithmeticError, LookupError, Image.DecompressionBombError)


class UndecodableImage(DataError):
    """A file that should be an image. Of what a worker's traceback adds to the message, only the message is kept."""

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


def decode(content: bytes, mode: str, size: int) -> Tensor:
    """uint8 [C, size, size]: the shorter side scaled to `size`, then the middle."""
    with warnings.catch_warnings(), Image.open(io.BytesIO(content)) as image:
        warnings.simplefilter("ignore")  # about metadata that is not used
        image.draft(mode, (size, size))  # a JPEG is decoded at the smallest scale that is large enough
        fitted = ImageOps.fit(in_8_bits(image).convert(mode), (size, size), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(fitted))
    return pixels[None] if mode == "L" else pixels.permute(2, 0, 1).contiguous()


def in_8_bits(image: Image.Image) -> Image.Image:
    """Pillow would cut off what is above 255."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode}, whose range is not known")
    return image
