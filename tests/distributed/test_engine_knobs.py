"""What the engines offer to trade memory for speed reaches them, and changes no number."""

from __future__ import annotations

import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.fsdp import FSDPModule

from shardwise.errors import ConfigError
from shardwise.parallel.units import units_for
from shardwise.plan import Plan
from shardwise.strategies.fsdp_gathering import check_prefetch
from shardwise.trainer import build_module
from tests.harness.anybodys_module import plan_for as plan_for_module
from tests.harness.cells import fit
from tests.harness.exact_resume import STEPS, STOP, plan_for
from tests.harness.parity import CLIP, Cell, plan_of
from tests.harness.processes import spawn
from tests.harness.reference import update_deviation

AHEAD = ["strategy.forward_prefetch_units=2", "strategy.backward_prefetch_units=2"]
SMALL = ["strategy.reduce_bucket_elements=50", "strategy.overlap_comm=false"]
GATHERED = ["strategy.allgather_bucket_elements=6"]
CELLS: dict[int, dict[str, tuple[str, list[str]]]] = {  # ranks → name → strategy and its knobs
    2: {
        "fsdp": ("fsdp", []),
        "fsdp, turned": ("fsdp", AHEAD),
        "zero1": ("zero1", []),
        "zero1, turned": ("zero1", [*SMALL, *GATHERED]),
        "zero2": ("zero2", []),
        "zero2, turned": ("zero2", [*SMALL, *GATHERED]),
        "zero3": ("zero3", []),
        "zero3, turned": ("zero3", [
            *SMALL, "strategy.prefetch_bucket_elements=1", "strategy.persistence_threshold_elements=0",
            "strategy.max_live_elements=0", "strategy.max_reuse_distance_elements=0", "strategy.sub_group_elements=60",
        ]),
        "zero3, turned up": ("zero3", [
            "strategy.persistence_threshold_elements=1000000", "strategy.sub_group_elements=1",
            "strategy.prefetch_bucket_elements=0",
        ]),
    },
    4: {
        "fsdp": ("fsdp", []),
        "fsdp, turned": ("fsdp", ["strategy.reshard_after_forward=2", "strategy.forward_prefetch_units=1"]),
        "fsdp_hybrid, turned": ("fsdp_hybrid", [
            "strategy.shard_size=4", "strategy.reshard_after_forward=2", "strategy.backward_prefetch_units=1",
        ]),
    },
}  # fmt: skip
TURNED = [(ranks, name) for ranks, cells in CELLS.items() for name in cells if ", turned" in name]


class Look(Callback):
    """What the engine has, in the words of the engine."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        if strategy.plan.zero_stage:
            self.engine = weakref.ref(strategy.engine)
            self.found = of_deepspeed(strategy.engine, strategy.plan.zero_stage)
        else:
            self.found = of_fsdp(pl_module)


def of_deepspeed(engine: Any, stage: int) -> dict[str, Any]:
    optimizer = engine.optimizer
    found = {"reduce_bucket_size": optimizer.reduce_bucket_size, "overlap_comm": engine.zero_overlap_comm()}
    if stage < 3:
        return found | {"allgather_bucket_size": optimizer.allgather_bucket_size}
    offload = optimizer.parameter_offload
    coordinator = offload.get_param_coordinator()
    private = "_PartitionedParameterCoordinator__"
    return found | {
        "prefetch_bucket_size": getattr(coordinator, f"{private}prefetch_bucket_sz"),
        "param_persistence_threshold": offload.param_numel_persistence_threshold,
        "max_live_parameters": getattr(coordinator, f"{private}max_n_available_params"),
        "max_reuse_distance": getattr(coordinator, f"{private}max_reuse_dist_in_numel"),
        "sub_group_size": optimizer.sub_group_size,
        "sub_groups": len(optimizer.fp32_partitioned_groups_flat),
        "kept": len(optimizer.persistent_parameters),
    }


def of_fsdp(module: LightningModule) -> dict[str, Any]:
    layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, FSDPModule)]  # the root, then units
    number = {id(layer._get_fsdp_state()): i for i, layer in enumerate(layers)}
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in layers[1:]]
    return {
        "forward": [[number[id(s)] for s in la._get_fsdp_state()._states_to_forward_prefetch] for la in layers],
        "backward": [[number[id(s)] for s in la._get_fsdp_state()._states_to_backward_prefetch] for la in layers],
        "group_sizes": [group.post_forward_mesh_info.shard_mesh_size for group in groups],
        "process_groups": len({id(group.post_forward_mesh_info.shard_process_group) for group in groups}),
    }


def train(folder: Path, ranks: int) -> dict[str, Any]:
    """In each rank: every strategy as it is, and with its knobs turned."""
    found: dict[str, Any] = {}
    for number, (name, (strategy, knobs)) in enumerate(CELLS[ranks].items()):
        look, cell = Look(), Cell(strategy, "fp32", "adamw", 2, CLIP, True)
        plan = plan_of(cell, ranks, folder / str(number), more=[*knobs, "max_steps=5"])
        found[name] = fit(plan, look) | {"engine": look.found}
        engine = look.engine if plan.zero_stage else None
        del look  # it has been given the trainer
        gc.collect()
        found[name]["stays"] = engine is not None and engine() is not None
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return {n: spawn(n, train, tmp_path_factory.mktemp(f"ranks{n}"), n)[0] for n in CELLS}


@pytest.mark.parametrize(("ranks", "name"), TURNED)
def test_the_knobs_change_no_number(runs: dict[int, Any], ranks: int, name: str) -> None:
    usual, turned = runs[ranks]["fsdp" if "fsdp" in name else name.partition(",")[0]], runs[ranks][name]
    if "fsdp" in name:
        assert turned["losses"] == usual["losses"] and turned["norms"] == usual["norms"]
        assert all(torch.equal(turned["final"][name], tensor) for name, tensor in usual["final"].items())
    else:  # ZeRO-3 adds up the norm sub-group by sub-group
        off = update_deviation(usual["start"], turned["final"], usual["final"])
        assert max(off.values()) <= 1e-5, off
        assert turned["losses"] == pytest.approx(usual["losses"], rel=1e-6)


def test_fsdp_gathers_ahead_what_it_is_told_to(runs: dict[int, Any]) -> None:
    usual, turned = (runs[2][name]["engine"] for name in ("fsdp", "fsdp, turned"))
    assert usual["forward"] == usual["backward"] == [[]] * 4
    assert turned["forward"] == [[1, 2], [2, 3], [3], []]
    assert turned["backward"] == [[3, 2], [], [1], [2, 1]]


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_hybrid"])
def test_fsdp_keeps_shards_of_smaller_groups(runs: dict[int, Any], strategy: str) -> None:
    usual, turned = (runs[4][name]["engine"] for name in ("fsdp", f"{strategy}, turned"))
    assert usual["group_sizes"] == [4, 4, 4]
    assert turned["group_sizes"] == [2, 2, 2]
    assert turned["process_groups"] == 1, "each needs memory of NCCL's: all units share one"


def test_deepspeed_has_what_it_is_told(runs: dict[int, Any]) -> None:
    engine = {name: run["engine"] for name, run in runs[2].items() if name.startswith("zero")}
    for stage in ("zero1", "zero2"):
        bucket = {"reduce_bucket_size": 25_000_000, "overlap_comm": False, "allgather_bucket_size": 25_000_000}
        assert engine[stage] == bucket
        assert engine[f"{stage}, turned"] == bucket | {"reduce_bucket_size": 50, "allgather_bucket_size": 6}
    usual, turned = engine["zero3"], engine["zero3, turned"]
    assert {key: usual[key] for key in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters",
                                        "max_reuse_distance", "sub_group_size", "sub_groups")} == {
        "prefetch_bucket_size": 50_000_000, "param_persistence_threshold": 100_000,
        "max_live_parameters": 1_000_000_000, "max_reuse_distance": 1_000_000_000, "sub_group_size": 1_000_000_000,
        "sub_groups": 2,
    }  # fmt: skip
    assert usual["kept"] > 0 == turned["kept"]
    assert turned["reduce_bucket_size"] == 50 and turned["prefetch_bucket_size"] == 1
    assert turned["param_persistence_threshold"] == turned["max_live_parameters"] == turned["max_reuse_distance"] == 0
    assert turned["sub_group_size"] == 60 and turned["sub_groups"] > 4
    assert engine["zero3, turned up"]["kept"] > turned["kept"]


def test_an_engine_of_deepspeed_goes_with_its_run(runs: dict[int, Any]) -> None:
    """Its weights and optimizer state would stay beside what the process runs next."""
    assert not [name for name, found in runs[2].items() if found["stays"]]


@pytest.mark.parametrize(
    ("kind", "word", "said"),
    [
        ("ByHand", "units=null", "strategy.backward_prefetch_units=2: ByHand optimizes by hand"),
        ("ConvNet", "units=[]", "layers that repeat are gathered ahead, and ConvNet has none: leave it out, or name"),
    ],
)  # fmt: skip
def test_what_cannot_be_gathered_ahead_is_refused(tmp_path: Path, kind: str, word: str, said: str) -> None:
    plan = plan_for_module(tmp_path / "run", kind, 2, "strategy=fsdp", *AHEAD, word, "global_batch_size=8")
    module = build_module(plan)
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_prefetch(module, units_for(module, plan)[0], plan)


def go_on(folder: Path) -> dict[str, Any]:
    """In each rank: ZeRO-3 without a stop, and stopped and resumed with other knobs."""

    def run(name: str, steps: int, *words: str) -> dict[str, Any]:
        return fit(plan_for(folder / name, 2, steps, "strategy=zero3", "precision=bf16", *words))

    straight = run("straight", STEPS)
    run("stopped", STOP, "strategy.sub_group_elements=100000", "strategy.persistence_threshold_elements=0")
    saved = folder / "stopped" / "checkpoints" / f"step-{STOP:08d}.ckpt"
    more = ["strategy.sub_group_elements=300000", "strategy.persistence_threshold_elements=10000000"]
    return {"straight": straight, "resumed": run("stopped", STEPS, *more, f"resume={saved}")}


def test_a_run_goes_on_with_other_sub_groups(tmp_path: Path) -> None:
    found = spawn(2, go_on, tmp_path)[0]
    straight, resumed = found["straight"], found["resumed"]
    assert resumed["losses"] == pytest.approx(straight["losses"], rel=1e-5)
    assert max(update_deviation(straight["start"], resumed["final"], straight["final"]).values()) <= 1e-3


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_plan_that_was_written_before_has_the_usual_knobs(tmp_path: Path, strategy: str) -> None:
    plan = plan_for(tmp_path / "run", 2, STEPS, f"strategy={strategy}")
    written = json.loads(plan.to_json())
    later = ("_units", "_elements", "overlap_comm", "pipeline_schedule", "pipeline_chunks", "pipeline_split", "_method",
             "symmetric_memory")  # fmt: skip
    for word in [word for word in written["strategy"] if word.endswith(later)]:
        del written["strategy"][word]
    assert len(written["strategy"]) == 8
    assert Plan.from_json(json.dumps(written)) == plan
