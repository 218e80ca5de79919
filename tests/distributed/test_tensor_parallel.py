"""`strategy.tensor_parallel_size` divides each layer among ranks and changes no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import SumMetric

from recipes.language_modeling.module import LanguageModel
from shardwise.nn.linear_cross_entropy import VocabularyPart, _plain_rows, fused_rows_of_a_part, linear_cross_entropy
from shardwise.nn.peers import Peers
from tests.harness.cells import cell_plan, fit
from tests.harness.divided import BATCH, CLIP, STEPS, Divided, deviation, run_divided
from tests.harness.parity import BOUNDS
from tests.harness.processes import spawn
from tests.harness.quack_kernels import replace_kernels

TWO = ("strategy=fsdp", "strategy.tensor_parallel_size=2")
FOUR = ("strategy=fsdp", "strategy.tensor_parallel_size=4")
COPIES = ("strategy=fsdp_hybrid", "strategy.shard_size=1", "strategy.tensor_parallel_size=2")
CHECKPOINTED = ("activation_checkpointing=full", "loss=chunked")
CELLS = {
    2: [
        Divided(TWO),
        Divided(TWO, optimizer="sgd", tied=False, accumulate=1, clip=None),
        Divided(TWO, tied=False, precision="fp32", more=CHECKPOINTED),
        Divided(TWO, optimizer="sgd", precision="fp32", accumulate=8),
        Divided(TWO, more=("activation_checkpointing=selective", "strategy.defer_gradient_sync=true")),
    ],
    4: [
        Divided(FOUR, tied=False),
        Divided(TWO, data_ranks=2),
        Divided(TWO, data_ranks=2, tied=False, optimizer="sgd", precision="fp32", more=CHECKPOINTED),
        Divided(COPIES, data_ranks=2, accumulate=1, clip=None),
    ],
}


@pytest.mark.parametrize("ranks", CELLS)
def test_a_divided_model_equals_the_plain_loop(tmp_path: Path, ranks: int) -> None:
    """Initial weights, losses, norms and updates; the vocabulary of 61 is divided unevenly, and masks are uneven."""
    found = spawn(ranks, run_divided, tmp_path, ranks, CELLS[ranks])
    off: dict[Divided, Any] = {}
    for number, cell in enumerate(CELLS[ranks]):
        numbers = deviation(cell, found[0][number])
        assert cell.clip is None or min(found[0][number]["norms"]) > 2 * CLIP, "must bite"
        if max(numbers.values()) > BOUNDS[cell.precision]:
            off[cell] = numbers
        for result in found[1:]:
            for name, tensor in found[0][number]["final"].items():
                assert torch.equal(result[number]["final"][name], tensor), (cell, name)
    assert not off


class Shapes(Callback):
    """The shapes of what the second block is given in training."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def see(block: Any, arguments: tuple[Any, ...]) -> None:
            self.seen += [tuple(arguments[0].shape)] if torch.is_grad_enabled() else []

        pl_module.model.blocks[1].register_forward_pre_hook(see)  # type: ignore[union-attr, index, arg-type]


def run_by_sample(folder: Path) -> dict[int, list[tuple[int, ...]]]:
    """In each of two ranks: the shapes by the size of a micro-batch."""
    found = {}
    for micro in (1, 2, 3):
        shapes = Shapes()
        words = [*TWO, "max_steps=1", f"micro_batch_size={micro}", f"global_batch_size={micro}", "checkpoint=none",
                 "model.dim=32", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=48"]  # fmt: skip
        fit(cell_plan(folder / str(micro), 2, *words), shapes)
        found[micro] = shapes.seen
    return found


def test_samples_are_divided_where_their_number_can_be_and_sequences_otherwise(tmp_path: Path) -> None:
    for rank in spawn(2, run_by_sample, tmp_path):
        assert rank == {1: [(1, 8, 32)], 2: [(1, 16, 32)], 3: [(3, 8, 32)]}


class TwoPasses(LanguageModel):
    """Runs its model a second time, on the first sample alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + super().training_step({key: value[:1] for key, value in batch.items()}, batch_idx)


def run_own(folder: Path, module: str, micro: int, ranks: int = 2, layout: tuple[str, ...] = TWO) -> list[float]:
    """In each rank: one step."""
    words = [*layout, "max_steps=1", f"micro_batch_size={micro}", f"global_batch_size={2 * micro}", "checkpoint=none",
             "model.dim=32", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=48",
             f"module._target_={__name__}.{module}"]  # fmt: skip
    losses: list[float] = fit(cell_plan(folder / "run", ranks, *words))["losses"]
    return losses


class PenalizesHead(LanguageModel):
    """Adds a penalty on a weight of which a rank has some rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0.1 * self.model.head.weight.pow(2).sum()


class PenalizesHidden(LanguageModel):
    """Adds what it computes of hidden states, of which a rank has some positions."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.model(batch["tokens"])[:, :, 0].mean()


class PenalizesLayer(LanguageModel):
    """Adds a penalty on a weight of a layer, of which a rank has a shard."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.model.blocks[0].feed_forward.w1.weight  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx) + 0.1 * weight.pow(2).sum()  # type: ignore[operator]


class ReturnsSeveral(LanguageModel):
    """Returns a loss that is not one number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * torch.ones(2)


STAGES = (*TWO, "strategy.pipeline_parallel_size=2")
OF_A_PART = "tensor_parallel_size=2: ranks with the same samples have found losses that differ by"


@pytest.mark.parametrize(
    ("module", "message", "ranks", "layout"),
    [
        ("PenalizesHead", OF_A_PART, 2, TWO),
        ("PenalizesHidden", OF_A_PART, 2, TWO),
        ("PenalizesHead", OF_A_PART, 4, STAGES),
        ("PenalizesLayer", "training_step computes with weights outside the layers that own them", 2, TWO),
        ("ReturnsSeveral", r"training_step returned a loss of shape \(2,\): it must be a scalar", 2, TWO),
    ],
)
def test_a_loss_that_is_not_that_of_the_whole_is_refused(
    tmp_path: Path, module: str, message: str, ranks: int, layout: tuple[str, ...]
) -> None:
    with pytest.raises(AssertionError, match=message):
        spawn(ranks, run_own, tmp_path, module, 2, ranks, layout)


def test_all_passes_of_a_step_divide_the_same(tmp_path: Path) -> None:
    """Layers that are computed again would otherwise be given the other pass's division."""
    assert spawn(2, run_own, tmp_path / "sequences", "TwoPasses", 3)[0]
    with pytest.raises(
        AssertionError, match="divides the samples of one pass .* another, which has 1: give all passes"
    ):
        spawn(2, run_own, tmp_path / "both", "TwoPasses", 2)


def far_from_zero() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head's weight and targets: of logits around 2000, -2000 and 0."""
    hidden = torch.tensor([[2000, 1], [-2000, 1], [0, 1]], dtype=torch.float64)
    weight = torch.stack((torch.ones(5), torch.arange(5)), dim=1).double().requires_grad_()
    return hidden, weight, torch.tensor([0, 4, 2])


def run_losses() -> dict[str, tuple[Tensor, Tensor]]:
    """In each of two ranks: losses with this rank's part of the head, and the gradients of that."""
    dist.init_process_group("gloo")
    group, found = dist.group.WORLD, {}
    assert group is not None
    part = VocabularyPart(Peers(group.group_name, group.rank(), group.size()), 5)
    for loss in ("full", "chunked"):
        hidden, weight, targets = far_from_zero()
        own = weight.detach().narrow(0, part.start, part.tokens).requires_grad_()
        total = linear_cross_entropy(hidden, own, targets, loss=loss, part=part)
        total.backward()
        assert own.grad is not None
        found[loss] = total.detach(), own.grad
    dist.destroy_process_group()
    return found


def test_a_divided_loss_is_right_for_logits_whose_powers_no_number_holds() -> None:
    hidden, weight, targets = far_from_zero()
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    expected.backward()
    ranks = spawn(2, run_losses)
    for loss in ("full", "chunked"):
        assert all(rank[loss][0] == pytest.approx(expected.item(), rel=1e-12) for rank in ranks), loss
        torch.testing.assert_close(torch.cat([rank[loss][1] for rank in ranks]), weight.grad)


def run_fused_rows() -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """In each of two ranks: losses and gradients of its logits, by the kernels' stand-ins and by the plain way."""
    dist.init_process_group("gloo")
    group, found = dist.group.WORLD, []
    assert group is not None
    part = VocabularyPart(Peers(group.group_name, group.rank(), group.size()), 48)
    whole = (torch.randn(40, 48, generator=torch.Generator().manual_seed(1)) * 8).bfloat16()
    targets = torch.arange(40) + 4
    targets[::5] = -100
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        replace_kernels(patch)
        for with_gradients in (False, True):
            results = list[Tensor]()
            for rows in (fused_rows_of_a_part, _plain_rows):
                logits, losses = whole.narrow(1, part.start, part.tokens).clone(), torch.full((40,), torch.nan)
                rows(logits, targets, losses, with_gradients, part)
                results += [losses, logits]
            found.append((results[0], results[1], results[2], results[3]))
    dist.destroy_process_group()
    return found


def test_the_kernels_of_the_fused_loss_find_the_loss_of_a_divided_vocabulary() -> None:
    """The kernels themselves run on GPUs: benchmarks/gpu_checks/loss.py."""
    for rank in spawn(2, run_fused_rows):
        (losses, kept, plain, _), (with_gradients, gradients, also_plain, plain_gradients) = rank
        for found, expected in ((losses, plain), (with_gradients, also_plain), (losses, with_gradients)):
            torch.testing.assert_close(found, expected)
        assert kept.abs().max() > 1 >= gradients.abs().max()
        torch.testing.assert_close(gradients, plain_gradients, rtol=1e-2, atol=1e-6)


class Counting(Callback):
    """Counts samples in a number of the module's own and in a metric of torchmetrics, and votes."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.metric = pl_module.counted = SumMetric()
        self.votes: list[bool] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        samples = float(len(batch["tokens"]))
        pl_module.log("samples", samples, sync_dist=True, reduce_fx="sum", batch_size=1)
        self.metric.update(samples)
        is_first = trainer.global_rank == 0
        decide = trainer.strategy.reduce_boolean_decision
        self.votes = [decide(True), decide(is_first), decide(is_first, all=False)]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.counted = float(self.metric.compute())


def run_counting(folder: Path, ranks: int) -> dict[str, Any]:
    counting = Counting()
    cell = Divided(TWO, data_ranks=2, precision="fp32", accumulate=1)
    found = fit(cell_plan(folder / "counting", ranks, *cell.words()), counting)
    return {"logged": found["validation"]["samples"], "metric": counting.counted, "votes": counting.votes}


def test_peers_that_see_the_same_samples_are_counted_once(tmp_path: Path) -> None:
    found = spawn(4, run_counting, tmp_path, 4)
    assert [result["votes"] for result in found] == [[True, False, True]] * 4
    assert [result["metric"] for result in found] == [float(STEPS * BATCH)] * 4
    assert found[0]["logged"] == BATCH
