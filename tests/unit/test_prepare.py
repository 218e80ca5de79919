"""Text becomes token shards: every format, any number of processes, and again after a kill, always the same bytes."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import shardwise_tools
from shardwise.data.tokens import TokenShards, tokenizer_of
from shardwise.errors import ConfigError, DataError
from shardwise_tools.prepare import run as prepare_run
from shardwise_tools.prepare import work as prepare_work
from shardwise_tools.prepare.inputs import OnError, PrepareConfig
from shardwise_tools.prepare.run import prepare
from shardwise_tools.prepare.worker import held_out_number
from tests.harness.patience import wait_until

ROOT = Path(__file__).parents[2]
WORDS = ["time", "person", "year", "way", "man", "world", "hand", "child", "eye", "woman", "place", "work", "日本", "é"]


def texts(number: int, seed: int = 0) -> list[str]:
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(1, 120))) + f" {n}\n" for n in range(number)]


def write_lines(path: Path, documents: list[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": n, field: text}, ensure_ascii=n % 2 == 0) + "\n" for n, text in enumerate(documents)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def make(output: Path, *inputs: Path | str, part_bytes: int = 5000, **options: Any) -> Path:
    """`shardwise prepare` with small parts, in one process unless another number is given."""
    options = {"tokenizer": "bytes", "validation": 0.1, "processes": 1} | options
    return prepare(list(map(str, inputs)), PrepareConfig(str(output), **options), part_bytes=part_bytes, quiet=True)


def read_back(directory: Path, split: str = "train") -> list[str]:
    """The documents of a split, as text without the token that ends each."""
    shards, tokenizer = TokenShards(directory, split), tokenizer_of(directory)
    assert tokenizer is not None
    ends = [0, *shards.document_ends(0, len(shards)).tolist()]
    documents = [shards.tokens(a, b - a).tolist() for a, b in pairwise(ends)]
    assert {tokens.pop() for tokens in documents} == {tokenizer.end_of_document} and ends[-1] == len(shards)
    shards.verify()
    return [tokenizer.decode(tokens) for tokens in documents]


def content(directory: Path) -> dict[str, bytes]:
    """Every file that does not tell how long it took."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.stem != "report")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def split_of(documents: list[str], validation: float) -> tuple[list[str], list[str]]:
    is_held_out = [held_out_number(text.encode()) < validation for text in documents]
    pairs = list(zip(documents, is_held_out, strict=True))
    return [text for text, out in pairs if not out], [text for text, out in pairs if out]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every format, each file of several parts, and other files that are left out."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    folder = tmp_path_factory.mktemp("corpus")
    write_lines(folder / "a.jsonl", texts(300, 1))
    packed = write_lines(folder / "b/packed", texts(300, 2)).read_bytes()
    (folder / "b/b.jsonl.gz").write_bytes(gzip.compress(packed[:20_000]) + gzip.compress(packed[20_000:]))
    (folder / "b/c.json.zst").write_bytes(b"".join(map(zstandard.compress, (packed[:9_000], packed[9_000:]))))
    (folder / "b/packed").rename(folder / "b/README")
    for number, text in enumerate(texts(40, 3)):
        (folder / f"d{number:02}.txt").write_text(text, encoding="utf-8")
    table = pyarrow.table({"id": range(100), "text": texts(100, 4)})
    pyarrow.parquet.write_table(table, folder / "e.parquet", row_group_size=30)
    return folder


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("out") / "shards", corpus, tokenizer="train", vocab_size=400, shard_tokens=9000)


def test_without_a_tokenizer_one_is_trained_and_what_follows_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"title": f"T{number}", "text": text} for number, text in enumerate(texts(40))]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("b.md").write_text("# A note\n\nof some words\n")
    held_out = sorted(held_out_number(f"{row['title']}\n\n{row['text']}".encode()) for row in rows)
    share = (held_out[0] + held_out[1]) / 2  # one document is below it
    words = ["a.jsonl", "field=title,text", "output=my text", f"validation={share}", "processes=1"]
    assert shardwise_tools.main(["prepare", *words]) == 0
    out = capsys.readouterr().err
    assert "trains a tokenizer with 1,024 tokens, which suits" in out
    assert "validation is one document of" in out and f"give a larger validation= (now {share})" in out
    assert out.endswith("python train.py data=token_shards data.directory='my text'\n")
    assert set(read_back(Path("my text"))) < {f"{row['title']}\n\n{row['text']}" for row in rows}
    assert read_back(make(Path("notes"), "b.md", validation=0)) == ["# A note\n\nof some words\n"]
    with pytest.raises(DataError, match="a.jsonl:1: has no field body; it has title, text"):
        make(Path("other"), "a.jsonl", field="text,body")


def test_what_has_its_name_is_on_the_disk(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.readlink(f"/proc/self/fd/{file}")))
    made = make(tmp_path / "out", corpus, tokenizer="train", vocab_size=300)
    work = f"{tmp_path}/.out.preparing"
    assert {f"{work}/shards/{path.relative_to(made)}" for path in made.rglob("*")} | {str(tmp_path)} <= synced
    assert f"{work}/trained.partial/tokenizer.json.partial" in synced


def test_every_format_becomes_documents_in_the_order_of_the_files(corpus: Path, tmp_path: Path) -> None:
    made = make(tmp_path / "shards", corpus)
    everything = [*texts(300, 1), *texts(300, 2), *texts(300, 2), *texts(40, 3), *texts(100, 4)]
    train, validation = split_of(everything, 0.1)
    assert read_back(made) == train and read_back(made, "validation") == validation and len(validation) > 50
    rows = [json.loads(line) for line in (made / "inputs.jsonl").read_text().splitlines()]
    assert [Path(row["path"]).name for row in rows][:3] == ["a.jsonl", "b.jsonl.gz", "c.json.zst"] and len(rows) == 44
    assert rows[0]["sha256"] == subprocess.check_output(["sha256sum", corpus / "a.jsonl"], text=True).split()[0]
    report = json.loads((made / "report.json").read_text())
    assert sum(row["documents"] for row in report["lengths_in_tokens"]) == len(everything) == 1040
    assert report["other_endings"] == {"files": 1, "first": str(corpus / "b/README")}
    assert report["text_bytes"]["train"] == sum(len(text.encode()) for text in train)
    assert report["tokens"]["train"] == report["text_bytes"]["train"] + len(train)
    assert report["rate"]["bytes_per_second"] > 0 and report["rate"]["bare_tokenizer_bytes_per_second"] > 0
    assert "█" in (made / "report.md").read_text()


@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_makes_the_same_bytes(
    corpus: Path, undisturbed: Path, tmp_path: Path, processes: int
) -> None:
    """With a tokenizer that is trained anew, and documents that go on in the next shard."""
    made = make(
        tmp_path / "s",
        corpus,
        tokenizer="train",
        vocab_size=400,
        shard_tokens=9000,
        processes=processes,
        part_bytes=5000,
    )
    assert content(made) == content(undisturbed) and len(TokenShards(made, "train").shards) > 3
    index = json.loads((made / "index.json").read_text())
    assert (index["vocab_size"], index["tokenizer"]["name"]) == (400, "train")
    assert list(tmp_path.iterdir()) == [made]


def test_the_size_of_the_parts_changes_no_token(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    made = make(tmp_path / "s", corpus, tokenizer=str(undisturbed / "tokenizer"), shard_tokens=9000, part_bytes=1 << 22)
    assert {name: raw for name, raw in content(made).items() if name.endswith((".bin", ".ends"))} == {
        name: raw for name, raw in content(undisturbed).items() if name.endswith((".bin", ".ends"))
    }


def test_a_document_is_held_out_by_its_text_alone(tmp_path: Path) -> None:
    documents = texts(400)
    one = make(tmp_path / "one", write_lines(tmp_path / "a.jsonl", documents))
    other = make(tmp_path / "other", write_lines(tmp_path / "b.jsonl", documents[::-1], "body"), field="body")
    assert sorted(read_back(one, "validation")) == sorted(read_back(other, "validation"))
    assert 20 < len(read_back(one, "validation")) < 60
    assert "validation" not in json.loads((make(tmp_path / "none", tmp_path / "a.jsonl", validation=0.0) / "index.json")
                                          .read_text())["splits"]  # fmt: skip


KILLED = """
import sys
from shardwise_tools.prepare import work
from shardwise_tools.prepare.inputs import PrepareConfig
from shardwise_tools.prepare.run import prepare
if __name__ == "__main__":
    work._COMMIT_SECONDS = 0.0  # a short run keeps something to go on from
    config = PrepareConfig(sys.argv[2], tokenizer=sys.argv[3], validation=0.1, processes=2, shard_tokens=9000)
    prepare([sys.argv[1]], config, part_bytes=5000)
"""


def has_come_far(state: Path, documents: int, output: Path) -> bool:
    try:
        totals = json.loads(state.read_text())["totals"]
    except (OSError, ValueError):
        return output.exists()
    return sum(totals["documents"].values()) >= documents or output.exists()


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    """SIGKILL at three moments: benchmarks/prepare.py does it ten times, at random."""
    (tmp_path / "killed.py").write_text(KILLED)
    tokenizer = undisturbed / "tokenizer"
    expected = make(tmp_path / "expected", corpus, tokenizer=str(tokenizer), shard_tokens=9000)
    output, state = tmp_path / "shards", tmp_path / ".shards.preparing/state.json"
    command = [sys.executable, str(tmp_path / "killed.py"), str(corpus), str(output), str(tokenizer)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    reached: list[int] = []
    for more in (1, 100, 100):
        wanted = more + (reached[-1] if reached else 0)
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            wait_until(partial(has_come_far, state, wanted, output), f"{wanted} documents", 60, pause=0.001)
            process.send_signal(signal.SIGKILL)
            said = str(process.communicate()[1])
        assert process.returncode == -signal.SIGKILL and not output.exists(), said
        assert ("goes on after" in said) == bool(reached), said
        reached.append(sum(json.loads(state.read_text())["totals"]["documents"].values()))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"goes on after {reached[-1]:,} documents" in done.stderr
    assert content(output) == content(expected) and not state.parent.exists()


STEPS = {
    "train_tokenizer": prepare_run,
    "save_tokenizer": prepare_run,
    "write_report": prepare_run,
    "write_index": prepare_run,
    "publish": prepare_run,
}


@pytest.mark.parametrize("step", STEPS)
def test_interrupted_before_and_after_the_tokens_it_goes_on(
    corpus: Path, undisturbed: Path, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    options: Any = {"tokenizer": "train", "vocab_size": 400, "shard_tokens": 9000}
    with monkeypatch.context() as patch:
        patch.setattr(STEPS[step], step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "s", corpus, **options)
    assert not (tmp_path / "s").exists()
    assert content(make(tmp_path / "s", corpus, **options)) == content(undisturbed)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_the_same_words_again_do_nothing_and_others_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write_lines(tmp_path / "a.jsonl", texts(200)), tmp_path / "s"
    words = [f"input={source}", f"output={output}", "tokenizer=bytes", "processes=1"]
    assert shardwise_tools.main(["prepare", *words]) == 0
    before = content(output)
    assert shardwise_tools.main(["prepare", *words]) == 0
    assert "is complete already" in capsys.readouterr().err and content(output) == before
    for more, message in [
        ("validation=0.2", "was made with validation=0.01, and now validation=0.2: remove it, or give another output="),
        ("tokenizer=train vocab_size=300", "was made with a tokenizer that was there already, and now tokenizer=train"),
        ("field=id", "was made with field=text, and now field=id"),
        (f"input={write_lines(tmp_path / 'b.jsonl', texts(9))}", "was made from other inputs, which"),
    ]:
        others = [word for word in words if "tokenizer=" not in word or "tokenizer=" not in more]
        assert shardwise_tools.main(["prepare", *others, *more.split()]) == 2
        assert message in capsys.readouterr().err
    source.write_text(source.read_text().replace("time", "tame"))
    assert shardwise_tools.main(["prepare", *words]) == 2
    assert (
        f"{output} was made from other inputs, which {output}/inputs.jsonl lists: remove it" in capsys.readouterr().err
    )
    assert content(output) == before and sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "s"]


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which 100 documents of a.jsonl are done, and a line that is none stops the rest."""
    lines = write_lines(tmp_path / "a.jsonl", texts(200)).read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join([*lines[:150], "{broken\n", *lines[150:]]))
    monkeypatch.setattr(prepare_work, "_COMMIT_SECONDS", 0.0)
    with pytest.raises(DataError, match=r"a.jsonl:151: is not one JSON object \(Expecting"):
        make(tmp_path / "s", tmp_path / "a.jsonl")
    return tmp_path


def test_work_that_was_begun_goes_on_with_the_same_words_alone(begun: Path) -> None:
    source, remedy = begun / "a.jsonl", "start it as before to go on, or remove .*s.preparing to begin anew"
    with pytest.raises(DataError, match=f"begun with validation=0.1, and now validation=0.2: {remedy}"):
        make(begun / "s", source, validation=0.2)
    with pytest.raises(DataError, match=f"begun with other inputs: .*b.jsonl is new; {remedy}"):
        make(begun / "s", source, write_lines(begun / "b.jsonl", texts(3)))
    tokenizer = begun / "tokenizer"
    make(begun / "t", begun / "b.jsonl", validation=0.0, tokenizer="train", vocab_size=300)
    (begun / "t/tokenizer").rename(tokenizer)
    with pytest.raises(DataError, match=f"begun with another tokenizer.*{remedy}"):
        make(begun / "s", source, tokenizer=str(tokenizer))
    made = make(begun / "s", source, on_error=OnError.skip)  # this does not change what is done
    fresh = make(begun / "fresh", source, on_error=OnError.skip)
    assert content(made) == content(fresh) and len(read_back(made)) + len(read_back(made, "validation")) == 200
    assert [json.loads(line)["line"] for line in (made / "skipped.jsonl").read_text().splitlines()] == [151]
    assert "a.jsonl:151`: is not one JSON object" in (made / "report.md").read_text()


def test_inputs_that_have_changed_since_are_refused(begun: Path) -> None:
    source = begun / "a.jsonl"
    source.write_text(source.read_text().replace("{broken\n", ""))
    with pytest.raises(DataError, match="begun with other inputs: .*a.jsonl has changed since"):
        make(begun / "s", source)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_an_input_of_the_same_size_and_time_is_refused_if_what_was_done_of_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = tmp_path / f"a.{kind}"

    def write(word: str) -> None:
        documents = [f"{word} {n:05d}" + " x" * 50 for n in range(400)]
        if kind == "parquet":
            import pyarrow
            import pyarrow.parquet

            table = pyarrow.table({"text": documents})
            pyarrow.parquet.write_table(table, source, row_group_size=40, compression="none", use_dictionary=False)
        else:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
            source.write_bytes(gzip.compress(lines, 0, mtime=0) if kind.endswith("gz") else lines)
        os.utime(source, ns=(0, 0))

    def stop(work: Any, *_: Any) -> None:
        raise KeyboardInterrupt

    write("one")
    monkeypatch.setattr(prepare_work, "_COMMIT_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_work.Work, "finish", stop)
        patch.setattr(prepare_run.Progress, "show", stop)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "s", source)
    write("two")
    with pytest.raises(DataError, match=rf"a.{kind} has changed since a part of it was prepared: .* remove .*.s.prep"):
        make(tmp_path / "s", source)
    write("one")
    assert content(make(tmp_path / "s", source)) == content(make(tmp_path / "fresh", source))


def test_folders_behind_links_are_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "elsewhere/b.jsonl", texts(30, 2))
    write_lines(tmp_path / "in/a.jsonl", texts(30, 1))
    (tmp_path / "in/linked").symlink_to(tmp_path / "elsewhere")
    assert read_back(make(tmp_path / "s", tmp_path / "in", validation=0.0)) == [*texts(30, 1), *texts(30, 2)]
    (tmp_path / "elsewhere/up").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="in/linked/up links to .*, a folder that it lies in: remove the link"):
        make(tmp_path / "t", tmp_path / "in")


def test_texts_are_cut_at_empty_lines_of_windows_too(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {n}\n" + "words and words\n" * 5 + "\n" for n in range(40)]
    (tmp_path / "unix.txt").write_bytes("".join(paragraphs).encode())
    (tmp_path / "windows.txt").write_bytes("".join(paragraphs).replace("\n", "\r\n").encode())
    for name in ("unix", "windows"):
        made = read_back(make(tmp_path / name, tmp_path / f"{name}.txt", validation=0.0, cut_texts=90))
        assert [text.replace("\r\n", "\n") for text in made] == paragraphs


def test_a_folder_that_was_made_by_skipping_is_not_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write_lines(tmp_path / "a.jsonl", texts(200)), tmp_path / "s"
    source.write_text(source.read_text() + "{broken\n")
    words = ["prepare", f"input={source}", f"output={output}", "tokenizer=bytes", "processes=1"]
    assert shardwise_tools.main([*words, "on_error=skip"]) == 0
    assert shardwise_tools.main(words) == 2
    assert "made with on_error=skip, and now on_error=stop: remove it" in capsys.readouterr().err


def test_a_second_writer_is_refused_or_waits(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", texts(50))
    with prepare_work.locked(tmp_path / "s", waits=False):
        with pytest.raises(DataError, match="s is being prepared by another process: wait for it or stop it, or give"):
            make(tmp_path / "s", tmp_path / "a.jsonl")
        with pytest.raises(DataError, match="by another process"):
            make(tmp_path / "s", tmp_path / "a.jsonl", processes=2)
    make(tmp_path / "s", tmp_path / "a.jsonl")


FULL = """
import resource, sys
from shardwise_tools.prepare import work
import shardwise_tools
if __name__ == "__main__":
    work._COMMIT_SECONDS = 0.0
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
    sys.exit(shardwise_tools.main(["prepare", *sys.argv[2:]]))
"""


def test_a_full_disk_is_one_message_and_keeps_what_is_done(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: writing fails in the same place."""
    sources = [str(write_lines(tmp_path / f"{n}.jsonl", texts(500, n))) for n in range(30)]
    words = [*sources, f"output={tmp_path / 's'}", "tokenizer=bytes", "processes=1"]
    done = subprocess.run(
        [sys.executable, "-c", FULL, "4500000", *words], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/src"},
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert ".s.preparing cannot be written (File too large): make room" in done.stderr
    assert not (tmp_path / "s").exists()
    kept = json.loads((tmp_path / ".s.preparing/state.json").read_text())["totals"]["documents"]["train"]
    assert kept > 1000
    assert shardwise_tools.main(["prepare", *words]) == 0
    expected = tmp_path / "expected"
    assert shardwise_tools.main(["prepare", *sources, f"output={expected}", "tokenizer=bytes", "processes=1"]) == 0
    assert content(tmp_path / "s") == content(expected)
