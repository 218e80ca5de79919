"""The LightningModule: augmentation on the device, loss, exact evaluation. It knows no rank, strategy or launcher."""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassStatScores

from recipes.image_classification.augment import Augment, Draw, beta_table, mixup
from recipes.image_classification.class_weights import balanced_weights, given_weights
from recipes.image_classification.confusion import MOST_CLASSES_DRAWN, draw_confusion, write_classes
from recipes.image_classification.data import ImageData
from shardwise.errors import ConfigError, a_or_an, count
from shardwise.nn.numerics import ExactMean

Batch = dict[str, Tensor]


class ImageClassifier(LightningModule):
    """Images to classes. `mean` and `std` (a channel each, of values in [0, 1]) normalise; `augment` is for training.

    `model` maps images [B, C, H, W] to logits [B, num_classes] and has `num_classes`. It may have `in_channels` and
    `image_size`, to be compared with the data; `get_classifier()`, its head if that is not the last layer; and
    `init_module_weights(layer)`.
    `class_weights`: what an image of each class counts in the training loss, or "balanced": as much in all classes.

    A batch is {"image": uint8 [B, C, H, W], "label": int64 [B], "index": int64 [B]}, the index being the sample's place
    in the data set. On the device images become floats; with `mixup_alpha` > 0 a training batch also gets "partner"
    (the other image's label) and "share" (how much of the own image is left).
    """

    whole_weights_in = ()  # no hook here looks at weights
    mean: Tensor
    std: Tensor
    mixup_table: Tensor | None
    class_weights: Tensor | None
    evaluation: ExactMean
    accuracy: MulticlassAccuracy
    per_class: MulticlassStatScores
    confusion: MulticlassConfusionMatrix | None
    loss_weight_unit = "images"  # what loss_weight counts, for the log

    def __init__(
        self,
        model: nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment | None = None,
        mixup_alpha: float = 0.0,
        label_smoothing: float = 0.0,
        channels_last: bool = False,
        seed: int = 0,
        class_weights: str | Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module) or not isinstance(getattr(model, "num_classes", None), int):
            raise ConfigError(
                f"module.model is {a_or_an(type(model).__name__)}: it must be an nn.Module from images [B, C, H, W] to "
                f"logits [B, num_classes] with the attribute num_classes, a whole number; set self.num_classes in its "
                f"__init__, or use model=resnet_tiny, say"
            )
        channels: int = getattr(model, "in_channels", len(mean))
        if not len(mean) == len(std) == channels:
            raise ConfigError(
                f"module.mean has {count(len(mean), 'value')}, module.std {len(std)}, and model.in_channels={channels}:"
                f" give one of each for every channel"
            )
        if min(std) <= 0:
            raise ConfigError(f"module.std={list(std)}: values are divided by it; use numbers above 0")
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"module.label_smoothing={label_smoothing} must be at least 0 and below 1, e.g. 0.1")
        self.model = model
        self.num_classes: int = model.num_classes  # type: ignore[assignment]
        self.class_names: list[str] | None = None  # known where folders or a file of the data name them
        if not hasattr(model, "init_module_weights"):  # one of timm or yours: its constructor has filled it
            self.init_module_weights = None  # type: ignore[assignment, method-assign]
        # Shapes only, to count operations on; in a list, so that no strategy sees it and shards it.
        self._shapes: list[nn.Module] = [deepcopy(model).to("meta").eval()]
        self._forward_flops: dict[torch.Size, int] = {}
        self.augment = augment
        self.label_smoothing = label_smoothing
        self.channels_last = channels_last
        self.seed = seed
        self.register_buffer("mean", torch.tensor(list(mean), dtype=torch.float32)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(list(std), dtype=torch.float32)[:, None, None], persistent=False)
        self.register_buffer("mixup_table", beta_table(mixup_alpha) if mixup_alpha else None, persistent=False)
        self.weighting = class_weights
        weights = None if class_weights is None else given_weights(class_weights, self.num_classes)
        self._weights_on_host = weights
        self.register_buffer("class_weights", None if weights is None else weights.clone(), persistent=False)
        if weights is not None:
            self.loss_weight_unit = "weighted_images"

    def setup(self, stage: str) -> None:
        """Refuses data that the model's head, stem or positions do not fit."""
        # Lightning would ask whether the data module's hook was meant.
        warnings.filterwarnings("ignore", ".*You have overridden `on_after_batch_transfer`.*")
        # DDP's words about 1×1 kernels under channels_last: the strides differ along axes of length 1 only.
        warnings.filterwarnings("ignore", ".*Grad strides do not match bucket view strides.*")
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, ImageData):
            channels, size = (getattr(self.model, name, None) for name in ("in_channels", "image_size"))
            data.check_fits(self.num_classes, channels, size)
            self.class_names = data.class_names or self.class_names
        if stage == "fit" and self.weighting == "balanced" and self.class_weights is not None:
            self._weights_on_host = balanced_weights(data, self.num_classes)
            self.class_weights.copy_(self._weights_on_host)

    @property
    def head_name(self) -> str | None:
        """The name of the layer that gives the logits: what the model says, or its last layer if that is linear."""
        classifier = getattr(self.model, "get_classifier", None)
        head = classifier() if callable(classifier) else [*self.model.modules()][-1]
        if not callable(classifier) and getattr(head, "out_features", None) != self.num_classes:
            return None
        return next((name for name, layer in self.named_modules() if layer is head), None)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the names of the classes, for predictions of images that lie in no class folders."""
        checkpoint["class_names"] = self.class_names

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses data of other classes."""
        trained = checkpoint.get("class_names")
        for number, (was, now) in enumerate(zip(trained or (), self.class_names or (), strict=False)):
            if was != now:
                raise ConfigError(
                    f"the data have other classes than the checkpoint was trained on: class {number} is {now!r} here "
                    f"and was {was!r} there; give the class folders the names that they had"
                )
        self.class_names = self.class_names or trained

    def init_module_weights(self, module: nn.Module) -> None:
        """Fills what `module` itself owns; other modules than the model's are left alone."""
        self.model.init_module_weights(module)  # type: ignore[operator]

    def loss_weight(self, batch: Batch) -> float:
        """Images, or the sum of their class weights: what the batch weighs in its accumulation window."""
        if self._weights_on_host is None:
            return len(batch["label"])
        return self._weights_on_host[batch["label"].cpu()].sum(dtype=torch.float64).item()

    def flops(self, batch: Batch) -> int:
        """Of the batch's forward and backward, from its shape alone: docs/metrics.md has the formula.

        A backward counts as two forwards, the first layer's too and a frozen layer's too.
        """
        size = batch["image"].shape[1:]
        if size not in self._forward_flops:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                self._shapes[0](torch.empty(1, *size, device="meta"))
            self._forward_flops[size] = counter.get_total_flops()
        return 3 * len(batch["image"]) * self._forward_flops[size]

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Augmented and mixed while training. What needs neither stays bytes: see `_normalised`."""
        augment = self.augment if self.trainer.training else None
        mixes = self.trainer.training and self.mixup_table is not None
        if augment is None and not mixes:
            return batch
        batch = dict(batch)
        images = batch["image"].float() / 255
        draw = Draw(self.seed, self.current_epoch, batch["index"])
        if augment is not None:
            images = augment.colours_and_crop(images, draw, self.mean)
        images = (images - self.mean) / self.std
        if augment is not None:
            images = augment.erased(images, draw)
        if self.mixup_table is not None and mixes:
            images, partner, batch["share"] = mixup(images, draw, self.mixup_table)
            batch["partner"] = batch["label"][partner]
        batch["image"] = images
        return batch

    def _normalised(self, images: Tensor) -> Tensor:
        """Within the step, so that a compiled one reads bytes and writes what the first convolution takes.

        Bytes become normalised floats; all take the dtype and the layout that the model computes in. The weights are
        not converted: a convolution takes its layout from either of the two, and sharding needs contiguous weights.
        """
        if images.dtype == torch.uint8:
            images = (images.float() / 255 - self.mean) / self.std
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.to(next(self.model.parameters()).dtype, memory_format=layout)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Nats per image, averaged over the micro-batch, by the weights of the images' classes if there are any."""
        logits = self._logits(batch)
        weights = None if self.class_weights is None else self.class_weights.to(logits.dtype)

        def loss_of(labels: Tensor) -> Tensor:
            return F.cross_entropy(logits, labels, weights, label_smoothing=self.label_smoothing, reduction="none")

        loss = loss_of(batch["label"])
        if "partner" in batch:
            loss = torch.lerp(loss_of(batch["partner"]), loss, batch["share"].to(loss.dtype))
        # With mixup too: a partner is another image of the micro-batch, so that the weights have the same sum.
        return loss.mean() if weights is None else loss.sum() / weights[batch["label"]].sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds to the epoch's metrics."""
        self._evaluate(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds to the epoch's metrics."""
        self._evaluate(batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, list[Any]]:
        """Of each image: its file, the likeliest class with its probability, and its label, where there are any.

        Of an image that was skipped, since it cannot be decoded, the file alone.
        """
        probability, predicted = (values.tolist() for values in self._logits(batch).softmax(-1).max(-1))
        row: dict[str, list[Any]] = {"class": [self._name(number) for number in predicted], "probability": probability}
        labels = batch["label"].tolist()
        if min(labels) >= 0:
            row["label"] = [self._name(number) for number in labels]
        data = getattr(self.trainer, "datamodule", None)
        return data.files_of(batch["index"].tolist(), row) if isinstance(data, ImageData) else row

    def _name(self, number: int) -> str:
        names = self.class_names or ()
        return names[number] if number < len(names) else str(number)

    def on_validation_epoch_start(self) -> None:
        self._start_evaluation()

    def on_test_epoch_start(self) -> None:
        self._start_evaluation()

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("validation")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _logits(self, batch: Batch) -> Tensor:
        """In fp32 or better."""
        logits: Tensor = self.model(self._normalised(batch["image"]))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _start_evaluation(self) -> None:
        # Not in the constructor, which may run on the meta device and would leave the sums uninitialised.
        classes, device = self.num_classes, self.device
        self.evaluation = ExactMean(device)
        self.accuracy = MulticlassAccuracy(classes, average="micro", validate_args=False).to(device)
        self.per_class = MulticlassStatScores(classes, average=None, validate_args=False).to(device)
        draws = classes <= MOST_CLASSES_DRAWN
        self.confusion = MulticlassConfusionMatrix(classes, validate_args=False).to(device) if draws else None

    def _evaluate(self, batch: Batch) -> None:
        logits, labels = self._logits(batch), batch["label"]
        self.evaluation.update(F.cross_entropy(logits, labels, reduction="sum"), len(labels))
        self.accuracy.update(logits, labels)
        self.per_class.update(logits, labels)
        if self.confusion is not None:
            self.confusion.update(logits, labels)

    def _log_evaluation(self, stage: str) -> None:
        # The metrics have been synchronised: every rank logs the same, and says so to Lightning.
        self.log(f"{stage}/loss", self.evaluation.compute(), sync_dist=True)
        self.log(f"{stage}/accuracy", self.accuracy.compute(), sync_dist=True)
        # All ranks take part in these sums.
        right, wrongly, _, _, images = self.per_class.compute().reshape(-1, 5).unbind(-1)
        counts = None if self.confusion is None else self.confusion.compute().cpu()
        # Over the classes that have images, as scikit-learn's balanced_accuracy_score
        self.log(f"{stage}/balanced_accuracy", (right / images)[images > 0].mean(), sync_dist=True)
        if self.trainer.is_global_zero:
            names = [self._name(number) for number in range(self.num_classes)]
            folder = Path(self.trainer.default_root_dir)
            write_classes(folder / f"classes_{stage}.json", names, images, right, right + wrongly)
            if counts is not None:
                draw_confusion(counts, folder / f"confusion_matrix_{stage}.png", stage, names)
