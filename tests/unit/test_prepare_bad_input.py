"""What `shardwise prepare` refuses: one message each, with the file and the line, exit code 2, and nothing is left."""
# ruff: noqa: E501 (tables)

from __future__ import annotations

import builtins
import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwise_tools
from shardwise_tools.prepare import worker
from tests.harness.patience import wait_until
from tests.unit.test_prepare import ROOT, read_back, texts, write_lines

GOOD = json.dumps({"text": "one"}).encode() + b"\n"


def parquet(**columns: list[Any]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return bytes(sink.getvalue())


def zst(content: bytes) -> bytes:
    import zstandard

    return bytes(zstandard.compress(content))


# name of a file, its content, where the message says that it is wrong, and what the message says
CONTENTS: list[tuple[str, bytes, str, str]] = [
    ("a.jsonl", GOOD * 2 + b'{"text": \n', ":3", "is not one JSON object (Expecting value at character 10): correct the line"),
    ("a.json", b'[\n{"text": "x"}\n]\n', ":1", "each line must hold a whole object"),
    ("a.json", GOOD + b'{\n"text": "x"\n}\n', ":2", "convert the file to JSON lines, with `jq -c '.'` for example"),
    ("a.json", b'[\n{"text": "x"}\n]\n', ":1", "begins a list of several lines, and each line must hold a whole object"),
    ("a.json", b'[{"text": "x"},\n {"text": "y"}]\n', ":1", "if the file is one list, `jq -c '.[]'` makes lines of it (on_error"),
    ("a.jsonl", GOOD + b'{"\\ud800": 1}\n', ":2", "has no field text; it has \\ud800: name one by field="),
    ("a.jsonl", json.dumps(dict.fromkeys(map(str, range(200)))).encode(), ":1", "it has 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, … (200 in all): name"),
    ("a.jsonl.gz", b"", ":1", "has no byte of gzip data; copy it again"),
    ("a.jsonl", GOOD + b'["x"]\n', ":2", "an object with the field text: if the file is one list, `jq -c '.[]'` makes lines"),
    ("a.jsonl", GOOD + b'\n{"texd": 1, "id": 2}\n', ":3", "has no field text (did you mean texd?); it has texd, id: name"),
    ("a.jsonl", GOOD + b'{"text": 7}\n', ":2", "the field text is a number, and must be text; name another by field="),
    ("a.jsonl", GOOD + b'{"text": null}\n', ":2", "the field text is null, and must be text"),
    ("a.jsonl", GOOD + b'{"text": " \\n"}\n', ":2", "the document is empty: remove it (on_error=skip leaves such out and lists them)"),
    ("a.jsonl", GOOD + b'{"text": "\xe9"}\n', ":2", "is not UTF-8 (byte 0xe9 at position 10 of its line or file): convert it"),
    ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', ":2", "the text holds half a surrogate pair at character 0"),
    ("a.jsonl", GOOD + b'{"text": "a\\u0000b"}\n', ":2", "the text holds '\\x00', the token that ends a document: take it out (on_error"),
    ("a.jsonl", GOOD + b"[" * 100_000 + b"\n", ":2", "its brackets are nested too deep"),
    ("a.txt", b"one\ntw\xff\n", ":2", "is not UTF-8 (byte 0xff at position 6 of its line or file)"),
    ("a.txt", b"", "", "the document is empty"),
    ("a.txt.gz", gzip.compress(b"one" * 999, mtime=0)[:-9], "", "ends in the middle of its gzip data; copy it again"),
    ("a.jsonl.gz", gzip.compress(GOOD * 9, mtime=0)[:-3], ":10", "ends in the middle of its gzip data; copy it again"),
    ("a.jsonl.gz", b"no gzip", ":1", "is damaged, or no gzip file (Error -3 while decompressing data"),
    ("a.jsonl.gz", gzip.compress(GOOD, mtime=0)[:-8] + bytes(8), ":1", "is damaged, or no gzip file (Error -3 while decompressing d"),
    ("a.jsonl.zst", zst(GOOD * 9)[:-3], ":1", "ends in the middle of its zstd data; copy it again"),
    ("a.jsonl.zst", b"no zstd", ":1", "is damaged, or no zstd file ("),
    ("a.parquet", b"PAR1 no parquet", "", "is damaged, or no Parquet file ("),
    ("a.parquet", parquet(texts=["x"], id=[1]), "", "has no field text (did you mean texts?); it has texts, id: name one by"),
    ("a.parquet", parquet(text=["x", None]), ":2", "the field text is null, and must be text"),
    ("a.parquet", parquet(text=["x", ""]), ":2", "the document is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "line", "rule"), CONTENTS)
def test_bad_content_stops_with_its_place_or_is_left_out_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, line: str, rule: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    good = write_lines(tmp_path / "good.jsonl", texts(20))
    words = [str(path), str(good), "tokenizer=bytes", f"output={tmp_path / 's'}", "validation=0", "processes=1"]
    assert shardwise_tools.main(["prepare", *words]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: {path}{line}: ") and rule in said and said.endswith("and lists them)"), said
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([name, "good.jsonl"])
    assert shardwise_tools.main(["prepare", *words, "on_error=skip"]) == 0
    rows = [json.loads(row) for row in (tmp_path / "s/skipped.jsonl").read_text().splitlines()]
    assert rows[0]["path"] == str(path) and rows[0]["line"] == int(line[1:] or 0)
    assert " ".join(rows[0]["rule"].split()) in said
    assert read_back(tmp_path / "s")[-20:] == texts(20)
    report = json.loads((tmp_path / "s/report.json").read_text())
    assert report["skipped"] == len(rows) and f"{path}" in (tmp_path / "s/report.md").read_text()


# words, and what the message says; TMP is a folder with good.jsonl (20 documents), one.txt, notes.rst and a folder `other`
WORDS: list[tuple[str, str]] = [
    ("tokenizer=bytes output=TMP/s", "there is no input: name files, folders or patterns"),
    ("TMP/good.jsonl tokenizer=bytes", "output has no value"),
    ("TMP/god.jsonl tokenizer=bytes output=TMP/s", "input=TMP/god.jsonl: there is no such file or folder"),
    ("input=TMP/*.gz tokenizer=bytes output=TMP/s", "input=TMP/*.gz: no file matches this pattern"),
    ("TMP/other tokenizer=bytes output=TMP/s", "no file there has one of the endings .txt, .md, .jsonl"),
    ("TMP/notes.rst tokenizer=bytes output=TMP/s", "notes.rst: the ending says how a file is read, and must be one of .txt"),
    ("TMP/one.txt,TMP/one.txt tokenizer=bytes output=TMP/s", "one.txt is named twice among the inputs"),
    ("TMP/gone.txt tokenizer=bytes output=TMP/s", "gone.txt cannot be read (No such file or directory): correct or remove it"),
    ("TMP/good.jsonl tokenizer=bytes output=TMP/other", "other exists, and was not made by shardwise prepare: remove it"),
    ("TMP/good.jsonl tokenizer=bytes output=TMP/notes.rst", "notes.rst exists, and was not made by shardwise prepare"),
    ("TMP/good.jsonl tokenizer=bytes output=TMP/notes.rst/s", "cannot be made (Not a directory): give an output="),
    ("TMP/good.jsonl tokenizer=bytes output=TMP/s vocab_size=9", "vocab_size=9 belongs to tokenizer=train"),
    ("TMP/good.jsonl tokenizer=train vocab_size=256 output=TMP/s", "vocab_size=256: must be at least 257, which are the 256"),
    ("TMP/good.jsonl tokenizer=train vocab_size=1000000000 output=TMP/s", "must be at most 4194304; 8192 suits a small"),
    ("TMP/good.jsonl tokenizer=train vocab_size=300 end_of_document=x output=TMP/s", "names the token that ends a document"),
    ("TMP/good.jsonl tokenizer=TMP/other output=TMP/s", "TMP/other/tokenizer.json cannot be read (No such file"),
    ("TMP/good.jsonl tokenizer=bytes output=TMP/s pad_vocabulary_to=100", "pad_vocabulary_to=100: the tokenizer has 256 tok"),
    ("TMP/good.jsonl tokenizer=bytes output=TMP/s validation=1.5", "validation=1.5: must be at least 0 and below 1"),
    ("TMP/good.jsonl tokenizer=bytes output=TMP/s processes=0", "processes=0: must be at least 1"),
    ("TMP/good.jsonl tokenizer=bytes output=TMP/s on_error=ignore", "on_error=ignore: must be one of stop, skip"),
    ("TMP/good.jsonl tokenizer=bytes output=TMP/s proceses=2", "proceses: there is no such option (did you mean processes?)"),
    ("TMP/good.jsonl tokenizer=bytes output=TMP/s validation=0.0001 processes=1",
     "validation=0.0001 of 20 documents leaves no document for validation: give at least validation=0."),
    ("TMP/one.txt tokenizer=bytes output=TMP/s processes=1", "one.txt is one document; give cut_texts=10000 to cut it"),
    ("TMP/empty.jsonl tokenizer=train vocab_size=300 output=TMP/s", "validation=0.01 of 0 documents leaves no document for train: check the inputs and field="),
    ("TMP/one.txt tokenizer=train vocab_size=300 output=TMP/s", "error: validation=0.01 of 1 document"),
    ("TMP/good.jsonl field=txt tokenizer=train vocab_size=300 output=TMP/s", "error: TMP/good.jsonl:1: has no field txt"),
    ("TMP/one.txt TMP/two.txt tokenizer=bytes output=TMP/s validation=0.0001 processes=1", "validation: give at least validation=0."),
    ("TMP/good.jsonl tokenizer=bytes output=.", "output=.: name a folder that is to be made, such as output=data/books"),
    ("TMP/good.jsonl tokenizer=bytes output=/", "output=/: name a folder that is to be made"),
    ("TMP/good.jsonl kind=images output=TMP/s", "kind: there is no such option"),
    ("TMP/good.jsonl tokenizer=bytes output=TMP/link", "link is a symbolic link to other2, in whose place no folder can be put: remove"),
    ("TMP/pipe.txt tokenizer=bytes output=TMP/s", "pipe.txt is not a regular file: give a file, or leave it out"),
    ("TMP/good.jsonl tokenizer=TMP/shards output=TMP/s", "has its tokenizer in a folder of its own; give tokenizer=TMP/shards/tokenizer"),
    ("TMP/empty.jsonl tokenizer=bytes output=TMP/s processes=1", "of 0 documents leaves no document for train: check the inputs and field="),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), WORDS)
def test_words_that_cannot_work_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    write_lines(tmp_path / "good.jsonl", texts(20))
    (tmp_path / "one.txt").write_text("one text")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "notes.rst").write_text("notes")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.rst").write_text("notes")
    (tmp_path / "two.txt").write_text("another text")
    (tmp_path / "link").symlink_to("other2")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "shards/tokenizer").mkdir(parents=True)
    (tmp_path / "shards/tokenizer/tokenizer.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert shardwise_tools.main(["prepare", *words.replace("TMP", str(tmp_path)).split()]) == 2
    said = capsys.readouterr().err
    assert message.replace("TMP", str(tmp_path)) in said and said.count("error: ") == 1, said
    assert sorted(tmp_path.rglob("*")) == before


def test_the_smallest_validation_that_the_message_names_holds_out_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(5):
        source = write_lines(tmp_path / f"{seed}.jsonl", texts(20, seed))
        words = [str(source), "tokenizer=bytes", f"output={tmp_path / 's'}{seed}", "processes=1"]
        assert shardwise_tools.main(["prepare", *words, "validation=0.00001"]) == 2
        named = capsys.readouterr().err.partition("give at least ")[2].partition(",")[0]
        assert shardwise_tools.main(["prepare", *words, named]) == 0
        assert 1 <= len(read_back(tmp_path / f"s{seed}", "validation")) < 5


@pytest.mark.parametrize(("name", "package"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    real = builtins.__import__

    def without(wanted: str, *rest: Any) -> Any:
        if wanted.partition(".")[0] == package:
            raise ImportError(wanted)
        return real(wanted, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert (
        shardwise_tools.main(
            ["prepare", str(tmp_path / name), "tokenizer=bytes", f"output={tmp_path / 's'}", "processes=1"]
        )
        == 2
    )
    assert f"needs the package {package}: pip install {package}" in capsys.readouterr().err


def test_inputs_may_be_given_in_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`input=books/*.jsonl` reaches the tool as it is, or as several words, depending on the shell."""
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        write_lines(tmp_path / f"books/{number}.jsonl", texts(9, number))
    made = []
    for number, inputs in enumerate((
        ["input=books/*.jsonl"],
        ["books/0.jsonl", "books/1.jsonl", "books/2.jsonl"],
        ["input=books/0.jsonl", "input=books/1.jsonl,books/2.jsonl"],
        ["books/*.jsonl"],
        ["books"],
        ["."],
    )):  # fmt: skip
        words = [*inputs, "tokenizer=bytes", f"output=shards{number}", "validation=0", "processes=1"]
        assert shardwise_tools.main(["prepare", *words]) == 0, capsys.readouterr().err
        made.append((tmp_path / f"shards{number}/index.json").read_bytes())
    assert len(set(made)) == 1


def test_when_all_is_left_out_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(20))
    words = ["prepare", str(source), f"output={tmp_path / 's'}", "on_error=skip", "processes=1"]
    for more, first in [
        (["tokenizer=train", "vocab_size=300", "field=txt"], "a.jsonl:1: has no field txt"),
        (["tokenizer=bytes"], "a.jsonl:1: the text holds '\\x00', the token that ends a document"),
    ]:
        assert shardwise_tools.main([*words, *more]) == 2
        said = capsys.readouterr().err
        assert "on_error=skip leaves out 20 documents or files, and nothing is left" in said and first in said, said
        assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
        write_lines(source, [f"\0{n}" for n in range(20)])


def test_a_file_whose_name_is_no_utf8_is_prepared_and_listed(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jsonl")
    source = write_lines(tmp_path / name, texts(20))
    source.write_text(source.read_text() + "{broken\n")
    words = [str(tmp_path), "tokenizer=bytes", f"output={tmp_path / 's'}", "validation=0", "processes=1"]
    for _ in range(2):
        assert shardwise_tools.main(["prepare", *words, "on_error=skip"]) == 0
    assert json.loads((tmp_path / "s/inputs.jsonl").read_text())["path"] == str(source)
    assert "caf\\udce9.jsonl:21" in (tmp_path / "s/report.md").read_text()


def children_of(process: int) -> list[str]:
    found = []
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{child}/cmdline").read_text())
    return found


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"),
                                              (signal.SIGHUP, "SIGHUP")])  # fmt: skip
def test_a_signal_while_processes_start_is_one_line_and_keeps_the_trained_tokenizer(
    tmp_path: Path, number: signal.Signals, name: str
) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(300))
    words = [
        "-m",
        "shardwise",
        "prepare",
        str(source),
        "tokenizer=train",
        "vocab_size=9999",
        f"output={tmp_path / 's'}",
    ]
    command = [sys.executable, *words, "processes=3"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_until(lambda: "spawn_main" in "".join(children_of(process.pid)), "a process of the pool", 60, pause=0.001)
        os.killpg(process.pid, number)
        said = process.communicate()[1].splitlines()
    kept = tmp_path / ".s.preparing"
    assert process.returncode == 128 + number and len(said) == 4, "\n".join(said)
    assert said[1].startswith("the tokenizer has ") and said[1].endswith(
        " not 9,999: the inputs have no more pairs that stand there twice"
    )
    assert said[-1] == (
        f"shardwise: stopped by {name}: start with the same words, which takes the trained tokenizer; it alone is kept, in {kept}"
    )
    done = subprocess.run([*command[:-1], "processes=1"], env=environment, capture_output=True, text=True, check=True)
    assert "trains a tokenizer" not in done.stderr and not kept.exists()


def test_nobody_has_to_read_what_is_said(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(50))
    words = [str(source), "tokenizer=bytes", f"output={tmp_path / 's'}", "processes=1"]
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "shardwise", "prepare", *words]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    subprocess.run(command, env=environment, stdout=write, stderr=write, check=True)
    os.close(write)
    assert (tmp_path / "s/index.json").exists() and not (tmp_path / ".s.preparing").exists()


def be_killed(parts: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(20))
    words = [str(source), "tokenizer=bytes", f"output={tmp_path / 's'}", "processes=2", "validation=0"]
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_tokenize", be_killed)
        assert shardwise_tools.main(["prepare", *words]) == 2
    said = capsys.readouterr().err
    assert "error: one of 2 processes was killed, perhaps because memory ran out: start with the same words" in said
    assert shardwise_tools.main(["prepare", *words]) == 0


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    from shardwise_tools.prepare.inputs import PrepareConfig

    assert shardwise_tools.main(["prepare", "--help"]) == 0
    said = capsys.readouterr().out
    for name in PrepareConfig.__dataclass_fields__:
        assert f"{name}=" in said, name
