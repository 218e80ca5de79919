"""pytorch-tabular, which imports `pytorch_lightning`: categories and numbers of a table."""

from __future__ import annotations

import numpy as np
import pandas as pd
from lightning.pytorch import LightningModule
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig, FTTransformerConfig
from pytorch_tabular.tabular_datamodule import TabularDatamodule

MODELS = {
    "CategoryEmbedding": CategoryEmbeddingModelConfig(task="regression", layers="16-8"),
    "FTTransformer": FTTransformerConfig(
        task="regression", input_embed_dim=8, num_heads=2, num_attn_blocks=2, attn_dropout=0.0, ff_dropout=0.0,
        add_norm_dropout=0.0,
    ),
}  # fmt: skip


def table() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(64, 3))
    kind = draw.integers(0, 3, 64)
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "kind": kind.astype(str), "y": x.sum(1) + kind})


def tabular(kind: str, batch_size: int) -> TabularModel:
    return TabularModel(
        data_config=DataConfig(target=["y"], continuous_cols=["a", "b", "c"], categorical_cols=["kind"]),
        model_config=MODELS[kind], optimizer_config=OptimizerConfig(), verbose=False,
        trainer_config=TrainerConfig(batch_size=batch_size, load_best=False, checkpoints=None),
    )  # fmt: skip


def data(kind: str, batch_size: int) -> TabularDatamodule:
    return TabularDatamodule(table()[:48], tabular(kind, batch_size).config, validation=table()[48:])


def model(kind: str) -> LightningModule:
    made = tabular(kind, batch_size=4)
    return made.prepare_model(made.prepare_dataloader(train=table()[:48], validation=table()[48:]))
