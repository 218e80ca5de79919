"""A data set of encoded images, and what happens to one that cannot be decoded."""

import sys

import numpy as np
import numpy.typing as npt
import torch
from PIL import UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from recipes.image_classification.data.base import Sample
from recipes.image_classification.data.decoding import UNDECODABLE, UndecodableImage, decode
from shardwise.errors import ConfigError, count


class ImageFiles(Dataset[Sample]):
    """Images that are decoded when they are asked for.

    One that cannot be decoded stops the run, or (`skip`) the next that can takes its place, whatever the worker; each
    is counted, and named on stderr once a rank.
    """

    def __init__(self, labels: npt.NDArray[np.int64], channels: int, image_size: int, skip: bool) -> None:
        self.labels, self.mode, self.image_size, self.skip = labels, {1: "L", 3: "RGB"}[channels], image_size, skip
        self.undecodable = torch.zeros(len(labels), dtype=torch.bool)
        self.undecodable.share_memory_()  # type: ignore[no-untyped-call] # seen by every worker

    @property
    def has_labels(self) -> bool:
        """Whether it is known what the images show: else each label is -1."""
        return not (self.labels < 0).any()

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, place: int) -> bytes:
        """The encoded image."""
        raise NotImplementedError

    def where(self, place: int) -> str:
        """What a reader needs to find the image."""
        raise NotImplementedError

    def skipped(self) -> int:
        """Undecodable images met so far by this rank."""
        return int(self.undecodable.sum())

    def __getitem__(self, index: int) -> Sample:
        start = range(len(self))[index]  # past the end: IndexError
        for further in range(len(self)):
            place = (start + further) % len(self)
            if not self.undecodable[place] and (image := self._decode(place)) is not None:
                # The index is the one asked for: a stand-in is augmented in its own way.
                return {"image": image, "label": int(self.labels[place]), "index": index}
        raise UndecodableImage(
            f"none of {count(len(self), 'image')} can be decoded, {self.where(0)} among them; look at them"
        )

    def _decode(self, place: int) -> Tensor | None:
        try:
            content = self.content(place)
        except OSError as error:  # a file that cannot be read may be there tomorrow: never skipped
            raise UndecodableImage(f"{self.where(place)} cannot be read: {error.strerror or error}") from None
        try:
            return decode(content, self.mode, self.image_size)
        except UNDECODABLE as error:
            known = not isinstance(error, UnidentifiedImageError)  # it would name an address in memory
            why = " ".join(str(error).split()) if known else "not an image that Pillow knows"
            said = f"{self.where(place)} ({len(content):,} bytes) cannot be decoded: {why}"
            if not self.skip:
                raise UndecodableImage(
                    f"{said}; mend or remove it, or use data.on_undecodable=skip to put the next image in its place"
                ) from None
            self.undecodable[place] = True
            print(f"shardwise: {said}; skipped ({self.skipped()} so far)", file=sys.stderr, flush=True)
            return None


def skips(on_undecodable: str) -> bool:
    if on_undecodable not in ("skip", "stop"):
        raise ConfigError(f"data.{on_undecodable=} must be stop or skip")
    return on_undecodable == "skip"
