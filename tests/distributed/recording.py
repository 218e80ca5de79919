"""A LightningModule, its data and a callback that override every hook and write down when it was called, and what
`trainer` said then; run under stock Lightning and here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerState
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

from shardwise.config.coming_from_lightning import ROWS
from tests.harness.modules import Layer, samples

Event = tuple[str, str, dict[str, Any]]  # who, which hook, and the arguments that are plain
EVENTS: list[Event] = []
VALUES: list[dict[str, Any]] = []  # of `trainer`, at each event

ASKED_THERE: list[dict[str, Any]] = []  # what a module that asks itself is told
ASKED = ["automatic_optimization", "current_epoch", "global_step", "global_rank", "local_rank", "device", "dtype",
         "on_gpu", "example_input_array", "strict_loading", "allow_zero_length_dataloader_with_multiple_devices",
         "prepare_data_per_node"]  # fmt: skip
# Not hooks that Lightning calls by itself in training: they are asked for
_ASKED = {"state_key", "configure_sharded_model"}
GRADIENT_WORK = {"backward", "configure_gradient_clipping"}  # is refused under ZeRO


def names(kind: str, leave_out: Iterable[str] = ()) -> list[str]:
    return [row.name for row in ROWS if row.kind == kind and row.name not in {*_ASKED, *leave_out}]


def plain(value: Any) -> Any:
    """What can be compared between two runs: objects are their class, tensors their value."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() < 3 else list(value.shape)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, TrainerState):
        return [plain(value.status), plain(value.fn), plain(value.stage)]
    if isinstance(value, (torch.device, torch.dtype)):
        return str(value)
    return type(value).__name__


ATTRIBUTES = [row.name for row in ROWS if row.kind == "attribute"]


def look(trainer: Trainer, hook: str) -> dict[str, Any]:
    seen = {}
    for name in ATTRIBUTES:
        if name == "log_dir" and hook != "on_train_start":
            continue  # all ranks must ask for it, and it takes a message
        if name == "estimated_stepping_batches" and trainer.train_dataloader is None:
            continue  # asking would load the data
        try:
            seen[name] = plain(getattr(trainer, name))
        except (RuntimeError, AttributeError, TypeError) as error:
            seen[name] = f"{type(error).__name__}: {error}"
    return seen


def note(who: str, name: str, arguments: dict[str, Any], trainer: Any) -> None:
    numbers = {k: v for k, v in arguments.items() if isinstance(v, (int, str)) or v is None}
    EVENTS.append((who, name, numbers))
    VALUES.append({} if trainer is None else look(trainer, name))


def recording(kind: type, who: str, hooks: Iterable[str]) -> type:
    """A class like `kind` whose `hooks` are written down before they do what they did."""

    def override(name: str) -> Callable[..., Any]:
        original = getattr(kind, name)
        signature = inspect.signature(original)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            trainer = args[0] if args and isinstance(args[0], Trainer) else getattr(self, "_trainer", None)
            trainer = trainer or (None if who == "module" else getattr(self, "trainer", None))
            note(who, name, signature.bind(self, *args, **kwargs).arguments, trainer)
            return original(self, *args, **kwargs)

        hook.__signature__ = signature  # type: ignore[attr-defined] # Lightning looks whether a step takes batch_idx
        return hook

    return type(f"Recorded{kind.__name__}", (kind,), {name: override(name) for name in hooks})


class Plain(LightningModule):
    """It logs in every way, and steps a schedule."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.example_input_array = torch.zeros(1, 6)
        self.layers = torch.nn.Sequential(Layer(6), Layer(6))
        self.kept = MeanMetric()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.uniform_(-0.3, 0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out

    def loss(self, batch: Any) -> Tensor:
        return torch.nn.functional.mse_loss(self(batch[0]), batch[0].flip(1))

    def log_every_way(self, stage: str, loss: Tensor, batch_idx: int) -> None:
        for on_step, on_epoch in ((None, None), (True, False), (False, True), (True, True)):
            for reduce_fx in ("mean", "max", "min", "sum"):
                together = reduce_fx in ("mean", "sum")
                self.log(f"{stage}/{on_step}-{on_epoch}-{reduce_fx}", loss.detach(), on_step=on_step,
                         on_epoch=on_epoch, reduce_fx=reduce_fx, sync_dist=together)  # fmt: skip
        self.log(f"{stage}/weighed", loss.detach(), on_epoch=True, batch_size=batch_idx + 1)
        self.log(f"{stage}/hidden", loss.detach(), on_epoch=True, logger=False)
        self.log(f"{stage}/bar", loss.detach(), on_epoch=True, prog_bar=True)
        self.log(f"{stage}/first", loss.detach(), on_epoch=True, rank_zero_only=True)
        self.log(f"{stage}/graph", loss, on_epoch=True, enable_graph=True)
        self.log_dict({f"{stage}/a": loss.detach(), f"{stage}/b": batch_idx}, on_epoch=True, sync_dist=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_every_way("fit", loss, batch_idx)
        self.kept(loss.detach())
        self.log("fit/kept", self.kept, metric_attribute="kept", on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log_every_way("validation", loss, batch_idx)
        self.log(f"validation/of_{dataloader_idx}", loss, sync_dist=True, add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log_every_way("test", self.loss(batch), batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self(batch[0]).sum(1)
        return out

    def on_train_epoch_start(self) -> None:
        answers = {name: plain(getattr(self, name)) for name in ASKED}
        answers |= {
            "hparams": dict(self.hparams),
            "hparams_initial": dict(self.hparams_initial),
            "optimizers": plain(self.optimizers()),
            "lr_schedulers": plain(self.lr_schedulers()),
            "all_gather": torch.as_tensor(self.all_gather(torch.tensor([self.global_rank + 1]))).flatten().tolist(),
        }
        self.freeze()
        answers["freeze"] = [any(p.requires_grad for p in self.parameters()), self.training]
        self.unfreeze()
        answers["unfreeze"] = [all(p.requires_grad for p in self.parameters()), self.training]
        optimizer = self.optimizers()
        self.toggle_optimizer(optimizer)  # type: ignore[arg-type]
        self.untoggle_optimizer(optimizer)  # type: ignore[arg-type]
        self.print("printed by rank 0")
        ASKED_THERE.append(answers)

    def on_train_epoch_end(self) -> None:
        self.log("fit/at_the_end", 3.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("fit/behind", outputs["loss"].detach(), on_step=False, on_epoch=True, sync_dist=True)

    def configure_callbacks(self) -> list[Callback]:
        return [RECORDER()]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=total + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Raises(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise ValueError("a mistake")
        return super().training_step(batch, batch_idx)


class OldName(Plain):
    def configure_sharded_model(self) -> None:
        self.was_called = True

    def on_train_start(self) -> None:
        ASKED_THERE.append({"configure_sharded_model": self.was_called})


class Owner(Plain):
    """With loaders of its own, and no LightningDataModule."""

    def train_dataloader(self) -> DataLoader[Any]:
        return Data(2).train_dataloader()

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return Data(2).val_dataloader()

    def on_train_end(self) -> None:
        path = Path(self.trainer.default_root_dir) / "own.ckpt"
        self.trainer.save_checkpoint(path)
        ASKED_THERE.append({"saved": path.exists()})


class Data(LightningDataModule):
    """`ranks`: for stock Lightning, which shuffles what it distributes by itself."""

    def __init__(self, batch_size: int, ranks: int = 1) -> None:
        super().__init__()
        self.batch_size, self.ranks = batch_size, ranks

    def loader(self, count: int, seed: int) -> DataLoader[Any]:
        data = samples("pairs", count, seed)
        sampler: Any = DistributedSampler(data, shuffle=False) if self.ranks > 1 else None
        return DataLoader(data, batch_size=self.batch_size, shuffle=False, sampler=sampler)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(24, 0)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [self.loader(4, 1), self.loader(2, 4)]

    def test_dataloader(self) -> DataLoader[Any]:
        return self.loader(4, 2)

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.loader(4, 3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


class Rows(Logger):
    """What a logger is given."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[dict[str, float], int | None]] = []
        self.calls: list[tuple[Any, ...]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        of_run = ("train/", "host/")  # the run's own numbers
        own = {key: value for key, value in metrics.items() if not key.startswith(of_run)}
        if own:
            self.rows.append((own, step))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("log_hyperparams", dict(params)))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.calls.append(("log_graph", input_array))

    def finalize(self, status: str) -> None:
        self.calls.append(("finalize", status))


class Watcher(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


_LOADERS = {"train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"}
# Its data has these, and of two Lightning calls the data's
TRANSFERS = {"on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"}
RecordedData = recording(Data, "data", names("data hook"))
_MODULES = names("module hook", _LOADERS | TRANSFERS)
RECORDER = recording(Watcher, "callback", names("callback hook"))
Recorded = recording(Plain, "module", _MODULES)
RecordedRaises = recording(Raises, "module", _MODULES)
RecordedOwner = recording(Owner, "module", ["train_dataloader", "val_dataloader", *TRANSFERS])
Ungradient = recording(Plain, "module", [name for name in _MODULES if name not in GRADIENT_WORK])


def read() -> tuple[list[Event], list[dict[str, Any]], list[dict[str, Any]]]:
    """What was written down since this was last asked."""
    lists: Any = (EVENTS, VALUES, ASKED_THERE)
    events, values, asked = (list(one) for one in lists)
    for one in lists:
        one.clear()
    return events, values, asked
