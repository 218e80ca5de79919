"""What the image data have in common: sizes, splits and their loaders."""

from collections.abc import Sequence
from typing import Any

from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from shardwise.accelerator import pins_memory
from shardwise.errors import ConfigError

Sample = dict[str, Any]

SPLITS = ("train", "validation", "test")
_NEEDS = "training needs train and validation, stage=validate validation, stage=test test, stage=predict one of the two"


class ImageData(LightningDataModule):
    """Loaders over `splits`; `mean` and `std` (a channel each) are the module's to use, and are kept with the data.

    `class_names`: in the order of their numbers; None: the data do not name them.
    """

    class_names: list[str] | None = None

    def __init__(
        self,
        num_classes: int,
        channels: int,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        batch_size: int,
        num_workers: int,
    ) -> None:
        super().__init__()
        for name, value in (("num_classes", num_classes), ("image_size", image_size)):
            if value < 1:
                raise ConfigError(f"data.{name}={value}: must be at least 1")
        if num_workers < 0:
            raise ConfigError(f"data.num_workers={num_workers}: must be at least 0")
        if channels not in (1, 3):
            raise ConfigError(f"data.channels={channels}: must be 3 (RGB) or 1 (grey)")
        self.num_classes, self.channels, self.image_size = num_classes, channels, image_size
        self.batch_size, self.num_workers = batch_size, num_workers
        self.mean, self.std = mean, std
        self.splits: dict[str, Dataset[Sample]] = {}

    def make_split(self, split: str) -> Dataset[Sample] | None:
        """The data set of "train", "validation" or "test"; None where there is none."""
        raise NotImplementedError

    def check_fits(self, num_classes: int, in_channels: int | None, image_size: int | None) -> None:
        """Raises `ConfigError` if a model of these sizes (None: any) cannot take the data."""
        for ours, value, theirs, needed in (
            ("num_classes", self.num_classes, "num_classes", num_classes),
            ("channels", self.channels, "in_channels", in_channels),
            ("image_size", self.image_size, "image_size", image_size),
        ):
            if needed is not None and value != needed:
                raise ConfigError(
                    f"data.{ours}={value} and model.{theirs}={needed} are not equal: use model.{theirs}={value}"
                )

    def setup(self, stage: str) -> None:
        """Opens the splits that are there."""
        made = {split: self.make_split(split) for split in SPLITS}
        self.splits = {split: dataset for split, dataset in made.items() if dataset is not None}

    def train_dataloader(self) -> DataLoader[Sample]:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        return self._loader("validation", shuffle=False)

    def test_dataloader(self) -> DataLoader[Sample]:
        if not getattr(self.splits.get("test"), "has_labels", True):
            raise ConfigError(
                "the images to test on lie in no class folders, so that there is nothing to compare predictions with: "
                "use stage=predict, or put the images into test/<class>/"
            )
        return self._loader("test", shuffle=False)

    def predict_dataloader(self) -> DataLoader[Sample]:
        return self._loader(self._predicted, shuffle=False)

    @property
    def _predicted(self) -> str:
        return "test" if "test" in self.splits else "validation"

    def files_of(self, places: Sequence[int], row: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Predictions with their files, where images are files. What an image got that was skipped becomes None."""
        dataset: Any = self.splits[self._predicted]
        if not hasattr(dataset, "where"):
            return row
        read = [not dataset.undecodable[place] for place in places]
        known = {key: [v if ok else None for v, ok in zip(row[key], read, strict=True)] for key in row}
        return {"file": [dataset.where(place) for place in places]} | known

    def _loader(self, split: str, *, shuffle: bool) -> DataLoader[Sample]:
        if split not in self.splits:
            raise ConfigError(f"the data have no {split} split, but {' and '.join(self.splits) or 'none'}: {_NEEDS}")
        return DataLoader(
            self.splits[split],
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            drop_last=False,
            pin_memory=pins_memory(),
            persistent_workers=self.num_workers > 0,
        )
