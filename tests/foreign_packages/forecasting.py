"""pytorch-forecasting: as its tutorials do, with `from_dataset` and the data set's own loaders."""

from __future__ import annotations

import numpy as np
import pandas as pd
from lightning.pytorch import LightningDataModule, LightningModule
from pytorch_forecasting import DeepAR, NBeats, TemporalFusionTransformer, TimeSeriesDataSet
from torch.utils.data import DataLoader


def series() -> pd.DataFrame:
    time = np.arange(30)
    columns = [
        {"series": str(n), "time": time, "value": np.sin(time / 3 + n) + n, "month": time % 12.0} for n in range(4)
    ]
    return pd.concat(map(pd.DataFrame, columns), ignore_index=True)


def dataset(only_value: bool = False) -> TimeSeriesDataSet:
    return TimeSeriesDataSet(
        series(), time_idx="time", target="value", group_ids=["series"], max_encoder_length=8, min_encoder_length=8,
        max_prediction_length=4, time_varying_unknown_reals=["value"],
        time_varying_known_reals=[] if only_value else ["month"],
        static_categoricals=[] if only_value else ["series"],
    )  # fmt: skip


def tft() -> LightningModule:
    return TemporalFusionTransformer.from_dataset(
        dataset(), hidden_size=8, hidden_continuous_size=4, attention_head_size=2, dropout=0.0, optimizer="adam"
    )


def deep_ar() -> LightningModule:
    return DeepAR.from_dataset(dataset(), hidden_size=8, rnn_layers=2, dropout=0.0, optimizer="adam")


def n_beats() -> LightningModule:
    return NBeats.from_dataset(
        dataset(only_value=True),
        widths=[16, 16],
        num_blocks=[2, 2],
        num_block_layers=[2, 2],
        dropout=0.0,
        optimizer="adam",
    )


class Data(LightningDataModule):
    def __init__(self, batch_size: int, only_value: bool = False) -> None:
        super().__init__()
        self.batch_size, self.only_value = batch_size, only_value

    def train_dataloader(self) -> DataLoader:
        return dataset(self.only_value).to_dataloader(train=True, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return dataset(self.only_value).to_dataloader(train=False, batch_size=self.batch_size)
