"""`shardwise schedule`: the diagram of time × rank, idle time and memory, and what cannot be in one message."""

from pathlib import Path

import pytest

from shardwise.metrics.parallel_pictures import draw_mesh, draw_schedule
from shardwise.plan.pipeline_schedule import make_schedule, simulate
from shardwise.plan.schedule_text import diagram, schedule_lines
from shardwise.plan.topology import Topology
from shardwise.tools import main


def test_the_diagram_shows_who_does_what_when(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "pipeline_parallel_size=2", "micro_batches=2"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "stage 0 | F0 F1 ..... B0--- .. B1---",
        "stage 1 | .. F0 B0--- F1 B1--- ......",
        "",
        "1f1b, 2 ranks × 1 stage, 2 micro-batches a step: bubble 50.0% of the ideal time; ranks wait 33.3% of a step",
        "stage 0  works 67%  keeps 2 of 2 micro-batches  = 1.00 × one micro-batch in all layers",
        "stage 1  works 67%  keeps 1 of 2 micro-batches  = 0.50 × one micro-batch in all layers",
    ]


def test_several_stages_of_a_rank_have_letters_and_a_long_diagram_goes_on_below() -> None:
    lines = diagram(simulate(make_schedule("interleaved", 2, 2, 8)), width=80)
    assert lines[0].startswith("stages 0, 2 | F0a F1a F0b F1b F2a ")
    assert lines[2] == "" and lines[3].startswith("stages 0, 2 | ")
    assert max(map(len, lines)) <= 80
    whole = "".join(line.partition(" | ")[2] for line in lines if line.startswith("stages 0"))
    assert whole.count("F") == whole.count("B") == 16


def test_a_split_by_cost_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "layers=32", "head_layers=2.4", "micro_batches=32"]) == 0
    out = capsys.readouterr().out
    assert "bubble 13.3% of the ideal time" in out
    assert [line.split("layers")[0].split()[-1] for line in out.splitlines() if "works" in line] == list("9986")
    assert "stage 0  9 layers  works" in out and "= 1.12 × one micro-batch in all layers" in out
    words = ["schedule", "strategy.pipeline_split=[8,8,8,8]", "head_layers=2.4", "micro_batches=32"]
    assert main(words) == 0
    assert "bubble 29.7% of the ideal time" in capsys.readouterr().out


def test_the_lines_of_the_dry_run_have_no_diagram_and_tell_of_few_micro_batches() -> None:
    lines = schedule_lines("interleaved", 2, 2, 4, split=(2, 2, 2, 1))
    assert lines[0].startswith("interleaved, 2 ranks × 2 stages, 4 micro-batches a step: bubble ")
    assert lines[1].startswith("stages 0, 2  2 + 2 layers  works")
    assert len(lines) == 3
    assert schedule_lines("1f1b", 4, 1, 2)[-1].startswith("2 micro-batches in a step for 4 ranks of a pipeline")


def test_pictures_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.png"
    assert main(["schedule", "pipeline_schedule=interleaved", "pipeline_chunks=2", f"picture={path}"]) == 0
    assert f"picture: {path}" in capsys.readouterr().out
    draw_schedule("gpipe", simulate(make_schedule("gpipe", 2, 1, 200)), tmp_path / "long.png")
    for number, topology in enumerate((Topology(2, 4, 1, 2, tensor=2, pipeline=2), Topology(1, 1, 1, 1))):
        draw_mesh(topology, tmp_path / f"mesh-{number}.png")
    for made in (path, *tmp_path.glob("*.png")):
        assert made.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["picture"], "picture: schedule takes words of the form key=value"),
        (["picture=s.pdf"], "picture=s.pdf: give the name of a file that ends in .png"),
        (["picture=/there/is/none.png"], "picture=/there/is/none.png cannot be written: No such file"),
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
