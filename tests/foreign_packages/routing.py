"""rl4co: reinforcement learning of routes; the module makes its own data and its batches are TensorDicts."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from rl4co.envs import TSPEnv
from rl4co.models import AttentionModel


def attention_model(batch_size: int) -> LightningModule:
    return AttentionModel(
        TSPEnv(generator_params={"num_loc": 6}), baseline="no", batch_size=batch_size, train_data_size=48,
        val_data_size=8, test_data_size=8,
        policy_kwargs={"embed_dim": 16, "num_heads": 2, "num_encoder_layers": 2, "feedforward_hidden": 16,
                       "normalization": "layer", "train_decode_type": "greedy"},
    )  # fmt: skip
