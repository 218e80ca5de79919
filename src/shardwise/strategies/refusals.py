"""What strategies refuse: parameters that none or some of them cannot train, and what comes while a run goes on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from shardwise.checkpoint.state import COMPILED
from shardwise.errors import ConfigError
from shardwise.lightning_internals.loops import evaluates_loaders_together
from shardwise.plan import Plan


def refuse_parameters(module: LightningModule, plan: Plan) -> None:
    """Raises ConfigError where the plan's strategy cannot train a parameter, or not a layer as it is."""
    strategy = plan.strategy.name
    sparse = [name for name, layer in module.named_modules() if getattr(layer, "sparse", False) and _embeds(layer)]
    if sparse and plan.stage == "fit":
        raise ConfigError(
            f"{', '.join(sparse[:4])} has sparse=True, and its gradients are sparse tensors, which are not reduced, "
            f"measured or clipped here; leave sparse=True out"
        )
    complex_ones = [name for name, p in module.named_parameters() if p.is_complex() and p.requires_grad]
    if complex_ones and plan.stage == "fit" and (reason := plan.capabilities.complex_numbers):
        raise ConfigError(f"{', '.join(complex_ones[:4])} holds complex numbers, and {strategy} {reason}")
    wrapped = [name.partition(f".{COMPILED}")[0] for name, _ in module.named_parameters() if COMPILED in name]
    if wrapped and plan.zero_stage == 3:
        raise ConfigError(
            f"{wrapped[0]} is what torch.compile(layer) gives, and {strategy} cannot put its hooks into that; call "
            f"layer.compile(), use compile=layer, or another strategy"
        )


def _embeds(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.weight.requires_grad


def refuse_loaders_together(trainer: Trainer, plan: Plan) -> None:
    """Raises ConfigError: batches of several loaders come at once. A rank may have samples of some of them alone."""
    if plan.topology.data_parallel_size > 1 and evaluates_loaders_together(trainer):
        raise ConfigError(
            "a CombinedLoader gives batches of several loaders at once, and on several ranks an evaluation would "
            "count samples twice: use mode='sequential', or return a list of loaders"
        )


class FrozenForGood:
    """The weights that are frozen when a strategy is set up which could not train them later."""

    def __init__(self, module: LightningModule | None = None, strategy: str = "") -> None:
        """`module`: None: all may be trained later."""
        named = [] if module is None else list(module.named_parameters())
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._strategy = strategy

    def check(self) -> None:
        """Raises ConfigError where one of them is to be trained now."""
        if names := [name for name, p in self._frozen if p.requires_grad]:
            raise ConfigError(
                f"{', '.join(names[:4])} had requires_grad=False when {self._strategy} was set up, and has it no "
                f"longer: {self._strategy} would not reduce or update it; use strategy=fsdp, or let it be trained from "
                f"the start"
            )


class CollectiveOrder:
    """The order in which this rank gathers layers and reduces gradients in a step, which must be that of all ranks.

    Where ranks run different layers, collectives of different layers would pair up: in silence where these are of one
    size; otherwise ranks abort, or wait for each other for ever. In the first steps the hosts compare each collective
    before it begins. Later a rank compares only where it leaves every order that it knows: all ranks have had the same
    ones, so the others leave them there too, or they do not answer.
    """

    def __init__(
        self, plan: Plan, module_name: Callable[[], str], group: Callable[[], dist.ProcessGroup | None]
    ) -> None:
        self._plan, self._module_name, self._group = plan, module_name, group
        self.is_refused = False  # whether ranks have been found at different collectives
        self._collectives = ["is at the end of the step"]  # what a rank does, in words; the place here is its number
        # step → orders that it had, the last one last
        self._known: dict[tuple[str, bool], list[list[int]]] = defaultdict(list)
        self._compared: Counter[tuple[str, bool]] = Counter()  # step → how many times the whole order was compared
        self._now: list[int] | None = None  # the order of the step that runs, up to now
        self._expected: list[int] = []  # the order that this rank follows without asking the others; empty: none

    def add(self, words: str) -> Callable[[], None]:
        """Make a collective known, in the same order on all ranks. Returns what is to be called before it begins."""
        self._collectives.append(words)
        return partial(self._note, len(self._collectives) - 1)

    def begin(self, step: str, *, reduces: bool) -> None:
        """Begin a forward pass, and the backward pass that may follow. `reduces`: whether it ends a window."""
        topology = self._plan.topology
        if topology.world_size == 1 or topology.pipeline > 1 or len(self._collectives) == 1:
            return  # stages of a pipeline have different layers
        self._step, self._now = (step, reduces), []
        self._expect()

    def end(self) -> None:
        """End what has begun, if anything has. Collective where ranks compare."""
        if self._now is None:
            return
        self._note(0)
        self._known[self._step] = [*(order for order in self._known[self._step] if order != self._now)][-31:]
        self._known[self._step].append(self._now)
        self._compared[self._step] += 1
        self._now = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is compared: all weights stay gathered, and ranks may run layers as often as they like."""
        now, self._now = self._now, None
        yield
        self._now = now

    def _expect(self) -> None:
        # With more ranks two of them differ sooner, and to compare takes longer.
        if self._now is not None and self._compared[self._step] > 16 // self._plan.topology.world_size:
            begin = self._now
            alike = (order for order in reversed(self._known[self._step]) if order[: len(begin)] == begin)
            self._expected = next(alike, [])
        else:
            self._expected = []

    def _note(self, number: int) -> None:
        if self._now is None:
            return
        here, expected = len(self._now), self._expected
        self._now.append(number)
        if not expected or expected[here] != number:  # every order ends with 0, so this one is not longer
            self._compare(here, number, expected[here] if expected else None)
            self._expect()

    def _compare(self, here: int, number: int, before: int | None) -> None:
        """Compare with all ranks. `before`: the collective that all ranks had here in an earlier step.

        Raises:
            ConfigError: another rank has come to another collective, or to none.
        """
        mine = here * len(self._collectives) + number
        extremes = torch.tensor([mine, -mine])
        work = dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group(), async_op=True)
        minutes = self._plan.strategy.timeout_minutes / 2  # of which the watchdog waits for all
        try:
            work.wait(*([] if before is None else [timedelta(minutes=minutes)]))
        except RuntimeError as error:
            if before is None or "timed out" not in str(error):
                raise
            where = (
                f"so far every rank {self._collectives[before]}, and the others did not follow in {minutes:g} minutes"
            )
            raise self._refusal(number, where) from None
        if other := {int(extremes[0]), -int(extremes[1])} - {mine}:
            raise self._refusal(number, f"another rank {self._collectives[other.pop() % len(self._collectives)]}")

    def _refusal(self, number: int, where: str) -> ConfigError:
        self._now, self.is_refused = None, True  # what hooks of the end run is not compared
        strategy, unused = self._plan.strategy.name, "strategy.find_unused_parameters=true"
        remedy = {1: f"give {unused}", 2: f"give {unused}", 3: f"use strategy=fsdp units=[] or strategy=zero2 {unused}"}
        name = self._module_name()
        return ConfigError(
            f"{name} uses different layers on different ranks: in {self._step[0]} rank {dist.get_rank()} "
            f"{self._collectives[number]} where {where}. Under {strategy} all ranks gather layers and reduce gradients "
            f"in one order: {remedy.get(self._plan.zero_stage, f'give units=[], or strategy=ddp {unused}')}"
        )
