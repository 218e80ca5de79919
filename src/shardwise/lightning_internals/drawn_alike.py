"""What is drawn at random for weights is the same on all ranks that have a copy of them.

Each rank has random streams of its own, so that dropout differs between ranks. Noise that a hook adds to weights or
gradients, or that an optimizer draws in its step, would make copies of the weights different models. So such code draws
from other streams: they depend on the seed, the hook and the number of batches, and a run that goes on draws the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from shardwise.distributed.rng import derived_seed, random_state, seed_streams, set_random_state

OF_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "on_before_zero_grad")
_DRAW_NOTHING = ("torch.optim.", "shardwise.", "deepspeed.")  # in their steps


@contextmanager
def drawn_alike(trainer: Any, purpose: str, *, whole: bool) -> Iterator[None]:
    """Draw from the streams for `purpose` inside. `whole`: for whole weights, else for what this rank has of them."""
    strategy = trainer.strategy
    copies = strategy.plan.topology.groups(("replicate",))  # each of ranks that have the same parts of weights
    part = 0 if whole else next(ranks[0] for ranks in copies if strategy.global_rank in ranks)
    before = random_state(strategy.root_device)
    batches = trainer.fit_loop.total_batch_idx + 1
    seed_streams(derived_seed(strategy.plan.seed, purpose, part, batches, trainer.global_step))
    try:
        yield
    finally:
        set_random_state(before, strategy.root_device)


def draw_alike_in_steps(trainer: Any) -> None:
    """Let optimizers of the user's draw alike in their steps."""
    for number, optimizer in enumerate(trainer.strategy.optimizers):
        if isinstance(optimizer, Optimizer) and not type(optimizer).__module__.startswith(_DRAW_NOTHING):
            _watch(trainer, optimizer, f"step of optimizer {number}")


def _watch(trainer: Any, optimizer: Optimizer, purpose: str) -> None:
    inside: list[Any] = []

    def begin(*_: Any) -> None:
        inside.append(drawn_alike(trainer, purpose, whole=False))
        inside[-1].__enter__()

    def end(*_: Any) -> None:
        inside.pop().__exit__(None, None, None)

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)
