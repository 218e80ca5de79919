"""Three LightningModules of kinds that people bring, with nothing of this repository in them, and their data."""

from __future__ import annotations

from abc import ABC
from typing import Any, Generic, TypeVar

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

T = TypeVar("T")


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class ConvNet(LightningModule):
    """BatchNorm inside and outside the repeated layers, a schedule of its own, parameters that are frozen."""

    def __init__(self, channels: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, bias=False), nn.BatchNorm2d(channels))
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(3)))
        self.head = nn.Linear(channels, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch[0]).double(), batch[1])
        self.log("validation/loss", loss, sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CausalLM(LightningModule):
    """A Hugging Face model with tied weights that generates in validation."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.lr = lr
        self.lm = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=40,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=32,
                tie_word_embeddings=True,
            )
        )
        self.text: list[list[int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.lm(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.lm(input_ids=batch[0], labels=batch[0]).loss
        self.log("validation/loss", loss.double(), sync_dist=True, batch_size=len(batch[0]))
        if batch_idx == 0:
            prompt = torch.arange(4, device=self.device)[None]  # the same on every rank
            drawn = self.lm.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
            self.text = drawn.tolist()

    def on_train_start(self) -> None:
        assert self.lm.lm_head.weight is self.lm.model.embed_tokens.weight, "set-up has parted what was tied"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Named(Layer):
    def forward(self, *, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Bare(LightningModule):
    """Layers and nothing around them: the first takes the batch, without gradient, the last their input by name."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.layers, self.last = nn.Sequential(Layer(6), Layer(6)), nn.ModuleList([Named(6), Named(6)])

    def loss(self, real: Tensor) -> Tensor:
        x = self.layers(real)
        for layer in self.last:
            x = layer(x=x)
        return F.mse_loss(x.float(), real.flip(1).float())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validation/loss", self.loss(batch[0]).double(), sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Unfilled(Bare):
    """It forgets what is no nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.LayerNorm(6))

    def init_module_weights(self, layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()


class Roots(Bare):
    """The gradient of a root at 0 is infinite, and times 0, one operation further back, it is not a number."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0]) + torch.sqrt((self.layers(batch[0]) * 0).sum())


class Fork(Layer):
    """A second weight, for some samples only."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.other = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0].detach() > 3.5
        out = super().forward(x)
        if chosen.any():
            out = torch.where(chosen[:, None], self.other(out), out)
        return out


class Moody(Bare):
    """Weights that take no part in some steps: on no rank, on one, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(Fork(6), Fork(6)), nn.ModuleList()
        self.spare = nn.Linear(3, 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.1)


class Experts(Bare):
    """One of three experts in each step, in turns with pauses, and a fourth never; AdamW would decay an idle one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.ModuleList()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        chosen = self.experts[(0, 1, 0, 2, 1, 0)[self.trainer.global_step]]
        return F.mse_loss(chosen(self.layers(batch[0])), batch[0].flip(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Heads(Bare):
    """A head for each domain. A rank's samples are all of the domain of its number, all ranks' of one in turns, or, of
    rank 1 alone and late, of another than before; with `skips` rank 1 leaves a layer out that others run."""

    def __init__(self, domains: str = "apart") -> None:
        super().__init__()
        self.domains = domains

    def loss(self, real: Tensor) -> Tensor:
        step, rank = self.trainer.global_step, self.trainer.global_rank
        domain = {"apart": rank, "turns": step % 2, "late": rank * (step >= 10), "skips": 0}[self.domains]
        x = self.layers(real) if self.domains != "skips" or rank == 0 else self.layers[0](real)
        return F.mse_loss(self.last[domain](x=x).float(), real.flip(1).float())


class Alone(Bare):
    """One layer and nothing that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(nn.Linear(6, 6)), nn.ModuleList()


class Reader(Bare):
    """Nothing that repeats: a table that holds most of the parameters, and an LSTM, which keeps a list of its own
    weights."""

    def __init__(self) -> None:
        super().__init__(lr=0.5)
        self.layers, self.last = nn.Sequential(nn.Embedding(500, 6)), nn.ModuleList()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 40)

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.lstm(self.layers(tokens))[0])[:, :-1]
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Scaled(Layer):
    """A parameter of shape (), and one of a single element."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.linear(x)) + self.shift


class Scalars(Bare):
    """Parameters without a dimension, inside units and outside of them: trained, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(Scaled(6), Scaled(6)), nn.ModuleList()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.tensor(0.25), requires_grad=False)

    def loss(self, real: Tensor) -> Tensor:
        return F.mse_loss((self.temperature * self.layers(real) + self.offset).float(), real.flip(1).float())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Hollow(Scalars):
    """And parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].nothing, self.nowhere = nn.Parameter(torch.zeros(0, 6)), nn.Parameter(torch.zeros(0))

    def loss(self, real: Tensor) -> Tensor:
        nothing = self.layers[0].nothing.sum() + self.nowhere.sum()
        return super().loss(real) + nothing


def slope(function: Any, x: Tensor) -> Tensor:
    """How steep `function` is at `x`: differentiable."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    return gradient


class Steep(Bare):
    """Second derivatives, before and behind other passes through the same layers; and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)

    def net(self, x: Tensor) -> Tensor:
        x = self.layers(self.head(x))
        for layer in self.last:
            x = layer(x=x)
        return self.head(x)

    def loss(self, real: Tensor) -> Tensor:
        with torch.enable_grad():
            first = F.mse_loss(self.net(real).float(), real.flip(1).float())
            penalty = (slope(self.net, real).float().norm(dim=1) - 1).pow(2).mean()
            return first + 0.3 * penalty + 0.1 * self.net(real.flip(0)).float().pow(2).mean()


class Sensitive(Steep):
    """A gradient within the step that is looked at and not differentiated."""

    def loss(self, real: Tensor) -> Tensor:
        with torch.enable_grad():
            x = real.detach().requires_grad_()
            y = self.net(x).float()
            (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            return (
                F.mse_loss(y, real.flip(1).float() + 0.1 * gradient.float())
                + 0.1 * self.head(real).float().pow(2).mean()
            )


class Cut(Layer):
    """Returns a view; the next of its kind gets it after somebody has written into it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), x], 1)[:, : x.shape[1]]


class Writes(Layer):
    """Writes into what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.dropout(x, 0.3, self.training).mul(1.0) + x.mul_(0.5).add_(0.1))


class InPlace(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(Cut(6), Cut(6)), nn.ModuleList([Writes(6), Writes(6)])

    def loss(self, real: Tensor) -> Tensor:
        x = real
        for layer in self.layers:
            x = layer(x)
            x += 1.0
            x[:, :2].mul_(0.9)
        for layer in self.last:
            x = layer(x * 1.0)
        return F.mse_loss(x.float(), real.flip(1).float())


class Graph:
    """No container that anybody knows."""

    __slots__ = ("edges", "nodes")

    def __init__(self, nodes: Tensor, edges: dict[str, Any]) -> None:
        self.nodes, self.edges = nodes, edges


class Message(Layer):
    def forward(self, graph: Graph) -> Graph:  # type: ignore[override]
        graph.nodes = super().forward(graph.nodes)
        return graph


class Update(Layer):
    def forward(self, graph: Graph) -> None:  # type: ignore[override]
        graph.edges["mean"] = super().forward(graph.nodes + graph.edges["mean"])


class OfGraphs(Bare):
    """Its layers pass objects on: one returns what it was given, one writes into it and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(Message(6), Message(6)), nn.ModuleList([Update(6), Update(6)])

    def loss(self, real: Tensor) -> Tensor:
        graph = self.layers(Graph(real, {"mean": real.mean(1, keepdim=True).expand(-1, 6)}))
        for layer in self.last:
            layer(graph)
        return F.mse_loss((graph.nodes + graph.edges["mean"]).float(), real.flip(1).float())


class Interaction(Generic[T], Layer):
    """Writes into the dict that it is given."""

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        data["x"] = super().forward(data["x"] + data["positions"].sin())
        return data


class Product(ABC, Layer):
    """Writes into a tensor that it is given."""

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        data["x"] += super().forward(data["positions"].cos())
        return {**data, "seen": data["x"]}


class Forces(ABC, Bare):
    """Its energy is differentiated by positions that travel through all layers. Classes have a first parent without a
    `__dict__`, which is another layout in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(Interaction(6), Interaction(6)), nn.ModuleList([Product(6), Product(6)])

    def loss(self, real: Tensor) -> Tensor:
        with torch.enable_grad():
            data = {"positions": real.detach().clone().requires_grad_(), "x": torch.ones_like(real)}
            for layer in (*self.layers, *self.last):
                data = layer(data)
            energy = (data["x"] + 0.5 * data["positions"].square()).float().sum(1)
            (gradient,) = torch.autograd.grad(energy.sum(), data["positions"], create_graph=True)
            return F.mse_loss(-gradient.float(), real.flip(1).float()) + energy.mean()


class Clips(Bare):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(*args, gradient_clip_val=0.01)


class ClipsByValue(Bare):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(*args, gradient_clip_val=0.005, gradient_clip_algorithm="value")


class Halves(Bare):
    """Changes its gradients before it clips them."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        for p in self.parameters():
            p.grad.mul_(0.5)  # type: ignore[union-attr]
        self.clip_gradients(*args, gradient_clip_val=0.3)


class Watches(Bare):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad = None


class Skips(Bare):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class GradientLogger(Callback):
    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        for name, p in pl_module.named_parameters():
            print(name, p.grad)


class Observed(Bare):
    def configure_callbacks(self) -> Any:
        return [GradientLogger()]


class Factored(Bare):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=self.lr)


class Searches(Bare):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Penalized(Bare):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0]) + 0.1 * sum(p.pow(2).sum() for p in self.parameters())


class Silent(Bare):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        return None


class Detached(Bare):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).detach()


class Untrained(Bare):
    def configure_optimizers(self) -> Any:
        return None


class Lazy(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(6)


class Sparse(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 6, sparse=True)


class Complex(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.ones(6, dtype=torch.complex64))


class Idle(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 6)


def network(inputs: int, outputs: int, width: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), Layer(width), Layer(width), nn.Linear(width, outputs))


class Gan(LightningModule):
    """Two optimizers, stepped by hand: the generator's loss must see the discriminator's new weights."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.generator, self.discriminator = network(4, 6), network(6, 1)

    def losses(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones(len(real), 1, device=real.device)
        fake = self.generator(noise)
        critic = F.binary_cross_entropy_with_logits(self.discriminator(real).float(), one)
        critic = critic + F.binary_cross_entropy_with_logits(self.discriminator(fake.detach()).float(), 0 * one)
        return critic, fake

    def fooled(self, fake: Tensor) -> Tensor:
        score = self.discriminator(fake).float()
        return F.binary_cross_entropy_with_logits(score, torch.ones_like(score))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(second)
        critic, _ = self.losses(*batch)
        second.zero_grad()
        self.manual_backward(critic)
        second.step()
        self.untoggle_optimizer(second)
        self.toggle_optimizer(first)
        fooled = self.fooled(self.generator(batch[1]))
        first.zero_grad()
        self.manual_backward(fooled)
        first.step()
        self.untoggle_optimizer(first)
        self.log("critic", critic)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        critic, _ = self.losses(*batch)
        self.log("validation/loss", critic.double(), sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=self.lr) for part in (self.generator, self.discriminator)]


class ByHand(Gan):
    """Clips by norm and by value, its second optimizer steps in every other batch, each has a schedule."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc]
        schedules: Any = self.lr_schedulers()
        with second.toggle_model():
            critic, _ = self.losses(*batch)
            second.zero_grad()
            self.manual_backward(critic)
            self.clip_gradients(second, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            second.step()
        if batch_idx % 2:
            self.toggle_optimizer(first)
            first.zero_grad()
            self.manual_backward(self.fooled(self.generator(batch[1])))
            self.clip_gradients(first, gradient_clip_val=0.005, gradient_clip_algorithm="value")
            first.step()
            self.untoggle_optimizer(first)
        for schedule in schedules:
            schedule.step()
        self.log("loss/critic", critic, prog_bar=True)
        return critic.detach()

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.7) for o in optimizers]


class Wgan(Gan):
    """A gradient penalty by hand; weights are clipped by hand as well."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        maker, judge = self.optimizers()  # type: ignore[misc]
        real, noise = batch
        for _ in range(2):
            fake = self.generator(noise).detach()
            judge.zero_grad()
            middle = 0.5 * (real + fake)
            penalty = (slope(self.discriminator, middle).float().norm(dim=1) - 1).pow(2).mean()
            scores = self.discriminator(fake).float().mean() - self.discriminator(real).float().mean()
            self.manual_backward(scores + penalty)
            judge.step()
            with torch.no_grad():
                for p in self.discriminator.parameters():
                    p.clamp_(-0.5, 0.5)
        self.toggle_optimizer(maker)
        maker.zero_grad()
        self.manual_backward(-self.discriminator(self.generator(noise)).float().mean())
        maker.step()
        self.untoggle_optimizer(maker)


class Rests(Gan):
    """No optimizer steps, no loss is returned, and it keeps Lightning's counter itself."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss/critic", self.losses(*batch)[0].detach(), prog_bar=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed += 1


class Around(ByHand):
    """Steps torch's own optimizer, past the loss scale."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        _, second = self.optimizers(use_pl_optimizer=False)  # type: ignore[misc]
        second.zero_grad()
        self.manual_backward(self.losses(*batch)[0])
        second.step()


class Diverges(ByHand):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:  # type: ignore[override]
        return {"loss": super().training_step(batch, batch_idx) * (torch.nan if batch_idx == 1 else 1)}


class Swapped(Gan):
    """Its optimizers in the other order."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            critic, fake = self.losses(*batch)
            optimizer.zero_grad()
            self.manual_backward(critic + self.fooled(fake))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()[::-1]


class Sharing(Swapped):
    """A weight in both optimizers."""

    def configure_optimizers(self) -> Any:
        first, second = super().configure_optimizers()
        second.add_param_group({"params": [next(self.discriminator.parameters())]})
        return first, second


class Forgetful(Gan):
    """As the Gan, but it forgot to say that it optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True


def samples(kind: str, count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    if kind == "images":
        images = torch.randn(count, 3, 8, 8, generator=generator)
        return TensorDataset(images, (images.mean((1, 2, 3)) > 0).long() + (images[:, 0].mean((1, 2)) > 0.1).long())
    if kind == "tokens":
        return TensorDataset((torch.arange(12) + torch.randint(40, (count, 1), generator=generator)) % 40)
    real = torch.randn(count, 6, generator=generator) + 2
    return TensorDataset(real, torch.randn(count, 4, generator=generator))


class Samples(LightningDataModule):
    def __init__(self, kind: str, batch_size: int) -> None:
        super().__init__()
        self.kind, self.batch_size = kind, batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(self.kind, 40, 0), batch_size=self.batch_size, shuffle=False)

    def val_dataloader(self) -> Any:
        loader = DataLoader(samples(self.kind, 13, 1), batch_size=4, shuffle=False)
        return CombinedLoader([loader, loader], "max_size") if self.kind == "together" else loader
