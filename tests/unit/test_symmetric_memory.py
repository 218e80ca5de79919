"""When `strategy.symmetric_memory` is used, and what is said where it cannot be."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from shardwise.config.groups import (
    CompileConfig,
    DdpConfig,
    Dtype,
    FsdpConfig,
    FsdpHybridConfig,
    PrecisionConfig,
    StrategyConfig,
)
from shardwise.errors import ConfigError
from shardwise.plan.groups import overlaps_tensor_axis, uses_symmetric_memory
from shardwise.plan.topology import Topology, make_topology

NODE = make_topology("fsdp", 1, 8)
FSDP: dict[str, Any] = {"symmetric_memory": None}
EAGER, LAYERS = CompileConfig(), CompileConfig(name="layer")
PARTS = make_topology("fsdp", 1, 2, tensor=2)  # every rank has all that it needs of the weights


@pytest.mark.parametrize(
    ("config", "topology", "accelerator", "used"),  # None: the set-up tries it
    [
        (FsdpConfig(), NODE, "cuda", False),
        (FsdpConfig(symmetric_memory=True), NODE, "cuda", True),
        (FsdpConfig(**FSDP), NODE, "cuda", None),
        (FsdpConfig(**FSDP), NODE, "cpu", False),
        (FsdpConfig(**FSDP), make_topology("fsdp", 2, 8), "cuda", False),
        (FsdpConfig(**FSDP), make_topology("fsdp", 1, 1), "cuda", False),
        (FsdpConfig(**FSDP), make_topology("fsdp", 1, 2, tensor=2), "cuda", False),
        (FsdpConfig(**FSDP), make_topology("fsdp", 2, 8, pipeline=2), "cuda", None),
        (FsdpConfig(**FSDP), make_topology("fsdp", 1, 2, context=2), "cuda", None),
        (FsdpConfig(**FSDP, reshard_after_forward=2), NODE, "cuda", False),
        (FsdpConfig(**FSDP, defer_gradient_sync=True), NODE, "cuda", False),
        (FsdpHybridConfig(**FSDP), make_topology("fsdp_hybrid", 4, 8), "cuda", None),
        (FsdpHybridConfig(**FSDP), make_topology("fsdp_hybrid", 4, 8, 16), "cuda", False),
        (DdpConfig(), NODE, "cuda", False),
    ],
)
def test_it_is_used_where_it_can_be(
    config: StrategyConfig, topology: Topology, accelerator: str, used: bool | None
) -> None:
    assert uses_symmetric_memory(config, PrecisionConfig(), EAGER, topology, accelerator) is used


@pytest.mark.parametrize(
    ("more", "topology", "accelerator", "said"),
    [
        ({}, NODE, "cpu", "accelerator=cpu: it is memory of NVIDIA GPUs; leave it out"),
        ({}, make_topology("fsdp", 1, 1), "cuda", "there is nothing to exchange; leave it out"),
        ({}, PARTS, "cuda", "compile=none: parts of a sequence are .*; use compile=layer, or .*symmetric_memory=false"),
        ({"reshard_after_forward": 2}, NODE, "cuda", "strategy.reshard_after_forward=2: .* use true or false"),
        ({"defer_gradient_sync": True}, NODE, "cuda", "strategy.defer_gradient_sync=true: .* leave one of them out"),
        ({}, make_topology("fsdp", 2, 8), "cuda", "the 16 ranks .* on several nodes of 8 devices.*=fsdp_hybrid"),
    ],
)
def test_what_cannot_be_is_one_message(more: dict[str, Any], topology: Topology, accelerator: str, said: str) -> None:
    config = FsdpConfig(symmetric_memory=True, **more)
    with pytest.raises(ConfigError, match=f"strategy.symmetric_memory=true.*{said}"):
        uses_symmetric_memory(config, PrecisionConfig(), EAGER, topology, accelerator)


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_gradients_are_reduced_in_two_dtypes(dtype: Dtype) -> None:
    """In others FSDP2 divides before and after it adds up."""
    precision, can = PrecisionConfig(reduce_dtype=dtype), dtype in ("float32", "bfloat16")
    assert uses_symmetric_memory(FsdpConfig(**FSDP), precision, EAGER, NODE, "cuda") is (None if can else False)
    if not can:
        with pytest.raises(ConfigError, match=f"precision.reduce_dtype={dtype}: gradients are reduced in"):
            uses_symmetric_memory(FsdpConfig(symmetric_memory=True), precision, EAGER, NODE, "cuda")


@pytest.mark.parametrize(
    ("asked", "compiling", "topology", "accelerator", "overlaps", "exchanges_weights"),
    [
        (True, LAYERS, PARTS, "cuda", True, False),
        (None, LAYERS, PARTS, "cuda", None, False),
        (None, LAYERS, make_topology("fsdp", 1, 8, tensor=2), "cuda", None, None),
        (None, LAYERS, make_topology("fsdp", 2, 8, tensor=2), "cuda", None, False),
        (None, EAGER, PARTS, "cuda", False, False),
        (False, LAYERS, PARTS, "cuda", False, False),
        (None, LAYERS, PARTS, "cpu", False, False),
        (True, LAYERS, make_topology("fsdp", 1, 8, tensor=2), "cuda", True, True),
        (True, EAGER, make_topology("fsdp", 1, 8, tensor=2), "cuda", False, True),
        (True, LAYERS, NODE, "cuda", False, True),
    ],
)
def test_the_compiler_overlaps_what_a_tensor_axis_exchanges(
    asked: bool | None,
    compiling: CompileConfig,
    topology: Topology,
    accelerator: str,
    overlaps: bool | None,
    exchanges_weights: bool | None,
) -> None:
    config, usual = FsdpConfig(symmetric_memory=asked), PrecisionConfig()
    assert overlaps_tensor_axis(config, usual, compiling, topology, accelerator) is overlaps
    assert uses_symmetric_memory(config, usual, compiling, topology, accelerator) is exchanges_weights


def test_products_in_fp8_do_not_overlap() -> None:
    fp8 = PrecisionConfig(name="fp8")
    assert overlaps_tensor_axis(FsdpConfig(**FSDP), fp8, LAYERS, PARTS, "cuda") is False
    with pytest.raises(ConfigError, match="strategy.symmetric_memory=true precision=fp8: parts of a sequence"):
        uses_symmetric_memory(FsdpConfig(symmetric_memory=True), fp8, LAYERS, PARTS, "cuda")
