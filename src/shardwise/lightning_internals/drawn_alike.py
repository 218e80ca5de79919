"""What is drawn at random for weights is the same on all ranks that have a copy of them.

Each rank has random streams of its own, so that dropout differs between ranks. Noise that a hook adds to weights or
gradients, or that an optimizer draws in its step, would make copies of the weights different models. So such code draws
from other streams. They depend on the seed, the hook and the number of batches: a run that goes on draws the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from shardwise.distributed.rng import derived_seed, random_state, seed_streams, set_random_state

_EVALUATION = ("on_validation", "on_test", "on_predict")  # their hooks draw for samples, which differ between ranks
_DRAW_NOTHING = ("torch.optim.", "shardwise.", "deepspeed.")  # in their steps


def is_of_training(hook: str) -> bool:
    return not hook.startswith(_EVALUATION)


@contextmanager
def drawn_alike(trainer: Any, purpose: str, *, whole: bool) -> Iterator[None]:
    """Draw from the streams for `purpose` inside. `whole`: for whole weights, else for what this rank has of them."""
    before = _begin(trainer, purpose, whole)
    try:
        yield
    finally:
        set_random_state(before, trainer.strategy.root_device)


def draw_alike_in_steps(trainer: Any) -> None:
    """Let optimizers of the user's draw alike in their steps."""
    if trainer.world_size == 1:
        return
    for number, optimizer in enumerate(trainer.strategy.optimizers):
        if isinstance(optimizer, Optimizer) and not type(optimizer).__module__.startswith(_DRAW_NOTHING):
            _watch(trainer, optimizer, f"step of optimizer {number}")


def _begin(trainer: Any, purpose: str, whole: bool) -> dict[str, Any]:
    """Returns the state of this rank's own streams."""
    strategy = trainer.strategy
    # Ranks of a tensor axis have the same norms. Their parts of matrices get the same noise.
    copies = strategy.plan.topology.groups(("replicate", "tensor"))
    part = 0 if whole else next(ranks[0] for ranks in copies if strategy.global_rank in ranks)
    clock = trainer.fit_loop.total_batch_idx + 1, trainer.global_step
    calls = trainer._draws  # purpose → when it drew last, and how often it did so then
    at, times = calls.get(purpose, (None, 0))
    calls[purpose] = clock, (times + 1 if at == clock else 0)
    before = random_state(strategy.root_device)
    seed_streams(derived_seed(strategy.plan.seed, purpose, part, *clock, calls[purpose][1]))
    return before


def _watch(trainer: Any, optimizer: Optimizer, purpose: str) -> None:
    before: list[dict[str, Any]] = []

    def begin(*_: Any) -> None:
        before.append(_begin(trainer, purpose, whole=False))  # a step that calls super().step() begins twice

    def end(*_: Any) -> None:
        set_random_state(before.pop(), trainer.strategy.root_device)

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)
