"""`strategy.symmetric_memory` on a tensor axis: exchanges stand beside products, and numbers are the same."""

from __future__ import annotations

import dataclasses
import io
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._inductor.fx_passes import micro_pipeline_tp
from torch.distributed import _symmetric_memory

from shardwise.plan import Plan
from shardwise.strategies import fsdp_sharding, fsdp_symmetric_memory
from tests.harness.cells import cell_plan, fit
from tests.harness.processes import spawn
from tests.harness.shared_file import NOTICE, RefusedOnRankOne, SharedFile

WORDS = ["max_steps=3", "checkpoint=none", "global_batch_size=4", "strategy=fsdp",
         "strategy.tensor_parallel_size=2", "compile=layer", "model.n_layers=2", "model.n_heads=4", "model.ffn_dim=48",
         "model.n_kv_heads=2"]  # fmt: skip


def overlapping(plan: Plan, name: str, asked: bool | None) -> Plan:
    folder = Path(plan.run_dir).with_name(name)
    folder.mkdir(exist_ok=True)
    return dataclasses.replace(
        plan, run_dir=str(folder), compile=dataclasses.replace(plan.compile, overlaps_peers=asked)
    )


def train(folder: Path, micro: int, asked: bool | None = True, buffer: type[SharedFile] = SharedFile) -> dict[str, Any]:
    """In each rank: the same run twice. torch's operations are for GPUs; here they do one thing after the other."""
    plan = cell_plan(folder / "usual", 2, *WORDS, f"micro_batch_size={micro}")
    usual = fit(plan)
    operations = torch.library.Library("symm_mem", "IMPL")
    operations.impl("fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    operations.impl("fused_matmul_reduce_scatter", _symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    with ExitStack() as stack:
        stack.enter_context(_symmetric_memory._test_mode())
        stack.enter_context(patch.object(torch.distributed, "is_nccl_available", lambda: True))
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True))
        stack.enter_context(patch.object(fsdp_symmetric_memory, "SymmetricBuffer", buffer))
        groups = stack.enter_context(patch.object(fsdp_sharding, "let_compiler_copy"))
        made = {
            name: stack.enter_context(
                patch.object(micro_pipeline_tp, name, side_effect=getattr(micro_pipeline_tp, name), autospec=True)
            )
            for name in ("_insert_fused_all_gather_matmul", "_insert_fused_matmul_reduce_scatter")
        }
        out = stack.enter_context(redirect_stdout(io.StringIO()))
        found = fit(overlapping(plan, "overlapping", asked))
    return {
        "usual": usual,
        "found": found,
        "said": [line for line in out.getvalue().splitlines() if "symmetric_memory" in line],
        "groups": [call.args[0].size() for call in groups.call_args_list],
        "products of gathers": [len(call.args[1]) for call in made["_insert_fused_all_gather_matmul"].call_args_list],
        "scatters": made["_insert_fused_matmul_reduce_scatter"].call_count,
    }


@pytest.mark.parametrize("micro", [1, 2])
def test_the_exchanges_of_a_layer_stand_beside_its_products(tmp_path: Path, micro: int) -> None:
    """Forward: all four. Backward: the two gathers; the two sums are of several products.

    Of one sample each rank has a part of the sequence, and of two a sample.
    """
    first = spawn(2, train, tmp_path, micro)[0]
    assert first["groups"] == [2]
    assert sorted(first["products of gathers"]) == [1, 1, 2, 3] and first["scatters"] == 2
    assert not first["said"]
    check_bits(first)


def check_bits(first: dict[str, Any]) -> None:
    usual, found = first["usual"], first["found"]
    assert found["losses"] == usual["losses"] and found["norms"] == usual["norms"]
    assert all(torch.equal(found["final"][name], tensor) for name, tensor in usual["final"].items())


def test_ranks_that_cannot_share_memory_are_compiled_without_it(tmp_path: Path) -> None:
    both = spawn(2, train, tmp_path, 1, None, RefusedOnRankOne)
    assert [found["said"] for found in both] == [[NOTICE], []]
    for found in both:
        assert (found["groups"], found["products of gathers"], found["scatters"]) == ([], [], 0)
    check_bits(both[0])
