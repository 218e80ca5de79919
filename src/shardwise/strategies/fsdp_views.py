"""Where code of the user's sees shards, writes into parts of them reach the shards (see distributed/views.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.distributed.parameters import is_hooked_behind_sums
from shardwise.distributed.views import WritableViews
from shardwise.lightning_internals.hook_names import runs_own_code
from shardwise.optim.clipping import has_hooks_of_others

_NOTHING = nullcontext()


class ShardsInHooks:
    """What is put around code of the user's, and taken away around what Lightning does inside it."""

    def __init__(self, module: LightningModule, refuse: Callable[[], None] | None) -> None:
        """`refuse`: called in front of a write into a part, and raises."""
        self.module, self.refuse = module, refuse
        self._modes: list[WritableViews | None] = []

    def around_hook(self, hook: str, around: AbstractContextManager[None] = _NOTHING) -> AbstractContextManager[None]:
        """What is put around a hook in which weights are not gathered, beside `around`."""
        return self.writable(around) if runs_own_code(hook, self.module) else around

    def around_step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """What is put around a step: an optimizer that has the shards may write into parts, and so may hooks on it."""
        has_shards = not hasattr(optimizer, "sharded_parameters")
        return self.writable() if has_shards or has_hooks_of_others(optimizer) else nullcontext()

    def watch_hooks(self, group: Any) -> None:
        """Let hooks behind the sums of gradients do so, which FSDP2 calls for this group of weights."""
        post_backward = group.post_backward

        def run(*args: Any) -> None:
            hooked = any(is_hooked_behind_sums(parameter.sharded_param) for parameter in group.fsdp_params)
            with self.writable() if hooked else _NOTHING:
                post_backward(*args)

        group.post_backward = run

    @contextmanager
    def writable(self, around: AbstractContextManager[None] = _NOTHING) -> Iterator[None]:
        """Inside, a write into a part of a shard is one into the weight or gradient."""
        mode = WritableViews(self.refuse)
        self._modes.append(mode)
        try:
            with around, mode:
                yield
        finally:
            self._modes.pop()
        lay_out_gradients(self.module)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, what runs is not the hook's own: operations take the time that they take without it."""
        mode: Any = self._modes[-1] if self._modes else None
        if mode is None:
            yield
            return
        self._modes.append(None)
        mode.__exit__(None, None, None)
        try:
            yield
        finally:
            mode.__enter__()
            self._modes.pop()


def lay_out_gradients(module: nn.Module) -> None:
    """Shard gradients as their weights are, where a hook has set others: `p.grad = p.grad.flip(0)`."""
    for p in module.parameters():
        gradient: Any = p.grad
        if isinstance(p, DTensor) and isinstance(gradient, DTensor) and gradient.placements != p.placements:
            p.grad = gradient.detach().redistribute(placements=p.placements)  # type: ignore[attr-defined]
