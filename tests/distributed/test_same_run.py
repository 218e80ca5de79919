"""What must not depend on the strategy or the number of ranks: initial weights, metrics, dtypes in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from tests.harness.cells import cell_plan, fit
from tests.harness.processes import spawn
from tests.harness.reference import update_deviation
from tests.harness.selected import needed

STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "fsdp_hybrid": ["strategy=fsdp_hybrid", "strategy.shard_size=2"],
    "zero1": ["strategy=zero1"],
    "zero2": ["strategy=zero2"],
    "zero3": ["strategy=zero3"],
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
        if (ranks % 2 and name == "fsdp_hybrid") or (ranks != 2 and name in ("zero1", "zero2")):  # minutes, for little
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
    assert len(hashes) == 3 * 1 + 6 * 2 + 4 * 4
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


# 16 bits: what has which dtype, looked at while it runs


@contextmanager
def watched(seen: dict[str, set[torch.dtype]]) -> Iterator[None]:
    """Dtypes of what passes through collectives and norms."""

    def note(key: str, tensor: Tensor) -> None:
        seen.setdefault(key, set()).add(tensor.dtype)

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        note("norm input", x)
        note("norm weight", weight)
        return normalize(x, shape, weight, eps)

    def noting(reduce: Any) -> Any:
        """A collective that sums; a norm or a loss, which has few elements, is no gradient."""

        def run(*args: Any, **kwargs: Any) -> Any:
            for tensor in (*args, *kwargs.values()):
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 16:
                    note("reduced gradient", tensor)
            return reduce(*args, **kwargs)

        return run

    from deepspeed.comm.torch import TorchBackend
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    normalize = torch.nn.functional.rms_norm
    with ExitStack() as stack:
        stack.enter_context(patch("torch.nn.functional.rms_norm", rms_norm))
        for owner, name in (
            (collectives.DefaultReduceScatter, "__call__"),
            (torch.distributed, "all_reduce"),
            (TorchBackend, "all_reduce"),
            (TorchBackend, "reduce"),
            (TorchBackend, "reduce_scatter"),
            (TorchBackend, "reduce_scatter_tensor"),
        ):
            stack.enter_context(patch.object(owner, name, noting(getattr(owner, name))))
        yield


WATCHED = {
    "bf16": list(STRATEGIES),
    "bf16_true": list(STRATEGIES),
    "fp16": [name for name in STRATEGIES if not name.startswith("zero")],  # DeepSpeed refuses it on the CPU
}


def watch_all(folder: Path, ranks: int) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (precision, name): watch(folder / f"{precision}-{name}", ranks, [*STRATEGIES[name], f"precision={precision}"])
        for precision, names in WATCHED.items()
        for name in names
    }


def watch(run_dir: Path, ranks: int, words: list[str]) -> dict[str, Any]:
    """One run in this rank, and every dtype that was seen in it."""
    from lightning.pytorch import Callback

    from recipes.language_modeling import module as lm
    from shardwise.trainer import build_trainer

    seen: dict[str, set[torch.dtype]] = {}

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            with torch._C.DisableTorchFunction():  # which is how ZeRO notices that a hook looks at a gradient
                seen["gradient"] = {p.grad.dtype for p in module.parameters() if p.grad is not None}
            seen["master"] = {p.dtype for p in trainer.strategy.sharded.master_shards().values()}
            seen["buffer"] = {b.dtype for b in module.buffers()}

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                assert all(p.grad is None for p in module.parameters()), "gradients outlive the step"
                optimizer = trainer.optimizers[0]
                states = getattr(optimizer, "optimizer", optimizer).state.values()  # DeepSpeed's wraps torch's
                seen["optimizer state"] = {s[key].dtype for s in states for key in ("exp_avg", "exp_avg_sq")}

    def watched_loss(hidden: Tensor, weight: Tensor, targets: Tensor, **how: Any) -> Tensor:
        seen["hidden"], seen["head weight"] = {hidden.dtype}, {weight.dtype}
        assert not isinstance(weight, DTensor)
        out = loss(hidden, weight, targets, **how)
        seen["loss"] = {out.dtype}
        return out

    def build_with_look(plan: Any, module: Any) -> Any:
        made: Any = build_trainer(plan, module)
        made.callbacks.append(Look())
        for unit in module.model.blocks:
            unit.register_forward_pre_hook(lambda m, args: seen.setdefault("unit input", set()).add(args[0].dtype))
            unit.attention.register_forward_pre_hook(look_inside)
        return made

    def look_inside(attention: Any, args: Any) -> None:
        seen.setdefault("unit weight", set()).add(attention.wq.weight.dtype)

    loss = lm.linear_cross_entropy
    with (
        watched(seen),
        patch.object(lm, "linear_cross_entropy", watched_loss),
        patch("tests.harness.cells.build_trainer", build_with_look),
    ):
        cell = fit(lm_plan(run_dir, ranks, *words))
    return {"seen": seen, "losses": cell["losses"], "norms": cell["norms"], "hash": cell["hash"]}


@pytest.fixture(scope="module")
def watched_runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], dict[str, Any]]]:
    return spawn(2, watch_all, tmp_path_factory.mktemp("watched"), 2)


COMPUTED = ("unit input", "unit weight", "norm input", "norm weight", "hidden", "head weight")


# Accumulation 1, so that two ranks add the same two gradients whoever adds them
PLAIN = ["optimizer=sgd", "optimizer.lr=2.0", "schedule=none", "micro_batch_size=4", "global_batch_size=8",
         "max_steps=3", "checkpoint=none", "model.n_layers=2"]  # fmt: skip
SWITCHES = {
    "activation_checkpointing=full": ["fp32", "bf16"],
    "compile=layer": ["fp32"],
    "compile=model": ["fp32"],
}
SWITCHED = [
    (switch, name)
    for switch in SWITCHES
    for name in STRATEGIES
    if not switch.startswith("compile") or name in ("ddp", "fsdp")  # the compiled step is the same elsewhere
] + [("compile=layer", "zero3")]  # where layers gather their weights


def switch_all(folder: Path, wanted: set[tuple[str, str]] | None) -> dict[tuple[str, str, str], Any]:
    """In each rank: every strategy × switch × precision, and the number of graphs that were compiled in each."""
    cells: dict[tuple[str, str, str], Any] = {}
    for switch, precisions in {"neither": ["fp32", "bf16"], **SWITCHES}.items():
        for name in ["ddp"] if switch == "neither" else [name for other, name in SWITCHED if other == switch]:
            for precision in precisions if wanted is None or switch == "neither" or (switch, name) in wanted else ():
                torch._dynamo.reset()  # the cells share the code of their layers, and its limit of recompilations
                torch._dynamo.utils.counters.clear()
                words = [*PLAIN, *STRATEGIES[name], f"precision={precision}", *([switch] if switch in SWITCHES else [])]
                with recomputations() as count:
                    cell = fit(cell_plan(folder / f"{switch.replace('=', '-')}-{precision}-{name}", 2, *words))
                stats = torch._dynamo.utils.counters
                cell["graphs"], cell["breaks"] = stats["stats"]["unique_graphs"], sum(stats["graph_break"].values())
                cell["recomputations"] = count[0]
                cells[switch, precision, name] = cell
    return cells


@contextmanager
def recomputations() -> Iterator[list[int]]:
    from shardwise.parallel.activation_checkpointing import LayerState

    count, lend = [0], LayerState.lend

    def counting(state: LayerState) -> None:
        count[0] += 1
        lend(state)

    with patch.object(LayerState, "lend", counting):
        yield count


@pytest.fixture(scope="module")
def switched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return spawn(2, switch_all, tmp_path_factory.mktemp("switched"), needed(request, "switch", "strategy"))[0]


def deviation(cell: Any, plain: Any) -> float:
    return max(update_deviation(plain["start"], cell["final"], plain["final"]).values())


@pytest.mark.parametrize(("switch", "strategy"), SWITCHED)
def test_switches_change_no_number(switched: Any, switch: str, strategy: str) -> None:
    """Against ddp without the switch; DeepSpeed and DDP divide by the number of ranks in another order."""
    for precision in SWITCHES[switch]:
        cell, plain = switched[switch, precision, strategy], switched["neither", precision, "ddp"]
        bound = 1e-2 if precision == "bf16" else 1e-4 if switch.startswith("compile") else 1e-5
        assert deviation(cell, plain) <= bound, precision
        assert cell["losses"] == pytest.approx(plain["losses"], rel=bound), precision
        if switch.startswith("compile"):
            assert cell["graphs"] > 0, precision
            assert cell["breaks"] == 0 or strategy == "fsdp", precision  # whose gathering is outside any graph
        else:
            assert cell["recomputations"] == 2 * 3, precision  # layers × steps


def check_dtypes(where: Any, seen: dict[str, set[torch.dtype]], compute: torch.dtype, held: torch.dtype) -> None:
    """Layers compute in one dtype, masters and what belongs to them stand in another; the rest is fp32."""
    expected = {key: {compute} for key in COMPUTED} | {key: {held} for key in ("master", "optimizer state")}
    expected |= {key: {torch.float32} for key in ("buffer", "loss")}
    if where[1] in ("zero1", "zero2", "zero3"):
        assert seen.pop("gradient") == set(), where  # they are in the engine's buffers
        expected["reduced gradient"] = {torch.float32}
    else:
        expected["gradient"] = {held}
        # DistributedDataParallel's own reduction, of what is fp32, runs out of sight
        if where[1] != "ddp" or held != torch.float32:
            expected["reduced gradient"] = {torch.float32}
    assert seen == expected, where


def test_bf16_is_the_same_numerics_under_every_strategy(watched_runs: Any, runs: Any) -> None:
    fp32 = runs[1][0]["lm ddp"]
    for results in watched_runs:
        for name in STRATEGIES:
            check_dtypes(("bf16", name), results["bf16", name]["seen"], torch.bfloat16, torch.float32)
            assert results["bf16", name]["hash"] == fp32["hash"], name
    cells = {name: watched_runs[0]["bf16", name] for name in STRATEGIES}
    for name, cell in cells.items():
        # The forward passes of the first step are the same kernels on the same numbers.
        assert cell["losses"][0] == pytest.approx(cells["ddp"]["losses"][0], rel=1e-7), name
        assert cell["norms"][0] == pytest.approx(cells["ddp"]["norms"][0], rel=1e-3), name
        assert cell["losses"] == pytest.approx(fp32["losses"], rel=1e-2), name


def test_bf16_true_holds_everything_in_bf16_and_reduces_in_fp32(watched_runs: Any, runs: Any) -> None:
    for results in watched_runs:
        for name in WATCHED["bf16_true"]:
            check_dtypes(("bf16_true", name), results["bf16_true", name]["seen"], torch.bfloat16, torch.bfloat16)
    for name in WATCHED["bf16_true"]:
        cell, ddp = (watched_runs[0]["bf16_true", n] for n in (name, "ddp"))
        assert cell["hash"] == ddp["hash"] != runs[1][0]["lm ddp"]["hash"], name  # rounded alike
        assert cell["losses"][0] == pytest.approx(ddp["losses"][0], rel=1e-7), name
        assert cell["norms"][0] == pytest.approx(ddp["norms"][0], rel=1e-2), name
        assert cell["losses"] == pytest.approx(runs[1][0]["lm ddp"]["losses"], rel=2e-2), name


def test_fp16_computes_in_fp16_on_fp32_masters(watched_runs: Any, runs: Any) -> None:
    for results in watched_runs:
        for name in WATCHED["fp16"]:
            check_dtypes(("fp16", name), results["fp16", name]["seen"], torch.float16, torch.float32)
    for name in WATCHED["fp16"]:
        cell, fp32 = watched_runs[0]["fp16", name], runs[1][0]["lm ddp"]
        assert cell["hash"] == fp32["hash"], name
        assert cell["losses"] == pytest.approx(fp32["losses"], rel=2e-3), name
        assert cell["norms"] == pytest.approx(fp32["norms"], rel=2e-2), name  # of gradients without their scale
