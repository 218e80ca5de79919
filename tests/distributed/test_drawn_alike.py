"""What hooks and optimizers draw for weights keeps the copies of weights the same, also in a run that goes on; what a
`functional_call` would not replace is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from tests.harness.cells import cell_plan, fit
from tests.harness.modules import Layer
from tests.harness.processes import spawn

STEPS, STOP = 6, 3
ON = "cuda" if torch.cuda.device_count() > 1 else "cpu"  # torch draws in another way for shards on GPUs
KINDS = ("epoch", "batch", "gradients", "step", "by_hand")
STRATEGIES = {"ddp": ["strategy=ddp"], "fsdp": ["strategy=fsdp"],
              "copies": ["strategy=fsdp_hybrid", "strategy.shard_size=1"]}  # fmt: skip


DROPPED: list[float] = []  # what this rank has drawn in its steps and before validation


class Noisy(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad).add_(torch.randn_like(p), alpha=0.01)


class Draws(LightningModule):
    """Draws noise for its weights where `kind` says, and for its steps, as dropout does."""

    whole_weights_in = ("on_train_batch_end", "on_train_epoch_end")

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList([Layer(4) for _ in range(2)])
        self.automatic_optimization = kind != "by_hand"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[1]
        DROPPED.append(torch.rand(()).item())
        for layer in self.layers:
            x = layer(x)
        loss = x.square().mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return Noisy(self.parameters()) if self.kind in ("step", "by_hand") else torch.optim.SGD(self.parameters(), 0.1)

    @torch.no_grad()
    def shake(self) -> None:
        for p in self.parameters():
            p.add_(torch.randn_like(p), alpha=0.01)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Only its hook draws."""

    def on_validation_start(self) -> None:
        DROPPED.extend(torch.rand(()).item() for _ in self.parameters())

    def on_train_epoch_end(self) -> None:
        if self.kind == "epoch":
            self.shake()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.kind == "batch":
            self.shake()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.kind == "gradients":
            for p in self.parameters():
                assert p.grad is not None
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


class Replaces(LightningModule):
    """Computes its layers, or its head, with other weights."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layers, self.head = what, nn.Sequential(Layer(4), Layer(4)), nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[1]
        part = getattr(self, self.what)
        zeros = {name: torch.zeros_like(p) for name, p in part.named_parameters()}
        y = torch.func.functional_call(part, zeros, (x,))
        if self.what == "head":
            assert not y.any()
        return (self.head(self.layers(x)) + y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def plan_of(folder: Path, module: str, *words: str, ranks: int = 2, file: str = __name__) -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", f"module._target_={file}.{module}", "data._target_=tests.harness.modules.Samples",
        "+data.kind=pairs", "+data.batch_size=${micro_batch_size}", f"runs_dir={folder.parent}", f"name={folder.name}",
        f"accelerator={ON}", f"devices={ranks}", "micro_batch_size=2", "global_batch_size=8", f"max_steps={STEPS}",
        "checkpoint.monitor=null", "validate_every_n_steps=3", "log_every_n_steps=1", *words,
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=torch.cuda.device_count()))


def own_weights(found: dict[str, Any]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in found["final"].values()])


def train(folder: Path, strategy: str) -> dict[str, Any]:
    """In each rank: every kind; the steps by hand in a run that goes on, too."""
    result: dict[str, Any] = {}
    for kind in KINDS:
        words = [f"module.kind={kind}", *STRATEGIES[strategy], *(["global_batch_size=4"] if kind == "by_hand" else [])]
        straight = fit(plan_of(folder / kind, "Draws", *words))
        name = f"{kind}-stopped"
        saves = "checkpoint.save_every_n_steps=1"
        fit(plan_of(folder / name, "Draws", *words, saves, f"max_steps={STOP}"))
        saved = folder / name / "checkpoints" / f"step-{STOP:08d}.ckpt"
        resumed = fit(plan_of(folder / name, "Draws", *words, saves, f"resume={saved}"))
        result[kind] = own_weights(straight), own_weights(resumed)
        result[f"{kind}, dropped"] = list(DROPPED)
        DROPPED.clear()
    return result


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_of_weights_stay_the_same(tmp_path: Path, strategy: str) -> None:
    own, other = spawn(2, train, tmp_path, strategy)
    for kind in KINDS:
        assert torch.equal(own[kind][0], other[kind][0]), kind
        assert torch.equal(own[kind][0], own[kind][1]), f"{kind}: a run that goes on draws others"
        same = set(own[f"{kind}, dropped"]) & set(other[f"{kind}, dropped"])
        assert not same, f"{kind}: dropout, or what validation draws, is the same on both ranks"


class Shakes(Callback):
    """Adds noise to the gradients of norms, which every rank of a tensor axis has."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for p in norms_of(pl_module):
            gradient = local_part(p.grad)
            gradient.add_(torch.randn_like(gradient), alpha=0.1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.norms = torch.cat([local_part(p.detach()).flatten() for p in norms_of(pl_module)])


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norms_of(module: LightningModule) -> list[Any]:
    return [p for name, p in module.named_parameters() if "norm" in name]


def shake_norms(folder: Path) -> Tensor:
    """In each rank."""
    words = ["strategy=fsdp", "strategy.tensor_parallel_size=2", "model.n_kv_heads=2", "model.ffn_dim=40",
             "model.vocab_size=62", "max_steps=3", "global_batch_size=4", "micro_batch_size=2"]  # fmt: skip
    shakes = Shakes()
    fit(cell_plan(folder / "run", 2, *words), shakes)
    return shakes.norms


def test_ranks_of_a_tensor_axis_draw_alike_for_what_both_have(tmp_path: Path) -> None:
    own, other = spawn(2, shake_norms, tmp_path)
    assert own.numel() > 0 and torch.equal(own, other)


def try_to_replace(folder: Path) -> None:
    """In each rank."""
    for words in (["strategy=fsdp"], ["strategy=zero3"], ["strategy=ddp", "activation_checkpointing=full"]):
        name = words[-1].replace("=", "-")
        refusal = (
            r"reads the weight layers\.0\." if "strategy=zero3" in words else r"functional_call replaces 0\.\S+ of Seq"
        )
        with pytest.raises(ConfigError, match=refusal):
            fit(plan_of(folder / name, "Replaces", "module.what=layers", *words))
    fit(plan_of(folder / "ddp", "Replaces", "module.what=layers", "strategy=ddp"))
    fit(plan_of(folder / "head", "Replaces", "module.what=head", "strategy=fsdp"))
    dist.barrier()


def test_weights_that_a_call_would_not_replace_are_refused(tmp_path: Path) -> None:
    spawn(2, try_to_replace, tmp_path)
