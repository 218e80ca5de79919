"""Activation checkpointing changes no bit under any strategy, and compiled nothing beyond rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_same_run import STRATEGIES
from tests.harness.cells import cell_plan, fit
from tests.harness.processes import spawn
from tests.harness.selected import needed

RUN = ["optimizer=sgd", "optimizer.lr=2.0", "schedule=none", "micro_batch_size=2", "global_batch_size=8",
       "max_steps=2", "checkpoint=none"]  # fmt: skip
NONE, FULL, SELECTIVE = ([f"activation_checkpointing={name}"] for name in ("none", "full", "selective"))
EAGER = {
    "none": NONE,
    "selective": SELECTIVE,
    "full, every second": [*FULL, "activation_checkpointing.every_n_layers=2"],
}
COMPILED = {  # with the strategies whose hooks differ most
    ("fsdp", "selective"): [*SELECTIVE, "compile=layer"],
    ("zero3", "full"): [*FULL, "compile=layer"],
    ("ddp", "full, every second"): [*FULL, "activation_checkpointing.every_n_layers=2", "compile=model"],
}


CASES = {(strategy, name): more for strategy in STRATEGIES for name, more in EAGER.items()}
CASES |= {(strategy, f"compiled {name}"): more for (strategy, name), more in COMPILED.items()}


def run_all(folder: Path, wanted: set[tuple[str, str]] | None) -> dict[tuple[str, str], Any]:
    cells = {}
    needed = None if wanted is None else wanted | {(strategy, "none") for strategy, _ in wanted}
    for number, ((strategy, name), more) in enumerate(CASES.items()):
        if needed is None or (strategy, name) in needed:
            torch._dynamo.reset()
            precision = "fp32" if strategy.startswith("zero") else "fp64"  # DeepSpeed keeps masters in fp32
            words = [*RUN, *STRATEGIES[strategy], f"precision={precision}", *more]
            cells[strategy, name] = fit(cell_plan(folder / str(number), 2, *words))
    return cells


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return spawn(2, run_all, tmp_path_factory.mktemp("checkpointing"), needed(request, "strategy", "name"))[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [name for name in EAGER if name != "none"])
def test_what_is_computed_again_has_the_same_bits(cells: Any, strategy: str, name: str) -> None:
    plain, ours = cells[strategy, "none"], cells[strategy, name]
    assert ours["losses"] == plain["losses"] and ours["norms"] == plain["norms"]
    for parameter, values in plain["final"].items():
        assert torch.equal(ours["final"][parameter], values), parameter


@pytest.mark.parametrize(("strategy", "name"), [(strategy, f"compiled {name}") for strategy, name in COMPILED])
def test_compiled_it_differs_by_rounding_alone(cells: Any, strategy: str, name: str) -> None:
    plain, ours = cells[strategy, "none"], cells[strategy, name]
    bound = 1e-4 if strategy.startswith("zero") else 1e-9
    assert ours["losses"] == pytest.approx(plain["losses"], rel=bound)
    for parameter, values in plain["final"].items():
        assert (ours["final"][parameter] - values).norm() <= bound * values.norm(), parameter
