"""The LightningModule: augmentation on the device, loss, exact evaluation. It knows no rank, strategy or launcher."""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning import LightningModule
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from recipes.image_classification.augment import Augment, Draw, beta_table, mixup
from recipes.image_classification.data import ImageData
from recipes.image_classification.model import ResNet, VisionTransformer
from shardwise.errors import ConfigError, a_or_an, count
from shardwise.nn.mean_metric import ExactMean

Batch = dict[str, Tensor]

MOST_CLASSES_DRAWN = 100  # beyond them a confusion matrix is neither kept nor drawn
MOST_CLASSES_NUMBERED = 20


class ImageClassifier(LightningModule):
    """Images to classes. `mean` and `std` (a channel each, of values in [0, 1]) normalise; `augment` is for training.

    A batch is {"image": uint8 [B, C, H, W], "label": int64 [B], "index": int64 [B]}, the index being the sample's place
    in the data set. On the device images become floats; with `mixup_alpha` > 0 a training batch also gets "partner"
    (the other image's label) and "share" (how much of the own image is left).
    """

    mean: Tensor
    std: Tensor
    mixup_table: Tensor | None
    evaluation: ExactMean
    accuracy: MulticlassAccuracy
    confusion: MulticlassConfusionMatrix | None
    loss_weight_unit = "images"  # what loss_weight counts, for the log

    def __init__(
        self,
        model: ResNet | VisionTransformer,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment | None = None,
        mixup_alpha: float = 0.0,
        label_smoothing: float = 0.0,
        channels_last: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if missing := [name for name in ("num_classes", "in_channels", "image_size") if not hasattr(model, name)]:
            raise ConfigError(
                f"module.model is {a_or_an(type(model).__name__)} without {', '.join(missing)}: use a model of "
                f"images, e.g. "
                f"model=resnet_tiny"
            )
        if not len(mean) == len(std) == model.in_channels:
            raise ConfigError(
                f"module.mean has {count(len(mean), 'value')}, module.std {len(std)}, and "
                f"model.in_channels={model.in_channels}:"
                f" give one of each for every channel"
            )
        if min(std) <= 0:
            raise ConfigError(f"module.std={list(std)}: values are divided by it; use numbers above 0")
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"module.label_smoothing={label_smoothing} must be at least 0 and below 1, e.g. 0.1")
        self.model = model
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

    def setup(self, stage: str) -> None:
        """Refuses data that the model's head, stem or positions do not fit."""
        # Lightning would ask whether the data module's hook was meant.
        warnings.filterwarnings("ignore", ".*You have overridden `on_after_batch_transfer`.*")
        # DDP's words about 1×1 kernels under channels_last: the strides differ along axes of length 1 only.
        warnings.filterwarnings("ignore", ".*Grad strides do not match bucket view strides.*")
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, ImageData):
            model = self.model
            data.check_fits(model.num_classes, model.in_channels, model.image_size)

    def init_module_weights(self, module: nn.Module) -> None:
        """Fills what `module` itself owns; other modules than the model's are left alone."""
        self.model.init_module_weights(module)

    def loss_weight(self, batch: Batch) -> int:
        """Images: what the batch weighs in its accumulation window."""
        return len(batch["label"])

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
        """Nats per image, averaged over the micro-batch."""
        logits = self._logits(batch)
        loss = F.cross_entropy(logits, batch["label"], label_smoothing=self.label_smoothing, reduction="none")
        if "partner" in batch:
            other = F.cross_entropy(logits, batch["partner"], label_smoothing=self.label_smoothing, reduction="none")
            loss = torch.lerp(other, loss, batch["share"].to(loss.dtype))
        return loss.mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds to the epoch's metrics."""
        self._evaluate(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds to the epoch's metrics."""
        self._evaluate(batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """int64 [B]: the likeliest class of each image."""
        return self._logits(batch).argmax(-1)

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
        classes, device = self.model.num_classes, self.device
        self.evaluation = ExactMean(device)
        self.accuracy = MulticlassAccuracy(classes, average="micro", validate_args=False).to(device)
        draws = classes <= MOST_CLASSES_DRAWN
        self.confusion = MulticlassConfusionMatrix(classes, validate_args=False).to(device) if draws else None

    def _evaluate(self, batch: Batch) -> None:
        logits, labels = self._logits(batch), batch["label"]
        self.evaluation.update(F.cross_entropy(logits, labels, reduction="sum"), len(labels))
        self.accuracy.update(logits, labels)
        if self.confusion is not None:
            self.confusion.update(logits, labels)

    def _log_evaluation(self, stage: str) -> None:
        # The metrics have been synchronised: every rank logs the same, and says so to Lightning.
        self.log(f"{stage}/loss", self.evaluation.compute(), sync_dist=True)
        self.log(f"{stage}/accuracy", self.accuracy.compute(), sync_dist=True)
        if self.confusion is not None:
            counts = self.confusion.compute()  # of all ranks: every rank takes part
            if self.trainer.is_global_zero:
                draw_confusion(counts.cpu(), Path(self.trainer.default_root_dir) / "confusion_matrix.png", stage)


def draw_confusion(counts: Tensor, path: Path, title: str) -> None:
    """Rows are true classes and columns predicted ones; shades are shares of the row, numbers are images."""
    classes = len(counts)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    size = 3 + 0.3 * min(classes, 30)
    figure = Figure(figsize=(size + 1, size), layout="constrained")  # not pyplot, whose figures are global
    axes = figure.add_subplot()
    figure.colorbar(axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1), label="share of the true class")
    axes.set(xlabel="predicted class", ylabel="true class", title=title)
    if classes <= MOST_CLASSES_NUMBERED:
        axes.set(xticks=range(classes), yticks=range(classes))
        for row, column in torch.nonzero(counts).tolist():
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(int(counts[row, column])), ha="center", va="center", fontsize=8, color=colour)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
