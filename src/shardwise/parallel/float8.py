"""`precision=fp8`: the matrix products of large linear layers in fp8, by torchao, which only this file imports.

A layer stays what it is, and only its forward is another: its name, its weight and its initial values are as in bf16,
and so are checkpoints. Each product casts what it multiplies to fp8, with scales that are made from the largest value
of a matrix (`tensorwise`) or of each of its rows (`rowwise`). With `tensorwise` a weight is cast from the fp32 master,
under fsdp before it is gathered, with a scale of the whole weight; with `rowwise` from its copy in bf16. Where tensor
parallelism divides a layer, all of this holds for each rank's part of it, which is a matrix like any other.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch._aot_autograd.graph_capture_wrappers import set_partitioner_tag_must_be_in_backward
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.traceback import has_preserved_node_meta
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import e4m3_dtype
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from shardwise.config.groups import Float8Config
from shardwise.distributed.dtensor import shard_groups
from shardwise.distributed.mesh import largest_over
from shardwise.errors import ConfigError, class_name, count, did_you_mean
from shardwise.plan.hardware import USUAL

_TILE = 16  # the products' kernels take matrices whose sizes are multiples of it


class Float8Layers:
    """The layers of one module that multiply in fp8.

    `divided`: names of layers of whose weights each of `ranks` ranks will have a part → the dim that is divided.

    Raises:
        ConfigError: no layer can, a rank's part of one cannot, or `keep_in_bf16` names a layer that is not there.
    """

    def __init__(
        self, root: nn.Module, fp8: Float8Config, divided: Mapping[str, int] = MappingProxyType({}), ranks: int = 1
    ) -> None:
        self.fp8 = fp8
        self.layers: list[nn.Linear] = []
        self.kept: dict[str, list[str]] = {}  # reason → names of the linear layers that stay in bf16 for it
        uses = Counter(id(p) for m in root.modules() for p in m._parameters.values() if p is not None)
        linear = {name: layer for name, layer in root.named_modules() if isinstance(layer, nn.Linear)}
        _check_names(fp8.keep_in_bf16, list(linear))
        for name, layer in linear.items():
            if (reason := _why_not(name, layer, fp8, uses, divided.get(name), ranks)) is None:
                self.layers.append(layer)
            else:
                self.kept.setdefault(reason, []).append(name)
        if not self.layers:
            lower = "lower precision.fp8.min_features, or " if any(r.startswith("fewer") for r in self.kept) else ""
            raise ConfigError(
                f"precision=fp8: no linear layer of {class_name(root)} can multiply in fp8 "
                f"({self._kept_words() or 'it has none'}); {lower}use precision=bf16"
            )
        self.share = sum(layer.weight.numel() for layer in self.layers) / sum(p.numel() for p in root.parameters())
        self._weights: list[_ShardedWeight] = []  # those that FSDP2 gathers in fp8
        self._groups: Sequence[dist.ProcessGroup] = []  # the ranks that share them
        self._refreshes = True  # whether their scales are computed together, before they are gathered

    def __str__(self) -> str:
        every = len(self.layers) + sum(map(len, self.kept.values()))
        kept = f"; in bf16: {words}" if (words := self._kept_words()) else ""
        return (
            f"fp8, {self.fp8.recipe}: {len(self.layers)} of {count(every, 'linear layer')}, {self.share:.1%} of the "
            f"parameters{kept}"
        )

    def _kept_words(self) -> str:
        return ", ".join(
            f"{names[0] if len(names) == 1 else count(len(names), 'layer')} ({reason})"
            for reason, names in self.kept.items()
        )

    def compute(self) -> None:
        """Let the forward of these layers multiply in fp8."""
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(self.fp8.recipe), emulate=self.fp8.emulate)
        # There is nothing to convert in here, but torchao mends torch.compile's fp8 kernels when it is asked to.
        convert_to_float8_training(nn.Identity(), config=config)
        for layer in self.layers:
            layer.fp8_product = product = _product_of(layer, config)  # type: ignore[assignment]
            layer.forward = _with_bias(layer, product)  # type: ignore[method-assign, assignment]

    def cast_from_master(self, parameter: nn.Parameter) -> bool:
        """Whether these layers cast `parameter` to fp8 themselves, so that it needs no copy in bf16."""
        return self.fp8.recipe == "tensorwise" and any(parameter is layer.weight for layer in self.layers)

    def gather(self, *, change_within_steps: bool) -> None:
        """Let FSDP2, which has sharded the layers, gather their weights in fp8, if a weight has one scale.

        `change_within_steps`: weights may change between two forward passes of a step, so that each scale is computed
        when its weight is gathered.
        """
        self._refreshes = not change_within_steps
        if self.fp8.recipe == "tensorwise":
            config = _mm_config(dataclasses.replace(Float8LinearConfig(), emulate=self.fp8.emulate))
            own = [layer.weight for layer in self.layers if not layer.weight.is_meta]  # not on other stages
            self._weights = [_ShardedWeight(weight, config) for weight in own]
            self._groups = shard_groups(own[0]) if own else []

    @torch.no_grad()
    def refresh_scales(self) -> None:
        """Compute the scales of all sharded weights, as they are now, with one reduction. Collective."""
        if not (self._weights and self._refreshes):
            return
        shards = [weight.shard for weight in self._weights]
        present = [shard for shard in shards if shard.numel()]
        norms = iter(torch._foreach_norm(present, torch.inf) if present else ())
        largest = torch.stack([next(norms) if shard.numel() else shard.new_zeros(()) for shard in shards])
        for group in self._groups:
            largest_over(group, largest)
        # Compiled code would copy a scale whose address is not a multiple of 16 bytes.
        aligned = largest.new_empty(len(shards), 4)
        aligned[:, 0] = amax_to_scale(largest, e4m3_dtype)
        for weight, scale in zip(self._weights, aligned[:, 0].unbind(), strict=True):
            weight.scale = scale


def _check_names(patterns: tuple[str, ...], names: list[str]) -> None:
    for pattern in patterns:
        if pattern not in USUAL and not any(_is_named(name, pattern) for name in names):
            last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
            raise ConfigError(
                f"precision.fp8.keep_in_bf16: {pattern} is the name of no linear layer; there are "
                f"{', '.join(last[:8])}{' and others' if len(last) > 8 else ''}{did_you_mean(pattern, last)}"
            )


def _is_named(name: str, pattern: str) -> bool:
    """Whether `pattern` stands for the whole name of a layer or for its last part."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _why_not(
    name: str, layer: nn.Linear, fp8: Float8Config, uses: Counter[int], dim: int | None, ranks: int
) -> str | None:
    """Why `layer` stays in bf16; None: it does not. `dim`: that of its weight which `ranks` ranks divide.

    Raises:
        ConfigError: the whole layer could multiply in fp8, and a rank's part of it cannot.
    """
    own_way = type(layer).forward is not nn.Linear.forward or isinstance(layer, NonDynamicallyQuantizableLinear)
    if own_way or "weight" not in layer._parameters:  # such as attention's, which computes with the weight itself
        return "computes in its own way"
    if any(_is_named(name, pattern) for pattern in fp8.keep_in_bf16):
        return "keep_in_bf16"
    if uses[id(layer.weight)] > 1:
        return "its weight is another layer's too"
    sizes = [layer.out_features, layer.in_features]
    if dim is not None:
        whole, sizes[dim] = sizes[dim], sizes[dim] // ranks
    if min(sizes) < fp8.min_features:
        return f"fewer than {fp8.min_features} inputs or outputs{' on a rank' if dim is not None else ''}"
    if layer.out_features % _TILE or layer.in_features % _TILE:
        return f"sizes that are no multiples of {_TILE}"
    if dim is not None and whole % (_TILE * ranks):
        raise ConfigError(
            f"strategy.tensor_parallel_size={ranks} precision=fp8: {name} has {whole} {('outputs', 'inputs')[dim]}, "
            f"{whole / ranks:g} on each rank, and products in fp8 take multiples of {_TILE}: use a multiple of "
            f"{_TILE * ranks}, or name the layer in precision.fp8.keep_in_bf16"
        )
    return None


@torch._dynamo.allow_in_graph
class _Product(matmul_with_hp_or_float8_args):
    """torchao's product. The backward pass makes what it needs of the weight from the weight itself.

    Compiled, torchao's own may keep a transposed copy of the weight from the forward pass on, wherever the compiler
    does not see that the weight is a parameter, which is there anyway or is gathered once more.
    """

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with set_partitioner_tag_must_be_in_backward() if has_preserved_node_meta() else nullcontext():
            weight = _for_input_gradient(weight, ctx.config, ctx.linear_mm_config)
        instead = SimpleNamespace(saved_tensors=(x, weight), config=ctx.config, linear_mm_config=ctx.linear_mm_config)
        return matmul_with_hp_or_float8_args.backward(instead, gradient)


def _for_input_gradient(weight: Any, config: Float8LinearConfig, mm_config: Any) -> Float8TrainingTensor:
    """The transposed `weight` in fp8, laid out as the product with the gradient takes it."""
    how = config.cast_config_weight_for_grad_input
    if not isinstance(weight, Float8TrainingTensor):
        weight = hp_tensor_to_float8_dynamic(
            weight,
            how.target_dtype,
            mm_config,
            gemm_input_role=GemmInputRole.WEIGHT,
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(-1, how.scaling_granularity),
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )
    return Float8TrainingTensor(
        weight._data.contiguous(),
        weight._scale,
        weight._orig_dtype,
        mm_config,
        gemm_input_role=GemmInputRole.WEIGHT,
        axiswise_dim=weight._axiswise_dim,
    )


def _mm_config(config: Float8LinearConfig) -> Any:
    """What torchao's products are told besides, which it makes in its own layer."""
    return Float8Linear(_TILE, _TILE, bias=False, device="meta", config=config).linear_mm_config


def _product_of(layer: nn.Linear, config: Float8LinearConfig) -> Callable[[Tensor], Tensor]:
    mm_config = _mm_config(config)

    def product(x: Tensor) -> Tensor:
        shape = x.shape
        x = x.to(torch.bfloat16).reshape(-1, shape[-1])  # as autocast does, which does not know this product
        rows = x.shape[0]
        if missing := max(_TILE, -(-rows // _TILE) * _TILE) - rows:
            x = F.pad(x, (0, 0, 0, missing))  # zeros change neither a scale nor a product
        out: Tensor = _Product.apply(x, layer.weight.t(), mm_config, config)
        return out[:rows].reshape(*shape[:-1], out.shape[-1])

    return product


def _with_bias(layer: nn.Linear, product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        out = product(x)
        return out if layer.bias is None else out + layer.bias.to(out.dtype)

    return forward


class _ShardedWeight:
    """This rank's part of a weight: what FSDP2 asks to gather it in fp8.

    The part itself is a plain tensor in fp32, so that optimizers and checkpoints do not know of it.
    """

    def __init__(self, weight: Tensor, mm_config: Any) -> None:
        shard = cast(DTensor, weight)._local_tensor  # FSDP2 looks for the methods on this very object
        self._shard = weakref.ref(shard)
        self.mm_config = mm_config
        self.scale: Tensor | None = None  # of the whole weight; None: it is computed when the weight is gathered
        hooks: Any = shard
        hooks.fsdp_pre_all_gather, hooks.fsdp_post_all_gather = self.cast, self.wrap

    @property
    def shard(self) -> Tensor:
        shard = self._shard()
        assert shard is not None, "FSDP2 has replaced the shard of a weight"
        return shard.detach()

    def cast(
        self, mesh: DeviceMesh, size: torch.Size, stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """What this rank sends: its rows in fp8, as bytes, padded to the size that every rank sends."""
        scale, shard = self.scale, self.shard
        if scale is None:
            largest = shard.abs().max() if shard.numel() else shard.new_zeros(())
            scale = amax_to_scale(largest_over(mesh.get_group(), largest), e4m3_dtype)
        rows = to_fp8_saturated(shard * scale, e4m3_dtype).view(torch.uint8)
        if missing := -(-size[0] // mesh.size()) - len(rows):
            rows = F.pad(rows, (0, 0, 0, missing))
        return (rows,), (scale,)

    def wrap(
        self,
        gathered: tuple[Tensor],
        scale: tuple[Tensor],
        dtype: torch.dtype,
        *,
        out: Float8TrainingTensor | None = None,
    ) -> tuple[Float8TrainingTensor, tuple[Tensor]] | None:
        """The gathered weight as torchao's products take it. `out`: the one of before, which has the same memory."""
        if out is not None:
            out._scale = scale[0]
            return None
        weight = Float8TrainingTensor(
            gathered[0].view(e4m3_dtype), scale[0], dtype, self.mm_config, gemm_input_role=GemmInputRole.WEIGHT
        )
        return weight, gathered
