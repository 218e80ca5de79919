"""The race beside torchtitan: limits, cards, what is run again, and the page, without a GPU and without torchtitan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import race
from benchmarks.harness import commands, race_cells, results, roofline, titan
from benchmarks.harness.data import RandomTokens
from benchmarks.pages import performance
from recipes.language_modeling.model import Transformer
from shardwise.config.compose import compose
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.files import METRICS, PLAN, SUMMARY

SIZES = {"vocab_size": 320, "dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96,
         "tie_embeddings": False}  # fmt: skip
THEIRS = """[rank0]:[titan] 2026-11-22 10:00:00,000 - root - INFO - Training starts at step 1
[rank0]:\x1b[31mstep:  1  \x1b[32mloss: 12.20000  grad_norm:  2.1  memory: 42.00GiB(30.1%)  tps: 1,024  mfu: 1%
[rank0]:step:  8  loss: 11.90000  grad_norm:  2.1  memory: 46.80GiB(33.1%)  tps: 40,000  tflops: 1  mfu: 1%
[rank0]:step: 12  loss: 11.70000  grad_norm:  2.1  memory: 46.80GiB(33.1%)  tps: 50,000  tflops: 1  mfu: 1%
[rank0]:step: 16  loss: 11.50000  grad_norm:  2.1  memory: 46.80GiB(33.1%)  tps: 40,000  tflops: 1  mfu: 1%
"""


def test_the_limit_counts_the_models_own_operations_and_parameters() -> None:
    with torch.device("meta"):
        model = Transformer(**SIZES, max_seq_len=32)
    work = roofline.Work(SIZES, samples=2, length=32)
    parts = roofline.parts_ms(work)
    matmul = parts["matmul"] / 1e3 * roofline.MATMUL
    backward_as_two_forwards = 3 / 3.5  # as the model counts it
    attention = parts["attention"] / 1e3 * roofline.attention_rate(SIZES) * backward_as_two_forwards
    assert matmul + attention == pytest.approx(model.training_flops(2, 32), rel=1e-12)
    norms = (2 * SIZES["n_layers"] + 1) * SIZES["dim"]
    updated = parts["optimizer"] / 1e3 * roofline.MEMORY / 32
    assert updated == pytest.approx(model.count_parameters() - norms, rel=1e-12)


def test_the_limit_knows_recomputing_fp8_and_shards() -> None:
    def parts(**more: Any) -> dict[str, float]:
        return roofline.parts_ms(roofline.Work(SIZES, samples=2, length=32, **more))

    whole, full = parts(), parts(recompute="full")
    head = 3 * 2 * 64 * SIZES["vocab_size"] * SIZES["dim"] / roofline.MATMUL * 1e3
    assert full["matmul"] - head == pytest.approx((whole["matmul"] - head) * 4 / 3)
    assert full["attention"] == pytest.approx(whole["attention"] * 4.5 / 3.5)
    assert parts(recompute="full", recomputed_layers=0.5)["attention"] == pytest.approx(whole["attention"] * 4 / 3.5)
    selective = parts(recompute="selective")
    assert selective["matmul"] == whole["matmul"] and selective["elementwise"] == full["elementwise"]
    assert full["elementwise"] > whole["elementwise"]
    assert parts(fp8=True)["matmul"] - head == pytest.approx((whole["matmul"] - head) / 2)
    assert parts(optimizer_bytes=20)["optimizer"] == pytest.approx(whole["optimizer"] * 20 / 32)
    assert parts(shards=2)["optimizer"] == pytest.approx(whole["optimizer"] / 2)
    found = roofline.limit(roofline.Work(SIZES, samples=2, length=32))
    assert found["tokens_per_second_per_gpu"] == pytest.approx(64e3 / sum(whole.values()), rel=1e-3)


def test_the_words_of_a_run_make_its_work() -> None:
    words = [*race.MODELS["8B"], *race.ALWAYS, "micro_batch_size=3", "devices=2", "global_batch_size=6",
             "precision=fp8", "activation_checkpointing=full", "activation_checkpointing.every_n_layers=2"]  # fmt: skip
    work = race.work_of(words)
    assert (work.samples, work.length, work.shards, work.fp8) == (3, 8192, 2, True)
    assert (work.recompute, work.recomputed_layers, work.model["dim"]) == ("full", 0.5, 4096)
    assert race.work_of([*words, "strategy=ddp", "precision=bf16"]).shards == 1
    hybrid = [*words, "devices=4", "strategy=fsdp_hybrid", "strategy.shard_size=2", "precision=bf16"]
    assert race.work_of(hybrid).shards == 2
    assert race.work_of(words).optimizer_bytes == 32, (
        "masters, gradients, two moments; without gradients; gradients again"
    )
    small = [*words, "optimizer=adamw_8bit"]
    assert (
        race.work_of(small).optimizer_bytes == 20
        and race.work_of([*small, "precision=bf16_true"]).optimizer_bytes == 12
    )


def test_the_words_of_all_runs_are_known(tmp_path: Path) -> None:
    for ranks in (1, 2, 4, 8):
        options = {"accelerator": "cpu", "commit": "a", "out": tmp_path, "only": "", "within": 9, "tiny": False}
        made = race.Race(SimpleNamespace(ranks=ranks, **options))
        names = [cell.name for cell in made.cells]
        assert len(set(names)) == len(names) and all(set(cell.best_of) <= set(names) for cell in made.cells)
        for run in made.runs():
            words = made.words_of(run)
            plan = make_plan(compose(words).jobs[0].config, Host(cuda_devices=8, run_id="run"))
            samples = plan.global_batch_size / ranks
            assert race.work_of(words).samples == samples, words
            assert plan.accumulate_grad_batches == (4 if "pipeline" in run.words else 1)
    assert race.with_defaults("micro_batch_size=1 compile=layer").count("compile=") == 1
    assert race_cells.axes_in("--parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_shard_degree 4") == 2


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_run_can_be_tried_out_on_a_cpu(tmp_path: Path, ranks: int) -> None:
    options = {"accelerator": "cpu", "commit": "a", "out": tmp_path, "only": "", "within": 9, "tiny": True}
    made = race.Race(SimpleNamespace(ranks=ranks, **options))
    for run in made.runs():
        plan = make_plan(compose([*made.words_of(run), "accelerator=cpu"]).jobs[0].config, Host(0, run_id="run"))
        chunks = plan.topology.pipeline * (plan.strategy.pipeline_chunks or 1)
        assert plan.module["model"]["n_layers"] % chunks == 0, run.words


def test_torchtitans_log_is_read() -> None:
    found = titan.read_log(THEIRS, warm_up=8, tokens=16_000)
    assert found == {"steps_ms": [320.0, 400.0], "peak_reserved_gib": 46.8, "losses": [12.2, 11.9, 11.7, 11.5]}
    assert titan.read_log("step 9 of nothing", warm_up=8, tokens=16_000) == {}


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    looks: list[int] = []
    code = commands.run(
        [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"], tmp_path / "log", 1.0,
        lambda: looks.append(1),
    )  # fmt: skip
    assert code == commands.TOO_LONG and looks
    assert commands.failure(code, 1.0, tmp_path / "log")["error"] == "did not end in 1 s"
    (tmp_path / "log").write_text("error: loss=fused: no\nerror: attention=fa4: install it\n")
    assert commands.failure(2, 1.0, tmp_path / "log")["error"] == "exit code 2: attention=fa4: install it"
    (tmp_path / "log").write_text("torch.OutOfMemoryError: CUDA out of memory.")
    assert commands.failure(1, 1.0, tmp_path / "log")["error"] == "out of memory"


class Runs:
    """In place of `commands.run`: makes the folder that a run of ours leaves, or fails."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.code = 0

    def __call__(self, command: list[str], log: Path, limit: float, look: Any, environment: Any) -> int:
        self.made.append(next(word for word in command if word.startswith("loss=")))
        log.write_text("step 8/24\nstep 24/24\n")
        look()
        folder = log.parent / "ours"
        folder.mkdir()
        rows = [f"{step},{0.5 if step > 8 else 9.0},{12 - step / 10}" for step in (1, 4, 8, 12, 16)]
        (folder / METRICS).write_text("\n".join(["step,train/step_seconds,train/loss", *rows, ""]))
        summary = {"peak_memory_gib": 40.5, "first_step_seconds": 9.0, "attention": None}
        (folder / SUMMARY).write_text(json.dumps(summary))
        plan: dict[str, Any] = dict.fromkeys(
            ("precision", "chosen_loss", "chosen_attention", "compile", "activation_checkpointing"), "x"
        )
        plan |= {"global_batch_size": 2, "data": {"sequence_length": 8192}}
        (folder / PLAN).write_text(json.dumps(plan))
        return self.code


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs()
    monkeypatch.setattr(commands, "run", found)
    monkeypatch.setattr(race, "work_of", lambda words: roofline.Work(SIZES, samples=2, length=8192))
    return found


def run_race(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str, commit: str = "a" * 40) -> dict[str, Any]:
    cells = (
        race_cells.Cell("one", "1.5B", ("micro_batch_size=2 loss=full", "micro_batch_size=2 loss=fused")),
        race_cells.Cell("another", "1.5B", ()),
    )
    monkeypatch.setattr(race, "cells_on", lambda ranks: cells)
    line = ["race.py", "--accelerator", "cpu", "--out", str(out), "--commit", commit, "--only", "one", *words]
    monkeypatch.setattr(sys, "argv", line)
    race.main()
    [path] = out.glob("race-*.json")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_a_run_has_a_card_and_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_race(monkeypatch, tmp_path)
    assert runs.made == ["loss=full", "loss=fused"]
    card = found["cards"][0]
    assert (card["ms_per_step"], card["tokens_per_second_per_gpu"]) == (500.0, 32768.0)
    assert card["losses"] == [11.9, 11.6, 11.2, 10.8, 10.4] and card["peak_reserved_gib"] == 40.5
    assert card["limit"]["ms_per_step"] > 0 and card["commit"] == "a" * 40
    assert "runs_dir" not in card["command"] and card["environment"]["packages"]["torch"]
    run_race(monkeypatch, tmp_path)
    assert len(runs.made) == 2, "cards of this commit"
    run_race(monkeypatch, tmp_path, "--again")
    assert len(runs.made) == 4
    found = run_race(monkeypatch, tmp_path, commit="b" * 40)
    assert len(runs.made) == 6 and [card["commit"][0] for card in found["cards"]] == ["b", "b"]


def test_each_cell_has_a_breakdown_of_its_fastest_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [race_cells.Cell(name, "1.5B", (f"micro_batch_size={n} loss={loss}",))
             for n, (name, loss) in enumerate([("first", "full"), ("second", "fused")], start=1)]  # fmt: skip
    cells.append(race_cells.Cell("best", "1.5B", (), best_of=("first", "second")))
    for where in (race, race_cells):
        monkeypatch.setattr(where, "cells_on", lambda ranks: cells)
    line = ["race.py", "--accelerator", "cpu", "--out", str(tmp_path), "--commit", "a" * 40]
    monkeypatch.setattr(sys, "argv", line)
    race.main()
    monkeypatch.setattr(sys, "argv", [*line, "--breakdown"])
    with pytest.raises(SystemExit, match="a run failed"):  # no profile is written here
        race.main()
    assert runs.made == ["loss=full", "loss=fused"] * 2, "the best is one of them"
    assert capsys.readouterr().out.count("the profile was not written") == 2


def test_results_and_pages_are_not_the_code_that_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        name = ["-c", "user.name=x", "-c", "user.email=x@y.z"]
        return subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def commit(path: str) -> str:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
        git("add", "."), git("commit", "-qm", path)
        return git("rev-parse", "HEAD").strip()

    monkeypatch.setattr(results, "ROOT", tmp_path)
    results.is_same_code.cache_clear()
    git("init", "-q")
    code, card, page, other = map(commit, ("src/a.py", "benchmarks/results/race.json", "docs/page.md", "conf/a.yaml"))
    assert results.is_same_code(code, card) and results.is_same_code(code, page)
    assert not results.is_same_code(page, other) and not results.is_same_code("0" * 40, page)
    (tmp_path / "benchmarks/results/race.json").write_text("changed")
    assert results.measured_on("cpu", None)[0]["uncommitted_changes"] is False
    (tmp_path / "src/a.py").write_text("changed")
    assert results.measured_on("cpu", None)[0]["uncommitted_changes"] is True
    results.is_same_code.cache_clear()


def test_what_the_time_cuts_short_has_no_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run_race(monkeypatch, tmp_path)
    monkeypatch.setattr(race, "ENOUGH", 0)
    runs.code = commands.TOO_LONG
    assert all("error" not in card for card in run_race(monkeypatch, tmp_path, "--again", "--within", "9")["cards"])
    assert "the time is over" in capsys.readouterr().out


def test_a_run_that_fails_takes_no_card_away_and_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    good = run_race(monkeypatch, tmp_path)["cards"]
    runs.code = 2
    with pytest.raises(SystemExit, match="a run failed"):
        run_race(monkeypatch, tmp_path, commit="b" * 40)
    [path] = tmp_path.glob("race-*.json")
    assert json.loads(path.read_text())["cards"] == good
    path.unlink()
    for _ in range(2):
        with pytest.raises(SystemExit, match="a run failed"):
            run_race(monkeypatch, tmp_path)
    assert (
        len(runs.made) == 2 + 2 + 4
        and [card["error"] for card in json.loads(path.read_text())["cards"]] == ["exit code 2"] * 2
    )
    runs.code = 0
    assert [card["commit"] for card in run_race(monkeypatch, tmp_path)["cards"]] == ["a" * 40] * 2


def test_cards_of_a_small_model_lie_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: Runs) -> None:
    run_race(monkeypatch, tmp_path, "--tiny")
    assert [path.name for path in tmp_path.glob("race-*.json")] == ["race-cpu-x1-tiny.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--only nothing", "is in none of: one; another"),
        ("--only (", "not a regular expression"),
        ("--ranks 3", "invalid choice"),
    ],
)
def test_a_wrong_word_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str],
    words: str, message: str,
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as left:
        run_race(monkeypatch, tmp_path, *words.split())
    assert left.value.code not in (0, None) and message in f"{left.value.code}{capsys.readouterr().err}"
    assert not runs.made


def test_a_broken_file_of_results_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: Runs) -> None:
    (tmp_path / "race-cpu-x1.json").write_text('{"cards": [')
    with pytest.raises(SystemExit, match=r"race-cpu-x1.json is not JSON"):
        run_race(monkeypatch, tmp_path)
    assert not runs.made


def test_each_rank_of_torchtitan_has_other_sequences() -> None:
    data = RandomTokens(2, 16, 1000)
    whole = [
        row.tolist() for _, batch in zip(range(4), data.train_dataloader(), strict=False) for row in batch["tokens"]
    ]
    parts = [
        [row.tolist() for _, batch in zip(range(2), data.batches_of(rank, 2), strict=False) for row in batch["tokens"]]
        for rank in (0, 1)
    ]
    assert whole[0::2] == parts[0] and whole[1::2] == parts[1] and len({tuple(row) for row in whole}) == 8


WORDS = race_cells.with_defaults("micro_batch_size=2 loss=fused")
FLAGS = race_cells.flags_of(2, "none", "")


ENVIRONMENT = {
    "gpus": ["NVIDIA H200"], "python": "3.12.1", "cuda": "13.0", "nccl": [2, 28, 9], "packages": {"torch": "2.11.0"},
}  # fmt: skip


def card_of(who: str, speed: float, **more: Any) -> dict[str, Any]:
    return {
        "cell": "micro-batch 2", "who": who, "words": WORDS if who == "ours" else FLAGS,
        "tokens_per_second_per_gpu": speed,
        "commit": "c" * 40, "ms_per_step": 300.0, "steps_ms": [299.0, 301.0], "peak_reserved_gib": 42.0,
        "losses": [12.2, 12.1], "gpu": {"power_watts": 690.0, "sm_clock_mhz": 1700.0},
        "machine": {"digests": ["1"], "power_limit_watts": [700.0]}, "environment": ENVIRONMENT,
        "limit": {"tokens_per_second_per_gpu": 80_000.0},
    } | more  # fmt: skip


def test_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert all(made() == ["Not run yet."] for made in performance.TABLES.values())
    step = {"exposed_communication_ms": 0.0, "copies_alone_ms": 1.0, "idle_ms": 2.0, "span_ms": 33.0,
            "communication_ms": 0.0}  # fmt: skip
    profile = {"kinds_ms": {"matmul": 20.0, "attention": 5.0, "elementwise": 4.0, "copies and casts": 1.0},
               "step": step, "kernels": []}  # fmt: skip
    broken = roofline.beside_limits(profile, {"matmul": 18.0, "elementwise": 3.0})
    content = {
        "tiny": False, "ranks": 1, "cells": {"micro-batch 2": [], "micro-batch 4": [], "best": ["micro-batch 2"]},
        "cards": [
            card_of("torchtitan 0.2.2", 50_000.0), card_of("ours", 60_000.0, commit="d" * 40),
            card_of("ours", 70_000.0, words="micro_batch_size=2 loss=full"),  # which no cell asks for any more
            card_of("ours", 9e9, error="out of memory"),
        ],
        "breakdowns": {"micro-batch 2": {"words": "loss=full", "commit": "d" * 40, **broken}},
    }  # fmt: skip
    results.write(tmp_path / "race-h200-x1.json", content)
    lines = performance.TABLES["race_1"]()
    assert lines[0].startswith("| | torchtitan 0.2.2 | ours |") and len(lines) == 8
    said = " ".join(f"`{word}`" for word in WORDS.split())
    assert lines[2] == f"| micro-batch 2 | 50,000 | 60,000 | 1.200 | 1.08 | 80,000 | 0.75 | 42.0 / 42.0 | {said} |"
    assert lines[3] == "| micro-batch 4 | not run | not run | | | | | | |"
    assert lines[4] == lines[2].replace("micro-batch 2", "best").replace(" 1.08 ", " "), (
        "the runs of another cell count in it too"
    )
    assert "not measured at one commit" in lines[6]
    assert performance.TABLES["race_2"]() == ["Not run yet."]
    text = "\n".join(performance.TABLES["race_cards"]())
    assert "690 (700)" in text and "1,700" in text and "out of memory" in text
    parts = performance.TABLES["race_breakdown"]()
    assert "| matmul | 20.0 | 18.0 | 2.0 |" in parts and "| elementwise | 5.0 | 3.0 | 2.0 |" in parts
    assert "| all | 33.0 | 21.0 | 12.0 |" in parts
    assert f"(the fastest run by now is that with `{WORDS}`)" in parts[0]
    other = {"environment": ENVIRONMENT | {"gpus": ["NVIDIA H100"]}, "cell": "micro-batch 4"}
    results.write(tmp_path / "race-h100-x1.json", content | {"cards": [card_of("ours", 9_000.0, **other)]})
    lines = performance.TABLES["race_1"]()
    assert [line for line in lines if line.startswith("On ")] == ["On 1 × NVIDIA H200:", "On 1 × NVIDIA H100:"]
    assert sum(line.startswith("| micro-batch 4 |") for line in lines) == 1, "not run in one table, and run in another"
    theirs = card_of("torchtitan 0.2.2", 50_000.0, environment=other["environment"])
    for more, said in (([], "not run"), ([card_of("ours", 9e9, error="out of memory")], "failed")):
        results.write(tmp_path / "race-h100-x1.json", content | {"cards": [theirs, *more]})
        row = [line for line in performance.TABLES["race_1"]() if line.startswith("| micro-batch 2 |")][1]
        assert row == f"| micro-batch 2 | 50,000 | | | 1.08 | | | 42.0 / – | ours: {said} |"
    (tmp_path / "race-h100-x1.json").unlink()
    results.write(tmp_path / "race-h200-x1.json", content | {"tiny": True})
    assert performance.TABLES["race_1"]() == ["Not run yet."]


def test_a_part_that_this_commit_has_is_left_out(tmp_path: Path) -> None:
    head = {"environment": {}, "size": 1, "tiny": True, "sections": {}}
    asked: list[str] = []

    def measure(name: str) -> dict[str, Any]:
        asked.append(name)
        return {}

    for commit in ("a", "a", "b"):
        parts = results.Parts(
            tmp_path / "x.json", head, limit_seconds=9, commit=commit, only="", prepare=lambda: None,
            words=lambda row: "done", missing=True,
        )  # fmt: skip
        assert parts.part("one", "part", lambda commit=commit: measure(commit))["ok"]
    assert asked == ["a", "b"]


def test_what_another_machine_has_measured_stays(tmp_path: Path) -> None:
    def measured(name: str, tiny: bool = True) -> dict[str, Any]:
        head = {"environment": {"cpus": name}, "tiny": tiny, "sections": {}}
        parts = results.Parts(tmp_path / "x.json", head, limit_seconds=9, commit="a", only="", prepare=lambda: None,
                              words=lambda row: "done")  # fmt: skip
        parts.part("one", name, dict)
        return parts.content["sections"]["one"]

    measured("first")
    assert {name: row["environment"] for name, row in measured("second").items()} == {
        "first": {"cpus": "first"}, "second": {"cpus": "second"},
    }  # fmt: skip
    with pytest.raises(SystemExit, match="measured with --tiny: give another --out"):
        measured("third", tiny=False)
