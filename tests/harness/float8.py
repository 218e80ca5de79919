"""What the tests of precision=fp8 train, on any device by emulation, and the plain loop beside it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from tests.harness import everything

VOCABULARY, WIDTH, LENGTH, BATCH, MICRO = 48, 32, 12, 8, 2
RATE, MOMENTUM = 0.2, 0.9
EMULATED = ["precision=fp8", "precision.fp8.emulate=true", "precision.fp8.min_features=16"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Network(nn.Module):
    """The largest value of a weight is in its last rows, which the first rank does not have when it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                drawn = torch.randn(parameter.shape, generator=generator) * 0.2
                rows = torch.linspace(0.2, 1.0, len(parameter))
                parameter.copy_(drawn * (rows[:, None] if parameter.ndim > 1 else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [B, T + 1] -> the mean loss over B * T targets."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.between(x))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Module(LightningModule):
    """`reaches`: its loss takes a weight of a linear layer, outside the forward of that layer."""

    def __init__(self, reaches: bool = False) -> None:
        super().__init__()
        self.network, self.reaches = Network(), reaches

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.network(batch)
        return loss + self.network.between.weight.square().mean() if self.reaches else loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.network(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=MOMENTUM)


class ByHand(Module):
    """Makes two steps with each batch: the second pass sees weights that the first one has not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss: Tensor = self.network(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss.detach()


def rows() -> Tensor:
    return torch.randint(0, VOCABULARY, (4 * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))


class Rows(everything.Rows):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(), self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows()[:5], self.batch_size)  # type: ignore[arg-type]


def plan_of(folder: Path, ranks: int, steps: int, *words: str, accelerator: str = "cpu") -> Plan:
    argv = [
        "recipe=custom", f"module._target_={__name__}.Module", f"data._target_={__name__}.Rows",
        "+data.batch_size=${micro_batch_size}", f"runs_dir={folder.parent}", f"name={folder.name}",
        f"accelerator={accelerator}", f"devices={ranks}", f"max_steps={steps}", f"micro_batch_size={MICRO}",
        f"global_batch_size={BATCH}", "log_every_n_steps=1", "checkpoint.monitor=null",
        "checkpoint.save_every_n_steps=null", *words,
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=torch.cuda.device_count()))


def plain_loop(steps: int, recipe: str) -> tuple[dict[str, Tensor], list[float]]:
    """The network with torchao's own layers, on copies in bf16 of what is not fp8: final weights, and losses.

    The micro-batches are those of a run, since each has scales of its own. With `tensorwise` the weights that are cast
    to fp8 stay in fp32.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    network = Network()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(network, config=config, module_filter_fn=lambda _, name: name != "head")
    masters = dict(network.named_parameters())
    converted = [f"{name}.weight" for name, layer in network.named_modules() if isinstance(layer, Float8Linear)]
    whole = converted if recipe == "tensorwise" else []
    optimizer = torch.optim.SGD(masters.values(), lr=RATE, momentum=MOMENTUM)
    losses = []
    for step in range(steps):
        batch = rows()[step % 4 * BATCH :][:BATCH]
        total = 0.0
        for part in batch.split(MICRO):
            copies = {n: p if n in whole else p.bfloat16() for n, p in masters.items()}
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = torch.func.functional_call(network, copies, (part,)) / (BATCH // MICRO)
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return {f"network.{n}": p.detach() for n, p in masters.items()}, losses
