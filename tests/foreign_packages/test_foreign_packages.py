"""Modules that no one here wrote: the losses of a stock one-process Trainer, and resumed as if never stopped."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos import LightningTransformer

from tests.foreign_packages import runs
from tests.foreign_packages.cases import CASES, STRATEGIES, Case
from tests.foreign_packages.demos import without_dropout
from tests.harness.commands import Running, check, metrics, run
from tests.harness.processes import spawn


@dataclass
class Found:
    cases: list[Case]
    trained: list[dict[tuple[str, str], Any]]  # of every rank; a text: the refusal
    resumed: list[dict[tuple[str, str], Any]]
    stock: dict[str, Any]

    def cells(self) -> list[tuple[Case, str]]:
        return [(case, strategy) for case in self.cases for strategy in STRATEGIES]


@pytest.fixture(scope="module", params=list(dict.fromkeys(case.package for case in CASES)))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of one package: what it imports and sets is in processes of its own."""
    home = tmp_path_factory.mktemp("home")
    runs.make_home(home)
    cases = [case for case in CASES if case.package == request.param]
    trained = spawn(runs.RANKS, runs.train_all, home, cases)
    resumed = spawn(runs.RANKS, runs.resume_all, home, cases)
    return Found(cases, trained, resumed, spawn(1, runs.train_under_stock, home, cases)[0])


def test_its_losses_are_those_of_the_stock_trainer(found: Found) -> None:
    for case, strategy in found.cells():
        trained, stock, where = found.trained[0][case.name, strategy], found.stock[case.name], (case.name, strategy)
        if strategy in case.refused:
            begin = case.refused[strategy].format(name=case.name, strategy=strategy)
            assert isinstance(trained, str) and trained.startswith(begin), where
            continue
        assert not isinstance(trained, str), (where, trained)
        assert runs.is_same(trained["start"], stock["start"]), where
        assert trained["losses"] == pytest.approx(stock["losses"], rel=case.tolerance), where
        assert len(set(trained["losses"])) == runs.STEPS, where


def train_alone(relative: float) -> list[float]:
    """Losses of the demos' Transformer at its own rate in a plain loop, in fp64: weights begin with this error."""
    torch.manual_seed(1)
    net = without_dropout(LightningTransformer(vocab_size=32)).double()
    net.model.pos_encoder.pe = net.model.pos_encoder._init_pos_encoding(torch.device("cpu")).double()
    net.model.src_mask = net.model.generate_square_subsequent_mask(35).double()
    generator, losses = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1 + relative * (torch.rand(p.shape, generator=generator, dtype=p.dtype) - 0.5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        tokens = torch.randint(0, 32, (4, 36), generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
        loss = torch.nn.functional.nll_loss(net.model(inputs, targets, net.model.src_mask), targets.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_demos_transformer_multiplies_any_difference() -> None:
    """Why its losses under other strategies are off by 1e-4 in fp32, and by no more than 1e-8 in fp64."""
    exact = train_alone(0)
    for precision, least, most in ((1e-7, 1e-4, 1.0), (1e-15, 1e-12, 1e-8)):  # about those of fp32 and fp64
        first, *_, last = (abs(a - b) for a, b in zip(train_alone(precision), exact, strict=True))
        assert first < 10 * precision < least < last < most


def test_it_goes_on_from_a_checkpoint_as_if_never_stopped(found: Found) -> None:
    for case, strategy in found.cells():
        for trained, resumed in zip(found.trained, found.resumed, strict=True):
            if strategy not in case.refused:
                straight, gone_on = trained[case.name, strategy], resumed[case.name, strategy]
                assert gone_on["losses"] == straight["losses"], (case.name, strategy)
                assert runs.is_same(gone_on["final"], straight["final"]), (case.name, strategy)


# Everything that a user types: no word of ours but the strategy's
KILLED = {
    "forecasting": ["module._target_=mine.tft", "strategy=fsdp"],  # its objects in the checkpoint need trust=true
    "molecules": ["module._target_=mine.mpnn", "strategy=zero2"],
}


@pytest.mark.parametrize("name", KILLED)
def test_killed_and_resumed_as_a_user_does(tmp_path: Path, name: str) -> None:
    shutil.copy(Path(__file__).with_name(f"{name}.py"), tmp_path / "mine.py")
    words = [
        "recipe=custom", *KILLED[name], "data._target_=mine.Data", "data.batch_size=2", "micro_batch_size=2",
        "global_batch_size=4", "max_steps=60", "log_every_n_steps=1", "checkpoint.save_every_n_steps=15",
        "accelerator=cpu", "devices=2", "runs_dir=runs",
    ]  # fmt: skip
    check(run(tmp_path, *words, "name=straight"))
    with Running(tmp_path, f"foreign-{name}-{os.getpid()}", *words, "name=killed") as running:
        running.wait_for("step 20/60")
        for pid in running.pids():
            os.kill(pid, signal.SIGKILL)
        running.wait_until_gone()
    check(run(tmp_path, *words, "name=killed", "resume=auto", "trust=true"))
    straight, killed = (metrics(tmp_path / "runs" / name, "train/loss") for name in ("straight", "killed"))
    assert len(straight) == 60 and killed == straight
