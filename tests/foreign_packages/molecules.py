"""chemprop: message passing over molecules, with its own data sets, collation and learning rate schedule."""

from __future__ import annotations

from chemprop import data, models, nn
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

SMILES = [("C" * n + end, float(n)) for n in range(1, 13) for end in ("O", "N", "Cl", "C(=O)O")]


def mpnn() -> LightningModule:
    return models.MPNN(
        nn.BondMessagePassing(d_h=16, depth=3), nn.MeanAggregation(), nn.RegressionFFN(input_dim=16, hidden_dim=16)
    )


class Data(LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        points = [data.MoleculeDatapoint.from_smi(smiles, [size / 12]) for smiles, size in SMILES]
        return data.build_dataloader(data.MoleculeDataset(points), batch_size=self.batch_size)
