"""`shardwise prepare kind=images`: tar shards that the recipe reads, the same with any number of processes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recipes.image_classification.data import WebDataset
from shardwise.tools import main


def jpeg(number: int, size: tuple[int, int] = (40, 30)) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (*size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png" if number % 3 == 0 else "jpeg")
    return buffer.getvalue()


def write_classes(folder: Path, begin: int = 0, images: int = 12) -> None:
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for number in range(begin, begin + images):
            suffix = ".png" if number % 3 == 0 else (".JPG" if number % 2 else ".jpeg")
            (folder / name / f"v1.{number}{suffix}").write_bytes(jpeg(100 * label + number))


def prepare(source: Path, output: Path, *words: str) -> int:
    return main(["prepare", "kind=images", f"input={source}", f"output={output}", *words])


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.endswith(".npz")}


def images_of(folder: Path, split: str) -> list[tuple[bytes, int]]:
    found = []
    for shard in sorted(folder.glob(f"{split}-*.tar")):
        with tarfile.open(shard) as tar:
            members = [tar.extractfile(member).read() for member in tar]  # type: ignore[union-attr]
        found += [(members[n], int(members[n + 1])) for n in range(0, len(members), 2)]
    return found


@pytest.mark.parametrize("size", [(1, 1), (200, 5)])
def test_a_small_jpeg_is_packed(tmp_path: Path, size: tuple[int, int]) -> None:
    write_classes(tmp_path / "in")
    small = tmp_path / "in/cat/v1.1.JPG"
    small.write_bytes(jpeg(1, size))
    assert prepare(tmp_path / "in", tmp_path / "out", "processes=1", "validation=0.3") == 0
    packed = images_of(tmp_path / "out", "train") + images_of(tmp_path / "out", "validation")
    assert (small.read_bytes(), 0) in packed


def test_every_image_is_packed_unchanged_and_read_again(tmp_path: Path) -> None:
    write_classes(tmp_path / "in")
    (tmp_path / "in/cat/notes.txt").write_text("not an image")
    for processes in (1, 2):
        words = ["validation=0.3", f"processes={processes}", "shard_bytes=9000"]
        assert prepare(tmp_path / "in", tmp_path / f"out-{processes}", *words) == 0
    made = content_of(tmp_path / "out-1")
    assert made == content_of(tmp_path / "out-2") and sum(name.startswith("train") for name in made) > 1
    packed = images_of(tmp_path / "out-1", "train") + images_of(tmp_path / "out-1", "validation")
    files = [(p.read_bytes(), ["cat", "dog"].index(p.parent.name)) for p in (tmp_path / "in").glob("*/v1*")]
    assert sorted(packed) == sorted(files) and len(packed) == 24
    report = json.loads(made["report.json"])
    assert report["other_files"] == 1 and report["skipped"] == 0
    assert sum(sum(split["classes"].values()) for split in report["splits"].values()) == 24
    assert made["classes.txt"] == b"cat\ndog\n" and b"12" not in made["skipped.jsonl"]
    assert report["pixels"] == {"least": 1200, "median": 1200, "most": 1200}
    data = WebDataset(str(tmp_path / "out-1"), 2, 16, [0.5] * 3, [0.5] * 3, 4)
    data.check()
    data.setup("fit")
    assert len(data.splits["train"]) + len(data.splits["validation"]) == 24  # type: ignore[arg-type]
    assert data.splits["train"][0]["image"].shape == (3, 16, 16)


def test_splits_of_ones_own_are_kept(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "validation", "test")):
        write_classes(tmp_path / "in" / split, begin=10 * number, images=3)
    assert prepare(tmp_path / "in", tmp_path / "out", "processes=1") == 0
    for split in ("train", "validation", "test"):
        files = [(p.read_bytes(), ["cat", "dog"].index(p.parent.name)) for p in (tmp_path / "in" / split).glob("*/*")]
        assert sorted(images_of(tmp_path / "out", split)) == sorted(files)


def test_a_damaged_image_stops_or_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(tmp_path / "in")
    cut, text = tmp_path / "in/cat/v1.4.jpeg", tmp_path / "in/dog/v1.7.JPG"
    cut.write_bytes(cut.read_bytes()[:600])
    text.write_text("no image")
    assert prepare(tmp_path / "in", tmp_path / "out", "validation=0.3", "processes=1") == 2
    said = capsys.readouterr().err
    assert said.startswith(
        (f"error: {cut} (600 bytes) cannot be decoded: ", f"error: {text} (8 bytes) is not an image")
    )
    assert "give on_error=skip" in said and said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]  # nothing is left behind
    words = ["validation=0.3", "shard_bytes=1", "on_error=skip"]  # each image in a shard of its own
    for processes in (1, 2):
        assert prepare(tmp_path / "in", tmp_path / f"out-{processes}", *words, f"processes={processes}") == 0
    made = content_of(tmp_path / "out-1")
    assert made == content_of(tmp_path / "out-2")
    rows = [json.loads(line) for line in made["skipped.jsonl"].splitlines()]
    assert {row["path"] for row in rows} == {str(cut), str(text)}
    assert len(images_of(tmp_path / "out-1", "*")) == 22 and "2 images, listed in" in made["report.md"].decode()
    WebDataset(str(tmp_path / "out-1"), 2, 16, [0.5] * 3, [0.5] * 3, 4).check()


def test_what_cannot_be_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(tmp_path / "in")
    write_classes(tmp_path / "own/train", images=2)
    write_classes(tmp_path / "odd/train", images=2)
    (tmp_path / "odd/validation/bird").mkdir(parents=True)
    (tmp_path / "empty/cat").mkdir(parents=True)
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat/a.jpg").write_bytes(jpeg(1))
    cases: list[tuple[str, list[str], str]] = [
        ("flat", [], f"{tmp_path}/flat has 0 class folders: images lie in {tmp_path}/flat/<class>/"),
        ("empty", [], f"class folder {tmp_path}/empty/cat has 0 images (.jpg, .jpeg, .png): add some"),
        ("own", [], f"has train/ and no validation/: add it, or give input={tmp_path}/own/train"),
        ("own", ["validation=0.1"], "validation=0.1: "),
        ("odd", [], "/odd differ: cat and 1 more are in train only, bird is in validation only; every split needs"),
        ("in", ["validation=0"], "validation=0: must be above 0 and below 1"),
        ("in", ["validation=1e-9"], "validation=1e-09 of 24 images leaves a split without images"),
        ("in", ["processes=0"], "processes=0: must be at least 1"),
        ("in/cat/v1.0.png", [], "kind=images takes one folder, as input=FOLDER"),
        ("in", [f"{tmp_path}/own"], "kind=images takes one folder"),
        ("in", ["kind=text", "tokenizer=bytes"], "kind=images,text: must be text, which is the default, or images"),
        ("in", ["tokenizer=bytes"], "tokenizer"),
    ]  # fmt: skip
    for source, words, message in cases:
        assert prepare(tmp_path / source, tmp_path / "out", *words) == 2
        said = capsys.readouterr().err
        assert message in said and said.startswith("error: ") and said.count("\n") == 1, said
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("")
    assert prepare(tmp_path / "in", tmp_path / "out") == 2
    assert "is there already and is not empty: remove it, or give another output=" in capsys.readouterr().err


def test_without_pillow_the_install_line_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_classes(tmp_path / "in", images=3)
    missing: Any = None
    monkeypatch.setitem(__import__("sys").modules, "PIL", missing)
    assert prepare(tmp_path / "in", tmp_path / "out", "validation=0.5") == 2
    assert "kind=images needs Pillow: pip install pillow" in capsys.readouterr().err
