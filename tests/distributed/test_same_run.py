"""What must not depend on the strategy or the number of ranks: initial weights, metrics, dtypes in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.compose import compose
from shardwise.plan import Host, Plan, make_plan
from tests.distributed.cells import cell_plan, fit
from tests.distributed.processes import spawn

STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "fsdp_hybrid": ["strategy=fsdp_hybrid", "strategy.shard_size=2"],
}


def foreign_plan(run_dir: Path, ranks: int, *words: str) -> Plan:
    run_dir.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", "module._target_=tests.distributed.foreign.Foreign",
        "data._target_=tests.distributed.foreign.Points", "+data.batch_size=${micro_batch_size}",
        f"runs_dir={run_dir.parent}", f"name={run_dir.name}", "accelerator=cpu", f"devices={ranks}", "max_steps=3",
        f"micro_batch_size={8 // ranks}", "global_batch_size=16", "checkpoint=none", "validate_every_n_steps=3",
        "log_every_n_steps=1",
    ]  # fmt: skip
    return make_plan(compose([*argv, *words]).jobs[0].config, Host(cuda_devices=0))


def lm_plan(run_dir: Path, ranks: int, *words: str) -> Plan:
    return cell_plan(run_dir, ranks, f"micro_batch_size={4 // ranks}", "global_batch_size=8", "max_steps=3",
                     "checkpoint=none", "validate_every_n_steps=3", *words)  # fmt: skip


def run_everything(folder: Path, ranks: int) -> dict[str, dict[str, Any]]:
    """In each rank: both modules under every strategy; and few validation samples, so that ranks run dry."""
    cells = {}
    for name, words in STRATEGIES.items():
        if ranks % 2 and name == "fsdp_hybrid":
            continue
        cells[f"foreign {name}"] = fit(foreign_plan(folder / f"foreign-{name}", ranks, *words))
        cells[f"lm {name}"] = fit(lm_plan(folder / f"lm-{name}", ranks, *words))
    few = ["+data.validation_samples=3", "strategy=fsdp"]
    cells["few fsdp"] = fit(foreign_plan(folder / "few", ranks, *few))
    return cells


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return {ranks: spawn(ranks, run_everything, tmp_path_factory.mktemp(f"ranks{ranks}"), ranks) for ranks in (1, 2, 4)}


@pytest.mark.parametrize("module", ["foreign", "lm"])
def test_initial_state_depends_on_seed_and_model_alone(runs: Any, module: str) -> None:
    """Parameters and buffers, those drawn in a constructor included."""
    hashes = {
        (ranks, rank, name): cell["hash"]
        for ranks, results in runs.items()
        for rank, cells in enumerate(results)
        for name, cell in cells.items()
        if name.startswith(module)
    }
    assert len(hashes) == 2 * 1 + 3 * 2 + 3 * 4
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.parametrize("module", ["foreign", "lm", "few"])
def test_validation_is_the_same_on_every_rank_and_number_of_ranks(runs: Any, module: str) -> None:
    """13 samples in batches of 2, and 3 samples, which leave ranks without any: no duplicate counts, nothing hangs."""
    cells = {
        (ranks, rank, name): cell["validation"]
        for ranks, results in runs.items()
        for rank, cells in enumerate(results)
        for name, cell in cells.items()
        if name.startswith(module)
    }
    first = cells[1, 0, f"{module} fsdp"]
    assert {"validation/loss"} <= set(first)
    for where, validation in cells.items():
        assert validation == pytest.approx(first, rel=1e-5), where


def test_logged_loss_is_the_mean_over_ranks_and_micro_batches(runs: Any) -> None:
    for module in ("foreign", "lm"):
        losses = {
            (ranks, name): cell["losses"]
            for ranks, results in runs.items()
            for name, cell in results[0].items()
            if name.startswith(module)
        }
        first = losses[1, f"{module} ddp"]
        assert len(first) == 3
        for where, values in losses.items():
            assert values == pytest.approx(first, rel=1e-5), where


# bf16: what has which dtype, looked at while it runs


@contextmanager
def watched(seen: dict[str, set[torch.dtype]]) -> Iterator[None]:
    """Dtypes of what passes through collectives and norms."""
    normalize = torch.nn.functional.rms_norm

    def note(key: str, tensor: Tensor) -> None:
        seen.setdefault(key, set()).add(tensor.dtype)

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        note("norm input", x)
        note("norm weight", weight)
        return normalize(x, shape, weight, eps)

    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    reduce_scatter = collectives.DefaultReduceScatter.__call__

    def scatter(self: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        note("reduced gradient", input_tensor)
        return reduce_scatter(self, output_tensor, input_tensor, *args, **kwargs)

    with (
        patch("torch.nn.functional.rms_norm", rms_norm),
        patch.object(collectives.DefaultReduceScatter, "__call__", scatter),
    ):
        yield


def watch_bf16(folder: Path, ranks: int) -> dict[str, dict[str, Any]]:
    return {name: watch(folder / name, ranks, words) for name, words in STRATEGIES.items()}


def watch(run_dir: Path, ranks: int, words: list[str]) -> dict[str, Any]:
    """One bf16 run in this rank, and every dtype that was seen in it."""
    from lightning.pytorch import Callback

    from recipes.language_modeling import module as lm
    from shardwise.trainer import build_trainer

    seen: dict[str, set[torch.dtype]] = {}

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            seen["gradient"] = {p.grad.dtype for p in module.parameters()}
            seen["master"] = {p.dtype for p in module.parameters()}
            seen["buffer"] = {b.dtype for b in module.buffers()}

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                assert all(p.grad is None for p in module.parameters()), "gradients outlive the step"
                seen["optimizer state"] = {s["exp_avg"].dtype for s in trainer.optimizers[0].state.values()}

    def watched_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        seen["hidden"], seen["head weight"] = {hidden.dtype}, {weight.dtype}
        assert not isinstance(weight, DTensor)
        out = loss(hidden, weight, targets)
        seen["loss"] = {out.dtype}
        return out

    def build_with_look(plan: Any, module: Any) -> Any:
        made: Any = build_trainer(plan, module)
        made.callbacks.append(Look())
        for unit in module.model.blocks:
            unit.register_forward_pre_hook(lambda m, args: seen.setdefault("unit input", set()).add(args[0].dtype))
            unit.register_forward_hook(look_inside, prepend=True)
        return made

    def look_inside(unit: Any, args: Any, out: Any) -> None:
        seen.setdefault("unit weight", set()).add(unit.attention.wq.weight.dtype)

    loss = lm.cross_entropy
    with (
        watched(seen),
        patch.object(lm, "cross_entropy", watched_loss),
        patch("tests.distributed.cells.build_trainer", build_with_look),
    ):
        cell = fit(lm_plan(run_dir, ranks, *words, "precision=bf16"))
    return {"seen": seen, "losses": cell["losses"], "norms": cell["norms"], "hash": cell["hash"]}


def test_bf16_is_the_same_numerics_under_every_strategy(tmp_path: Path, runs: Any) -> None:
    results = spawn(2, watch_bf16, tmp_path, 2)
    bf16, fp32 = {torch.bfloat16}, {torch.float32}
    for cells in results:
        for name, cell in cells.items():
            seen = cell["seen"]
            for key in ("unit input", "unit weight", "norm input", "norm weight", "hidden", "head weight"):
                assert seen[key] == bf16, (name, key, seen[key])
            for key in ("master", "gradient", "optimizer state", "buffer", "loss"):
                assert seen[key] == fp32, (name, key, seen[key])
            assert seen.get("reduced gradient", fp32) == fp32, name
            assert cell["hash"] == runs[1][0]["lm ddp"]["hash"]
    cells = results[0]
    for name, cell in cells.items():
        # The forward passes of the first step are the same kernels on the same numbers.
        assert cell["losses"][0] == pytest.approx(cells["ddp"]["losses"][0], rel=1e-7), name
        assert cell["norms"][0] == pytest.approx(cells["ddp"]["norms"][0], rel=1e-3), name
        assert cell["losses"] == pytest.approx(runs[1][0]["lm ddp"]["losses"], rel=1e-2), name
