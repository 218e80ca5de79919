"""torch_geometric, which imports `pytorch_lightning`: GraphGym's module and a DataModule of graph batches."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.graphgym.model_builder import GraphGymModule


def gnn() -> LightningModule:
    set_cfg(cfg)
    cfg.dataset.task, cfg.model.loss_fun, cfg.optim.optimizer = "graph", "mse", "adam"
    cfg.gnn.head, cfg.gnn.dim_inner, cfg.gnn.batchnorm = "graph", 8, False
    return GraphGymModule(dim_in=3, dim_out=1, cfg=cfg)


def data(batch_size: int) -> LightningDataModule:
    draw = torch.Generator().manual_seed(0)
    graphs = []
    for size in torch.randint(3, 8, (48,), generator=draw).tolist():
        x = torch.randn(size, 3, generator=draw)
        ring = torch.arange(size)
        graphs.append(Data(x=x, edge_index=torch.stack([ring, ring.roll(1)]), y=x.sum().reshape(1)))
    return LightningDataset(graphs, batch_size=batch_size)
