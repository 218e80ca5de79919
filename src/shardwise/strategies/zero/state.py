"""A rank's parts of parameters and optimizer state under DeepSpeed: flat ranges of fp32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from shardwise.checkpoint.dcp import range_of, slice_of
from shardwise.checkpoint.optimizers import as_tensor
from shardwise.checkpoint.state import ParameterShard, make_like, restore
from shardwise.errors import ConfigError, first_of
from shardwise.protocols import state_maker_of
from shardwise.strategies.sharded_state import DTensorState
from shardwise.strategies.zero.internals import count_elements, finish_writes


class ZeroState(DTensorState):
    """The `ShardedState` of a DeepSpeed engine. Without training there are no masters, only the module's parameters.

    `before_refresh`: called before changed masters are copied into the weights that the module computes with.
    """

    engine_optimizer: Any  # DeepSpeed's, which wraps the module's

    def __init__(self, module: LightningModule, zero_stage: int, before_refresh: Callable[[], None]) -> None:
        super().__init__(module, lambda: [self._base])
        self.zero_stage, self.before_refresh = zero_stage, before_refresh
        self._names: list[list[str]] = []  # the parameters in each group of the optimizer
        self._trained: set[str] = set()  # those of them that have masters: the others were frozen at the set-up

    def use(self, engine_optimizer: Any, names: list[list[str]]) -> None:
        """Use `engine_optimizer`. `names`: those of the parameters in each of its groups."""
        self.engine_optimizer, self._names = engine_optimizer, names
        needs = {name for name, p in self.module.named_parameters() if p.requires_grad and count_elements(p)}
        self._trained = {name for group in names for name in group} & needs

    @property
    def is_training(self) -> bool:
        return bool(self.module.trainer.state.fn == TrainerFn.FITTING)

    def master_parts(self) -> Iterator[tuple[str, int, Tensor]]:
        """The name, first element and storage of this rank's flat range of every trainable fp32 master."""
        trained = self.trained_names()
        for name, p in self.module.named_parameters():
            if name not in trained:
                continue
            if self.zero_stage == 3:
                storage, _ = self.engine_optimizer._get_fp32_opt_state_partition(p, release_swap_buffers=False)
                start = storage.numel() * dist.get_rank()
                inside = min(storage.numel(), p.ds_numel - start)  # type: ignore[attr-defined]
                if inside > 0:  # the rest is padding
                    yield name, start, storage.detach()[:inside]
            elif p._hp_mapping is not None:  # type: ignore[attr-defined]
                yield name, p._hp_mapping.lp_fragment_address.start, p._hp_mapping.hp_fragment.detach()  # type: ignore[attr-defined]

    def trained_names(self) -> set[str]:
        """The names of the parameters of which DeepSpeed's optimizer has masters."""
        return self._trained

    def master_shards(self) -> dict[str, Tensor]:
        return {name: part for name, _, part in self.master_parts()}

    def _parts(self, names: set[str]) -> dict[str, Tensor]:
        return {name: part for name, part in self.master_shards().items() if name in names}

    def refresh_low_precision_copies(self) -> None:
        if not self.is_training:
            return
        self.before_refresh()
        optimizer = self.engine_optimizer
        if self.zero_stage < 3:
            optimizer.update_lp_params()
            return
        # As in its step: what an evaluation left gathered, for a backward pass that does not come, is gathered anew.
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        finish_writes(optimizer)

    def full_parameters(self) -> dict[str, Tensor]:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        whole: dict[str, Tensor] = {}
        trained = self.trained_names()
        for name, p in self.module.named_parameters():
            if name in trained:
                is_trained_now = p.requires_grad
                p.requires_grad_(True)  # DeepSpeed finds no master of a weight that a hook has frozen
                master = safe_get_full_fp32_param(p).detach().cpu().clone()
                p.requires_grad_(is_trained_now)
                # With bf16_true it gives fp32 copies of bf16 masters.
                whole[name] = master.view(getattr(p, "ds_shape", p.shape)).to(self.flats[0].dtype)
            else:
                with GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                    whole[name] = p.detach().cpu().clone()
        return whole

    def parameter_shards(self) -> Iterator[ParameterShard]:
        masters = {name: (start, part) for name, start, part in self.master_parts()} if self.is_training else {}
        trained = self.trained_names()
        for name, p in self.module.named_parameters():
            shape = tuple(getattr(p, "ds_shape", p.shape))
            if name in trained and self.is_training:
                if name in masters:
                    start, part = masters[name]
                    yield ParameterShard(name, shape, part, partial(range_of, shape, start), True)
            elif hasattr(p, "ds_tensor"):
                flat = p.ds_tensor.data.view(-1)
                start = flat.numel() * dist.get_rank()
                if (inside := min(flat.numel(), p.ds_numel - start)) > 0:  # type: ignore[attr-defined]
                    yield ParameterShard(name, shape, flat[:inside], partial(range_of, shape, start), False)
            else:
                yield ParameterShard(name, shape, p.detach(), partial(slice_of, p), False)

    def optimizer_state(self, shard: ParameterShard) -> tuple[int, dict[str, Tensor]]:
        flat, start = self._flat_of(shard.values)
        found = {}
        for key, value in self._base.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.numel() == flat.numel() and value.ndim:
                found[key] = value.view(-1)[start : start + shard.values.numel()]
            elif isinstance(value, Tensor):
                found[key] = value.to(torch.float32)
            elif isinstance(value, (int, float)):  # DeepSpeed's Adam has a Python counter
                found[key] = as_tensor(value)
        return 0, found

    def allocate_optimizer_state(
        self, shard: ParameterShard, known: dict[str, TensorStorageMetadata], *, same_dtype: bool
    ) -> dict[str, Tensor]:
        flat, start = self._flat_of(shard.values)
        state = self._base.state[flat]
        if not state and (make := state_maker_of(self._base)) is not None:
            state.update(make(flat.detach()))
        fused = bool(self._base.defaults.get("fused") or self._base.defaults.get("capturable"))
        for key, metadata in known.items():
            if not isinstance(state.get(key), Tensor):
                state[key] = make_like(
                    shard, flat, key, metadata, flat.device if fused else torch.device("cpu"), same_dtype=same_dtype
                )
        end = start + shard.values.numel()
        return {key: state[key].view(-1)[start:end] if state[key].ndim else state[key] for key in known}

    def _flat_of(self, part: Tensor) -> tuple[Tensor, int]:
        """The flat master that has `part` in it, and the first element of `part` in it."""
        for flat in self.flats:
            start = (part.data_ptr() - flat.data_ptr()) // flat.element_size()
            if 0 <= start < flat.numel() and part.device == flat.device:
                return flat, start
        raise AssertionError("a part of a master that is in none of them")

    def load_tensors(
        self, folder: Path, metadata: Metadata, group: dist.ProcessGroup | None, *, optimizers: bool, average: bool
    ) -> None:
        if self.is_training:
            super().load_tensors(folder, metadata, group, optimizers=optimizers, average=average)
            if type(self._base).__name__ == "DeepSpeedCPUAdam":
                for state in self._base.state.values():
                    state["step"] = int(state.get("step", 0))
            return
        # Without an optimizer there are no masters. The 16-bit parameters get the values, or the averages of them.
        weights = "average" if average else "model"
        with torch.no_grad():
            restore(self, self.module, folder, metadata, group, optimizers=False, weights=weights)

    def module_optimizers(self) -> list[Optimizer]:
        return [self._base]

    def group_names(self) -> list[list[list[str]]]:
        return [self._names]

    def group_members(self, names: list[str]) -> list[nn.Parameter]:
        raise ConfigError(
            f"the checkpoint has a group of the optimizer that a hook had made ({first_of(names)}), and under "
            f"zero{self.zero_stage} DeepSpeed shards the groups of configure_optimizers and knows no others; use "
            f"strategy=fsdp or ddp"
        )

    def stepped_names(self) -> dict[int, str]:
        return {}

    @property
    def keeps_whole_weights(self) -> bool:
        return False

    @property
    def _base(self) -> Optimizer:
        """The torch optimizer inside DeepSpeed's."""
        base: Optimizer = self.engine_optimizer.optimizer
        return base

    @property
    def flats(self) -> list[Tensor]:
        """This rank's masters, as DeepSpeed holds them: some flat tensors."""
        optimizer = self.engine_optimizer
        for name in ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):  # ZeRO-3; ZeRO-1 in bf16
            if hasattr(optimizer, name):
                return list(getattr(optimizer, name))
        return list(optimizer.single_partition_of_fp32_groups)

    def held_memory(self) -> dict[str, list[Tensor]]:
        """The masters, and the buffers in which DeepSpeed holds gradients: none of them is a parameter's `.grad`."""
        optimizer = self.engine_optimizer
        held = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
        held += [getattr(optimizer, "grad_partitions_flat_buffer", None)]  # ZeRO-3
        held += getattr(optimizer, "averaged_gradients", {}).values()
        gradients = [tensor for one in held for tensor in (one if isinstance(one, list) else [one])]
        return {"optimizer": self.flats, "gradients": [tensor for tensor in gradients if tensor is not None]}
