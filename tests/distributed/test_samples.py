"""Samples in validation: the same under every strategy, from weights that are gathered once, beside the training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from recipes.language_modeling.module import LanguageModel
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.data.tokens import write_token_shards
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.strategies import weights_in_hooks
from shardwise_tools import main
from tests.harness.cells import cell_plan, fit
from tests.harness.processes import spawn
from tests.harness.saved import trained_tokenizer

RUNS = {
    "ddp": [],
    "silent": ["module.sample_tokens=0"],
    "fsdp": ["strategy=fsdp"],
    "fsdp-compiled": ["strategy=fsdp", "compile=layer"],
    "fsdp-full": ["strategy=fsdp"],  # without room to gather
    "zero3": ["strategy=zero3"],
    "zero3-full": ["strategy=zero3"],
    "zero3-bf16": ["strategy=zero3", "precision=bf16"],
    "bpe": ["data.directory=SHARDS/bpe"],
    "numbers": ["data.directory=SHARDS/numbers"],
}
SAME = ("ddp", "fsdp", "fsdp-compiled", "fsdp-full", "zero3", "zero3-full")
LAYERS, TOKENS = 3, 20


def write_shards(folder: Path) -> None:
    text = "once upon a time " * 60
    bpe = trained_tokenizer(258)
    encoded = {
        "bytes": ([*text.encode(), 0], 256, ByteTokenizer()),
        "bpe": ([*bpe.encode([text])[0], bpe.end_of_document], bpe.vocab_size, bpe),
        "numbers": (list(range(100)) * 10, 100, None),
    }
    for name, (tokens, vocab_size, tokenizer) in encoded.items():
        splits = {split: [np.array(tokens)] for split in ("train", "validation")}
        write_token_shards(folder / name, splits, vocab_size=vocab_size, tokenizer=tokenizer)


def run_all(folder: Path) -> dict[str, Any]:
    words = [
        "model.vocab_size=260", "data._target_=recipes.language_modeling.data.TextData",
        f"+data.directory={folder}/shards/bytes", "+data.corpus=null", "+data.sequence_length=16", "micro_batch_size=2",
        "global_batch_size=8", "max_steps=3", "validate_every_n_steps=2", "checkpoint.save_every_n_steps=3",
        f"module.sample_tokens={TOKENS}", "module.sample_prompt=once",
    ]  # fmt: skip
    found = {}
    for name, more in RUNS.items():
        more = [word.replace("SHARDS", f"{folder}/shards") for word in more]
        plan = cell_plan(folder / name, 2, *words, *more)
        (Path(plan.run_dir) / "plan.json").write_text(plan.to_json())  # the launcher does
        free, gathers = -1 if name.endswith("full") else 2**40, list[int]()
        with (
            patch.object(weights_in_hooks, "_free_bytes", lambda device, free=free: free),
            patch.object(LanguageModel, "_samples", counted(LanguageModel._samples, gathers)),
        ):
            found[name] = {**fit(plan), "gathers": gathers}
    checkpoint = f"{folder}/ddp/checkpoints/step-00000003.ckpt"
    for option in ("resume", "init_from"):
        begin = [*words, "max_steps=4", f"data.directory={folder}/shards/bpe", f"{option}={checkpoint}"]
        found[option] = {
            allow: outcome(cell_plan(folder / f"{option}-{len(allow)}", 2, *begin, f"resume_allow=[{allow}]"))
            for allow in ("data", "data,tokenizer")
        }
    return found


def outcome(plan: Plan) -> str:
    try:
        return f"{len(fit(plan)['losses'])} steps"
    except ConfigError as error:
        return str(error)


def counted(method: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
    """`method`, which notes how often weights are gathered while it runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            result = method(*args, **kwargs)
        counts.append(sum(event.name.startswith("c10d::") and "allgather" in event.name for event in profiler.events()))
        return result

    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("samples")
    write_shards(folder / "shards")
    return folder, spawn(2, run_all, folder)


def samples(folder: Path, name: str) -> list[str]:
    return re.split(r"^=== step \d+\n", (folder / name / "samples.txt").read_text(), flags=re.MULTILINE)[1:]


def test_samples_are_the_same_under_every_strategy_and_change_no_step(runs: Any) -> None:
    folder, [found, other] = runs
    [expected] = samples(folder, "ddp")
    assert expected.startswith("once") and len(expected) > 10
    for name in SAME:
        assert samples(folder, name) == [expected], name
        assert found[name]["gathers"] == other[name]["gathers"]
    assert len(samples(folder, "zero3-bf16")) == 1
    assert not (folder / "silent/samples.txt").exists()
    for name, same in (("silent", "ddp"), ("fsdp-full", "fsdp"), ("zero3-full", "zero3")):
        assert found[name]["losses"] == found[same]["losses"], name
    for name in ("fsdp", "fsdp-compiled", "zero3"):
        assert found[name]["losses"] == pytest.approx(found["ddp"]["losses"], rel=1e-5), name


def test_sharded_weights_are_gathered_once_for_a_sample_where_there_is_room(runs: Any) -> None:
    _, [found, _] = runs
    gathers = {name: found[name]["gathers"] for name in SAME}
    assert gathers["ddp"] == [0]
    assert gathers["fsdp"] == gathers["fsdp-compiled"] == [LAYERS]
    assert gathers["fsdp-full"] == [LAYERS * TOKENS]
    assert gathers["zero3"][0] < TOKENS < gathers["zero3-full"][0]


def test_generate_continues_with_the_checkpoint_of_any_strategy(
    runs: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, _ = runs
    texts = {}
    for name in ("ddp", "fsdp", "zero3", "zero3-bf16"):
        [checkpoint] = (folder / name / "checkpoints").glob("step-*")
        checkpoint = checkpoint.rename(tmp_path / name)  # it needs nothing of its run
        assert main(["generate", str(checkpoint), "prompt=once", "temperature=0", "max_new_tokens=12"]) == 0
        texts[name] = capsys.readouterr().out
        assert tokenizer_of_checkpoint(checkpoint) == ByteTokenizer().files()
    assert texts["ddp"] == texts["fsdp"] == texts["zero3"] and len(texts["ddp"]) > 8


def test_samples_are_text_by_the_tokenizer_of_the_data_which_the_run_keeps(runs: Any) -> None:
    folder, _ = runs
    [text] = samples(folder, "bpe")
    files = {file.name: file.read_text() for file in (folder / "bpe/tokenizer").iterdir()}
    assert text.startswith("once") and files == trained_tokenizer(258).files()
    [numbers] = samples(folder, "numbers")
    assert len(numbers.split()) == 1 + TOKENS and all(number.isdigit() for number in numbers.split())
    assert not (folder / "numbers/tokenizer").exists()


@pytest.mark.parametrize(("option", "steps"), [("resume", 1), ("init_from", 4)])
def test_weights_of_another_tokenizer_are_refused(runs: Any, option: str, steps: int) -> None:
    folder, [found, other] = runs
    theirs = folder / "ddp/checkpoints/step-00000003.ckpt/tokenizer"
    said = found[option]["data"]
    assert f"was trained with the tokenizer {theirs}/tokenizer.json, and the data's tokens are those of" in said
    assert f"prepare the data with tokenizer={theirs}, or give resume_allow=[tokenizer]" in said
    assert found[option]["data,tokenizer"] == f"{steps} steps" and other[option]["data"] == said


def tokenizer_of_checkpoint(checkpoint: Path) -> dict[str, str]:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    names = [name for name in manifest["files"] if name.startswith("tokenizer/")]
    return {name.removeprefix("tokenizer/"): (checkpoint / name).read_text() for name in names}
