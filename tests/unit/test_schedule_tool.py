"""`shardwise schedule`: idle time and memory of each rank, and what cannot be in one message."""

import pytest

from shardwise.plan.pipeline_schedule import schedule_lines
from shardwise_tools import main


def test_each_rank_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "pipeline_parallel_size=2", "micro_batches=2"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1f1b, 2 ranks × 1 stage, 2 micro-batches a step: bubble 50.0% of the ideal time; ranks wait 33.3% of a step",
        "stage 0  works 67%  keeps 2 of 2 micro-batches  = 1.00 × one micro-batch in all layers",
        "stage 1  works 67%  keeps 1 of 2 micro-batches  = 0.50 × one micro-batch in all layers",
    ]


def test_a_split_by_cost_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "layers=32", "head_layers=2.4", "micro_batches=32"]) == 0
    out = capsys.readouterr().out
    assert "bubble 13.3% of the ideal time" in out
    assert [line.split("layers")[0].split()[-1] for line in out.splitlines() if "works" in line] == list("9986")
    assert "stage 0  9 layers  works" in out and "= 1.12 × one micro-batch in all layers" in out
    words = ["schedule", "strategy.pipeline_split=[8,8,8,8]", "head_layers=2.4", "micro_batches=32"]
    assert main(words) == 0
    assert "bubble 29.7% of the ideal time" in capsys.readouterr().out


def test_the_lines_of_the_dry_run_tell_of_few_micro_batches() -> None:
    lines = schedule_lines("interleaved", 2, 2, 4, split=(2, 2, 2, 1))
    assert lines[0].startswith("interleaved, 2 ranks × 2 stages, 4 micro-batches a step: bubble ")
    assert lines[1].startswith("stages 0, 2  2 + 2 layers  works")
    assert len(lines) == 3
    assert schedule_lines("1f1b", 4, 1, 2)[-1].startswith("2 micro-batches in a step for 4 ranks of a pipeline")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["picture"], "picture: schedule takes words of the form key=value"),
        (["picture=s.png"], "picture: there is no such option"),
        (["pipeline_split=[a]"], "pipeline_split=[a]: must be whole numbers, such as [9,9,8,6]"),
        (["pipeline_split=[9,9]"], "pipeline_split=[9,9] must have 4 numbers"),
        (["layers=30", "pipeline_split=[9,9,8,6]"], "with a sum of 30, the model's layers; it has 4 with a sum of 32"),
        (["layers=3"], "3 layers cannot be cut into 4 stages"),
        (["head_layers=2"], "head_layers=2 needs layers=N"),
        (["backward=0"], "backward must be above 0"),
        (["layers=8", "head_layers=-1"], "head_layers 0 or above"),
        (["pipeline_schedule=interleaved"], "pipeline_chunks=1: interleaved needs at least 2 stages a rank"),
    ],
)
def test_what_cannot_be_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out


def test_the_tables_of_the_page_are_todays() -> None:
    from benchmarks.report import ROOT, with_tables

    text = (ROOT / "docs/parallelism.md").read_text()
    assert text == with_tables(text), "python benchmarks/report.py writes docs/parallelism.md anew"
