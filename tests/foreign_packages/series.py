"""gluonts: the estimator makes the LightningModule and cuts the windows."""

from __future__ import annotations

import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator, PatchTSTEstimator, SimpleFeedForwardEstimator
from gluonts.torch.model.estimator import PyTorchLightningEstimator
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

SAMPLES = 48


def estimator(kind: str) -> PyTorchLightningEstimator:
    shape = {"prediction_length": 4, "context_length": 8, "batch_size": 1, "num_batches_per_epoch": SAMPLES}
    if kind == "DeepAR":
        return DeepAREstimator(freq="D", hidden_size=8, num_layers=2, dropout_rate=0.0, lags_seq=[1, 2], **shape)
    if kind == "PatchTST":
        return PatchTSTEstimator(patch_len=4, d_model=8, nhead=2, dim_feedforward=16, dropout=0.0, **shape)
    return SimpleFeedForwardEstimator(hidden_dimensions=[8], **shape)


def module(kind: str) -> LightningModule:
    return estimator(kind).create_lightning_module()


class Data(LightningDataModule):
    """gluonts streams windows without end; an epoch of them is kept, so that ranks can share it out."""

    def __init__(self, kind: str, batch_size: int) -> None:
        super().__init__()
        self.kind, self.batch_size = kind, batch_size

    def setup(self, stage: str) -> None:
        np.random.seed(0)  # gluonts draws the windows with NumPy
        made = estimator(self.kind)
        series = [{"start": "2024-01-01", "target": np.sin(np.arange(40) / 3 + n)} for n in range(4)]
        transformed = made.create_transformation().apply(ListDataset(series, freq="D"), is_train=True)
        loader = made.create_training_data_loader(transformed, module(self.kind))
        self.windows = [{name: value[0] for name, value in batch.items()} for batch in loader]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.windows, batch_size=self.batch_size)
