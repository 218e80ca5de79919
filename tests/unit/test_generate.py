"""`shardwise generate`: what it writes, from which checkpoint, and what it refuses. The tokenizer travels along."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tokenizers
import torch
import torch.distributed as dist
from lightning import LightningModule
from torch import nn
from torch._C._distributed_c10d import HashStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.language_modeling.model import Transformer
from recipes.language_modeling.module import LanguageModel
from shardwise.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from shardwise.weights import loading
from shardwise_tools import generate, main
from shardwise_tools.generate import TextStream
from tests.harness.saved import END, save, trained_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES: dict[str, Any] = {
    "dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 41, "max_seq_len": 48,
}  # fmt: skip


class Images(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run_of(folder: Path, tokenizer: Tokenizer | None, vocab_size: int, seed: int = 0) -> tuple[LanguageModel, Path]:
    """A run that has saved a model, with its tokenizer in its folder."""
    torch.manual_seed(seed)
    module = LanguageModel(Transformer(vocab_size=vocab_size, **SIZES))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder.mkdir(exist_ok=True)
    if tokenizer is not None:
        (folder / "tokenizer").mkdir()
        for name, content in tokenizer.files().items():
            (folder / "tokenizer" / name).write_text(content)
    model = {"_target_": "recipes.language_modeling.model.Transformer", "vocab_size": vocab_size, **SIZES}
    node = {"_target_": "recipes.language_modeling.module.LanguageModel", "model": model}
    return module, save(folder, module, node, average=True)


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["generate", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["generate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def test_the_text_is_the_models_and_a_copied_checkpoint_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, checkpoint = run_of(tmp_path / "run", trained_tokenizer(), 300)
    tokenizer, prompt = trained_tokenizer(), "once upon"
    tokens = tokenizer.encode([prompt])[0]
    for words, more in (
        ([], {}), (["temperature=0"], {"temperature": 0.0}), (["top_k=3", "seed=4"], {"top_k": 3, "seed": 4}),
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(int(more.pop("seed", 0)))
        new = module.generate(torch.tensor([tokens]), 12, **more, generator=generator)[0, len(tokens) :].tolist()
        new = new[: new.index(tokenizer.end_of_document)] if tokenizer.end_of_document in new else new
        expected = prompt + tokenizer.decode(new)
        assert len(new) > 3
        given = [f"prompt={prompt}", "max_new_tokens=12", *words]
        assert written(capsys, str(tmp_path / "run"), *given) == expected + "\n"
        elsewhere = tmp_path / "elsewhere" / "".join(words)
        shutil.copytree(checkpoint, elsewhere)
        assert written(capsys, str(elsewhere), *given) == expected + "\n"
    average = written(capsys, str(checkpoint), f"prompt={prompt}", "temperature=0", "weights=average")
    assert average != written(capsys, str(checkpoint), f"prompt={prompt}", "temperature=0")


def test_hugging_face_continues_an_export_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, tokenizer, rows in (("bpe", trained_tokenizer(), 320), ("bytes", ByteTokenizer(), 256)):
        module, _ = run_of(tmp_path / name, tokenizer, rows)
        with torch.no_grad():
            module.model.head.weight[300:] *= 50  # rows that no token uses would be drawn
        save(tmp_path / name, module, json.loads((tmp_path / name / "plan.json").read_text())["module"])
        assert main(["export", str(tmp_path / name), "format=hf"]) == 0
        folder = tmp_path / name / "export-hf"
        theirs, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.vocab_size == rows
        assert theirs.eos_token_id == model.config.eos_token_id == tokenizer.end_of_document
        for prompt in ("once upon a größe", "the end"):
            given = theirs(prompt, return_tensors="pt", add_special_tokens=False)
            assert given["input_ids"].tolist() == tokenizer.encode([prompt])
            new = model.generate(**given, do_sample=False, max_new_tokens=20, pad_token_id=theirs.eos_token_id)
            new = new[0, given["input_ids"].shape[1] :]
            ours = written(capsys, str(tmp_path / name), f"prompt={prompt}", "temperature=0", "max_new_tokens=20")
            assert len(new) > 3 and ours == prompt + theirs.decode(new, skip_special_tokens=True) + "\n"


def test_prompts_of_a_file_are_continued_as_each_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path / "run", trained_tokenizer(), 300)
    run, prompts = (
        str(tmp_path / "run"),
        ["once", "upon a time there was 日本", "größe \u2028 more", "x", "the end"],
    )
    (tmp_path / "p.txt").write_text("\n".join(prompts[:2]) + "\n\n" + "\n".join(prompts[2:]) + "\n\n")
    (tmp_path / "p.jsonl").write_text("\ufeff" + "".join(json.dumps({"prompt": p, "id": 1}) + "\n" for p in prompts))
    lines = [json.loads(line) for line in written(capsys, run, f"input={tmp_path}/p.txt", "seed=3").split("\n")[:-1]]
    assert [line["prompt"] for line in lines] == prompts
    for number, line in enumerate(lines):
        alone = written(capsys, run, f"prompt={prompts[number]}", f"seed={3 + number}")
        assert alone == f"{line['prompt']}{line['text']}\n"
        assert line["ended"] is (line["tokens"] < 200)
    out = tmp_path / "out.jsonl"
    assert written(capsys, run, f"input={tmp_path}/p.jsonl", "seed=3", "batch_size=2", f"output={out}") == ""
    assert [json.loads(line) for line in out.read_text().split("\n")[:-1]] == lines
    assert any(line["ended"] for line in lines) and len({line["tokens"] for line in lines}) > 1
    said = refused(capsys, run, f"input={tmp_path}/p.jsonl", f"output={out}")
    assert "out.jsonl is there already, and nothing is overwritten: give another output=" in said


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "make room, or give another output="), (errno.EACCES, "give another output=")]
)
def test_a_file_that_cannot_be_written_is_told_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    _, checkpoint = run_of(tmp_path, ByteTokenizer(), 256)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')

    def fail(*args: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(generate, "_continued", fail)
    said = refused(capsys, str(checkpoint), f"input={tmp_path}/p.jsonl", f"output={tmp_path}/o", "max_new_tokens=1")
    assert said == f"error: {tmp_path}/o cannot be written: {os.strerror(number)}; {remedy}\n"


def test_the_text_ends_with_its_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, checkpoint = run_of(tmp_path, ByteTokenizer(), 256)
    with torch.no_grad():
        module.model.head.weight.zero_()  # every token is as likely; the first is that which ends a document
    save(tmp_path, module, json.loads((tmp_path / "plan.json").read_text())["module"])
    assert written(capsys, str(checkpoint), "prompt=once", "temperature=0") == "once\n"


def test_ctrl_c_ends_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(tmp_path, ByteTokenizer(), 256)
    calls: list[int] = []
    own = TextStream.add

    def add(self: TextStream, token: int) -> str:
        calls.append(token)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return own(self, token)

    monkeypatch.setattr(TextStream, "add", add)
    assert main(["generate", str(tmp_path), "prompt=once"]) == 130
    out, err = capsys.readouterr()
    assert out.startswith("once") and out.endswith("\n") and err == "shardwise: stopped by Ctrl-C\n"


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(tmp_path / "run", ByteTokenizer(), 256)
    (tmp_path / "p.txt").write_text("once\nupon")
    for words in (["prompt=once"], [f"input={tmp_path}/p.txt"]):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "w") as out:
            monkeypatch.setattr("sys.stdout", out)
            assert main(["generate", str(tmp_path / "run"), "max_new_tokens=3", *words]) == 0
            monkeypatch.undo()


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), trained_tokenizer(258)], ids=["bytes", "bpe"])
def test_a_character_is_shown_when_it_is_whole(tokenizer: Tokenizer) -> None:
    text = "a größe, 日本語 🙂🙂 end" * 20
    [tokens] = tokenizer.encode([text])
    stream = TextStream(tokenizer, tokens[:3])
    pieces = [stream.add(token) for token in tokens[3:]]
    assert "".join(pieces) == text[len(tokenizer.decode(tokens[:3])) :]
    assert "\ufffd" not in "".join(pieces) and "" in pieces and stream.end() == ""
    assert len(stream.tokens) < 50  # what is decoded again does not grow
    half = TextStream(tokenizer, tokens[:3])
    for token in tokenizer.encode(["日"])[0][:-1]:
        assert half.add(token) == ""
    assert half.end() in ("\ufffd", "\ufffd\ufffd")


def test_a_space_that_stands_before_a_token_is_kept() -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁one": 0, "▁two": 1, END: 2}, unk_token=END))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    made.add_special_tokens([END])
    tokenizer = HuggingFaceTokenizer(made.to_str(), {}, "words")
    stream = TextStream(tokenizer, [0])
    assert [stream.add(token) for token in (1, 0, 1)] == [" two", " one", " two"]


def test_words_that_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, images, unknown = str(tmp_path / "run"), tmp_path / "images", tmp_path / "unknown"
    run_of(tmp_path / "run", ByteTokenizer(), 256)
    run_of(unknown, None, 300)
    save(images, Images(), {"_target_": f"{__name__}.Images"})
    file = tmp_path / "p.jsonl"
    for words, said in (
        ([run], 'give prompt="…", or input=FILE with one prompt each line, and not both'),
        ([run, "prompt=a", f"input={file}"], "and not both"),
        (["prompt=a"], "generate takes one run or checkpoint, and got none"),
        ([f"{run}/nowhere", "prompt=a"], "nowhere: there is no such run or checkpoint; give runs/<id>"),
        ([str(images), "prompt=a"], "Images cannot continue texts: it has no vocab_size, context_length, make_cache"),
        ([str(unknown), "prompt=a"], "holds no tokenizer, since its data did not say theirs: give tokenizer=PATH"),
        ([str(unknown), "prompt=a", f"tokenizer={tmp_path}/none"], "none cannot be read"),
        ([run, "prompt="], "prompt has no tokens, and the model continues at least one: give it some text"),
        ([run, f"prompt={'a' * 49}"], "prompt has 49 tokens, and the model sees at most 48: shorten it"),
        ([run, "prompt=a", "temperature=-1"], "temperature=-1.0: must be at least 0"),
        ([run, "prompt=a", "top_p=0"], "top_p=0.0: must be above 0 and at most 1"),
        ([run, "prompt=a", "top_k=0"], "top_k=0: must be at least 1"),
        ([run, "prompt=a", "max_new_tokens=0"], "max_new_tokens=0: must be at least 1"),
        ([run, "prompt=a", "seed=-1"], "seed=-1: must be at least 0"),
        ([run, "prompt=a", "output=x"], "output=x is for input=FILE"),
        (
            ["gone", f"input={file}", "output=no/x"],
            "output=no/x: there is no folder no; make it, or give another output=",
        ),
        ([run, "Print the"], 'give the text to continue as prompt="Print the"'),
        ([run, "prompt=a\udcff"], "prompt is no Unicode at character 1"),
        ([run, "prompt=a", f"seed={2**64}"], "must be below 2^64; give a smaller one"),
        ([run, "prompt=a", "temperature=1e-45"], "must be at least 1e-06, or 0, which takes the most likely token"),
        ([run, "prompt=a", "device=tpu"], "device=tpu: must be one of auto, cpu, cuda"),
        ([run, "prompt=a", "temprature=1"], "temprature: there is no such option (did you mean temperature?)"),
        ([run, f"input={tmp_path}/none"], "none cannot be read: No such file or directory; give another file"),
    ):
        assert said in refused(capsys, *words), words
    for content, said in (
        ("", "p.jsonl is empty: it needs one prompt each line"),
        ('{"prompt": "a"}\nonce', "p.jsonl, line 2 is no JSON: Expecting value"),
        ('{"prompt": "a"}\n{"text": "a"}', 'p.jsonl, line 2 needs a "prompt" that is text'),
        ('{"prompt": 3}', 'p.jsonl, line 1 needs a "prompt" that is text'),
        ('{"prompt": "a"}\n{"prompt": ""}', "line 2, has no tokens"),
        ('{"prompt": "a"}\n\n{"prompt": "b\\ud800"}', "line 3, is no Unicode at character 1"),
        ("\n \n", "p.jsonl is empty"),
    ):
        file.write_text(content)
        assert said in refused(capsys, run, f"input={file}"), content
    file.write_bytes(b'{"prompt": "\xff"}')
    assert "p.jsonl is no UTF-8 text" in refused(capsys, run, f"input={file}")
    assert main(["generate", "--help"]) == 0
    assert "top_p=0.9" in capsys.readouterr().out


def test_chat_continues_each_line_and_a_line_that_is_too_long_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(tmp_path, trained_tokenizer(), 300)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"once\n\n{'a ' * 99}\nupon"))
    assert main(["chat", str(tmp_path), "max_new_tokens=5", "temperature=0"]) == 0
    out, err = capsys.readouterr()
    expected = [written(capsys, str(tmp_path), f"prompt={p}", "max_new_tokens=5", "temperature=0")
                for p in ("once", "upon")]  # fmt: skip
    assert out == "".join(expected) and "the model sees at most 48: shorten it" in err
    assert main(["chat", str(tmp_path), "prompt=once"]) == 2
    assert "chat reads prompts line by line" in capsys.readouterr().err


def test_a_model_of_256_tokens_without_a_tokenizer_has_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, None, 256)
    assert written(capsys, str(tmp_path), "prompt=once", "max_new_tokens=3").startswith("once")


def test_a_space_at_the_end_is_noted_and_a_damaged_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, checkpoint = run_of(tmp_path, trained_tokenizer(), 300)
    for prompt, noted in (("once ", True), ("once", False)):
        assert main(["generate", str(tmp_path), f"prompt={prompt}", "max_new_tokens=2"]) == 0
        out, err = capsys.readouterr()
        assert out.startswith(prompt) and ("a prompt ends in a space" in err) is noted
    tensors = next(checkpoint.rglob("*.distcp"))
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 0xFF
    tensors.write_bytes(content)
    assert f"{tensors.name} is not what was written" in refused(capsys, str(tmp_path), "prompt=once")
    older = checkpoint.with_name("step-00000001.ckpt")
    run_of(tmp_path / "other", None, 300)[1].rename(older)
    assert main(["generate", str(tmp_path), "prompt=once", "max_new_tokens=2"]) == 0
    out, err = capsys.readouterr()
    said = f"{checkpoint.name} is damaged: {tensors.name} is not what was written (another checksum)"
    assert out.startswith("once") and err == f"{said}; taking {older.name}\n"
    assert f"{checkpoint} is damaged" in refused(capsys, str(checkpoint), "prompt=once")


def test_a_checkpoint_that_its_run_removes_gives_way_to_a_newer_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checkpoint = run_of(tmp_path, trained_tokenizer(), 300)
    newer = checkpoint.with_name("step-00000009.ckpt")
    own = loading.read_metadata

    def read(path: Path) -> Any:
        if path == checkpoint:
            checkpoint.rename(newer)
        return own(path)

    monkeypatch.setattr(loading, "read_metadata", read)
    assert written(capsys, str(tmp_path), "prompt=once", "max_new_tokens=2").startswith("once")
    newer.rename(checkpoint)
    assert f"{checkpoint} vanished while it was read" in refused(capsys, str(checkpoint), "prompt=once")
