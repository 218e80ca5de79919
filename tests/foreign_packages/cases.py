"""Modules that no one here wrote: how a user names each, and what is known to differ. docs/lightning.md lists them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STRATEGIES = ("ddp", "fsdp", "zero2", "zero3")
HERE = "tests.foreign_packages"


@dataclass(frozen=True)
class Case:
    """One module, as it is named on a command line."""

    package: str  # as on PyPI
    name: str  # of the module's class
    module: tuple[str, ...]  # the words behind `module.`, the target first
    data: tuple[str, ...] = ()  # behind `data.`; empty: the module has its own loaders
    micro_batch_size: int = 2
    words: tuple[str, ...] = ()  # besides
    accumulates: bool = False  # stock Lightning takes the ranks' micro-batches one by one: its loss is no mean
    refused: dict[str, str] = field(default_factory=dict)  # strategy → how the message begins
    tolerance: float = 1e-5  # relative, of a step's loss in fp32

    def argv(self) -> list[str]:
        size = self.micro_batch_size
        return [
            "recipe=custom", f"module._target_={self.module[0]}", *(f"module.{word}" for word in self.module[1:]),
            *(f"data._target_={self.data[0]}" for _ in self.data[:1]), *(f"data.{word}" for word in self.data[1:]),
            f"micro_batch_size={size}", f"global_batch_size={2 * size}", *self.words,
        ]  # fmt: skip


DEMOS = "lightning.pytorch.demos"
BORING = f"{DEMOS}.boring_classes"
FORECASTING = f"{HERE}.forecasting"
OWN_DATA = (f"{DEMOS}.BoringDataModule",)
BY_HAND = dict.fromkeys(("zero2", "zero3"), "{name} optimizes by hand, which {strategy} cannot do")
TWO = "batch_size=2"
OBJECTS: dict[str, Any] = {"words": ("trust=true",)}  # its hooks put objects of its own into a checkpoint
# With rates of their own (0.1 and 20) these two make a thousandth in step 6 of the 1e-7 by which sums differ in step 1.
GENTLY = ("optimizer=sgd", "optimizer.lr=0.01", "optimizer_override=true")
CASES = (
    Case("lightning", "BoringModel", (f"{DEMOS}.BoringModel",), micro_batch_size=1),
    Case("lightning", "BoringModel, BoringDataModule", (f"{DEMOS}.BoringModel",), OWN_DATA, 1),
    Case("lightning", "ManualOptimBoringModel", (f"{BORING}.ManualOptimBoringModel",), OWN_DATA, 1, refused=BY_HAND),
    Case("lightning", "DemoModel", (f"{DEMOS}.DemoModel",), OWN_DATA, 1, accumulates=True),
    Case("lightning", "LightningTransformer", (f"{HERE}.demos.transformer",),
         (f"{HERE}.demos.Texts", TWO, "samples=40"), words=GENTLY),
    Case("lightning", "LightningLSTM", (f"{HERE}.demos.lstm",), (f"{HERE}.demos.Texts", TWO, "samples=12"),
         words=GENTLY),
    Case("lightning", "Net, MNISTDataModule", (f"{HERE}.demos.Digits",),
         (f"{DEMOS}.mnist_datamodule.MNISTDataModule", "data_dir=data", "val_split=8", "num_workers=0", TWO)),
    Case("pytorch-forecasting", "TemporalFusionTransformer", (f"{FORECASTING}.tft",), (f"{FORECASTING}.Data", TWO),
         **OBJECTS),
    Case("pytorch-forecasting", "DeepAR", (f"{FORECASTING}.deep_ar",), (f"{FORECASTING}.Data", TWO),
         **OBJECTS),
    Case("pytorch-forecasting", "NBeats", (f"{FORECASTING}.n_beats",),
         (f"{FORECASTING}.Data", TWO, "only_value=true"), **OBJECTS),
    *(Case("gluonts", f"{name}LightningModule", (f"{HERE}.series.module", f"kind={name}"),
           (f"{HERE}.series.Data", f"kind={name}", TWO)) for name in ("SimpleFeedForward", "DeepAR", "PatchTST")),
    Case("chemprop", "MPNN", (f"{HERE}.molecules.mpnn",), (f"{HERE}.molecules.Data", TWO)),
    Case("rl4co", "AttentionModel", (f"{HERE}.routing.attention_model", TWO)),
    Case("pytorch-tabular", "CategoryEmbeddingModel", (f"{HERE}.tables.model", "kind=CategoryEmbedding"),
         (f"{HERE}.tables.data", "kind=CategoryEmbedding", TWO), accumulates=True),  # BatchNorm sees a rank's samples
    Case("pytorch-tabular", "FTTransformerModel", (f"{HERE}.tables.model", "kind=FTTransformer"),
         (f"{HERE}.tables.data", "kind=FTTransformer", TWO), accumulates=True,
         refused={"ddp": "{name} has parameters that took no part in the loss: give strategy.find_unused_parameters"}),
    Case("torch-geometric", "GraphGymModule, LightningDataset", (f"{HERE}.graphs.gnn",), (f"{HERE}.graphs.data", TWO),
         refused={"zero3": "GeneralLayer passes tensors on inside an object, where zero3 does not find them"}),
)  # fmt: skip
