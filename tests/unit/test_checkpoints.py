"""What is kept and said when a run goes on."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from shardwise.checkpoint.files import named_unchanged
from shardwise.checkpoint.optimizers import tell_kept
from shardwise.checkpoint.publish import (
    _rename,
    catch_up_on_best,
    publish_again,
    read_best,
    remove,
    remove_left_over,
    write_best,
)
from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.checkpoints import damage, give_name_again, list_checkpoints
from shardwise.run_dir.files import MANIFEST, best_checkpoint_path, checkpoint_path, keep_earlier, partial_path, sync
from shardwise.run_dir.resume import differences, resumption


def test_earlier_records_stay_beside_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text in ("first", "first", "second", "third"):
        keep_earlier(path, text)
        path.write_text(text)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "plan-1.json": "first", "plan-2.json": "second", "plan.json": "third"}  # fmt: skip


def test_what_a_failed_publication_left_is_in_no_ones_way(tmp_path: Path) -> None:
    source, name = tmp_path / "step-00000002.ckpt", tmp_path / "best-00000002.ckpt"
    for folder, text in ((source, "new"), (name, "old"), (tmp_path / "best-00000002.ckpt.old.partial", "older")):
        folder.mkdir()
        (folder / "file").write_text(text)
    publish_again(source, name)
    assert (name / "file").read_text() == "new" and sorted(tmp_path.iterdir()) == [name, source]


def test_a_link_that_leads_nowhere_is_saved_over(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 2)
    partial_path(path).mkdir(parents=True)
    (partial_path(path) / MANIFEST).touch()
    for name in (path, path.with_name(path.name + ".old.partial")):
        name.symlink_to("/gone")
    assert list_checkpoints(tmp_path) == [path] and "cannot be read" in str(damage(path))  # so that it is named
    _rename(partial_path(path), path)
    assert [left.name for left in path.parent.iterdir()] == [path.name] and (path / MANIFEST).is_file()


def test_differences_name_every_value_that_is_another() -> None:
    before = {"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "seed": 0, "data": None}
    now = {"optimizer": {"lr": 0.2, "betas": [0.9, 0.95], "eps": 1.0}, "seed": 0, "data": {"size": 1}}
    assert list(differences(before, now)) == [
        "optimizer.lr 0.1 → 0.2",
        "optimizer.eps null → 1.0",
        'data null → {"size": 1}',
    ]
    assert not list(differences(before, before))


def test_a_run_that_goes_on_with_other_values_says_which(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoints" / "step-00000012.ckpt")

    def plan(*words: str):  # type: ignore[no-untyped-def]
        made = make_plan(compose(["name=run", "max_steps=20", *words]).jobs[0].config, Host(0))
        return dataclasses.replace(made, resume=checkpoint)

    assert resumption(plan()) == []  # of a checkpoint without a record nothing can be said
    (tmp_path / "plan.json").write_text(plan().to_json())
    assert resumption(plan()) == resumption(dataclasses.replace(plan("seed=1"), stage="validate")) == []
    assert resumption(plan("micro_batch_size=2", "data.num_workers=3")) == []  # the same samples all the same
    told = resumption(plan("seed=1", "optimizer.lr=0.5", "resume_allow=[seed]"))
    # Of the same optimizer's values the ranks say whether they hold: `tell_kept`
    assert told == ["goes on with other values than its checkpoint was trained with: seed 0 → 1"]
    assert resumption(plan("optimizer.lr=0.5")) == []
    none = dataclasses.replace(plan(), resume=None)
    assert resumption(none) == resumption(dataclasses.replace(none, stage="test"), "auto") == []
    assert resumption(none, "auto") == [f"resume=auto: {none.run_dir} holds no checkpoint, so the run begins anew"]
    for stage in ("fit", "validate"):
        began = dataclasses.replace(plan("init_from=/weights"), stage=stage)  # type: ignore[arg-type]
        assert resumption(began) == ["the weights are those of step-00000012.ckpt: init_from=/weights is not read"]
    assert resumption(plan("max_steps=12"))[-1].startswith("nothing left to train: max_steps=12, and step-00000012")


@pytest.mark.parametrize(
    ("words", "is_told"),
    [([], False), (["seed=1"], False), (["optimizer.lr=0.5"], True), (["schedule.warmup_steps=3"], True),
     (["resume_allow=[optimizer]"], True), (["optimizer.betas=[0.5,0.6]"], True)],
)  # fmt: skip
def test_a_run_says_that_its_optimizers_state_is_kept_when_it_is(
    tmp_path: Path, words: list[str], is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not before: another optimizer's state may be refused. The checkpoint has the Plan that it was trained with."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    made = [make_plan(compose(["name=run", "max_steps=20", *w]).jobs[0].config, Host(0)) for w in ([], words)]
    (tmp_path / "plan.json").write_text(made[0].to_json())
    options = {key: value for key, value in (made[0].optimizer or {}).items() if key != "_target_"}
    kept = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], **options)
    LambdaLR(kept, lambda step: 0.1)  # whose rate is another one than optimizer.lr at each step
    tell_kept(dataclasses.replace(made[1], resume=str(tmp_path)), [kept])
    told = capsys.readouterr().out
    assert told.startswith("the checkpoint's optimizer state, its learning rate included, is kept") == is_told
    said = {"optimizer.lr=0.5": "optimizer.lr=0.5 (it is 0.003) has no effect",
            "optimizer.betas=[0.5,0.6]": "optimizer.betas=[0.5, 0.6] (it is [0.9, 0.95]) has no effect"}  # fmt: skip
    without = [said[word] for word in words if word in said]
    assert told.count("no effect") == len(without) and all(one in told for one in without)
    unknown = dataclasses.replace(made[1], resume=str(tmp_path / "of another version"), resume_allow=())
    tell_kept(unknown, [kept])
    assert bool(capsys.readouterr().out) == bool(without)  # what holds is known all the same


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=1"], "seed 0 → 1: the run would not see the samples that it was to see; give the same seed"),
        (["global_batch_size=64"], r"global_batch_size 32 → 64: .*resume_allow=\[global_batch_size\]"),
        (["data.sequence_length=64", "resume_allow=[seed]"], "data.sequence_length .* → 64: .*give the same data"),
        (
            ["data.directory=b c", "data.corpus=null"],
            r"give the same data \(data.corpus=python_stdlib data.directory=data/python_stdlib\), or resume_allow",
        ),
        (
            ["data=mixture", "data.corpora={a: {directory: b, weight: 1}}"],
            r"give the same data \(.*config.yaml has its",
        ),
    ],
)
def test_other_samples_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    made = [make_plan(compose(["name=run", "max_steps=20", *w]).jobs[0].config, Host(0)) for w in ([], words)]
    (tmp_path / "plan.json").write_text(made[0].to_json())
    resumed = dataclasses.replace(made[1], resume=str(tmp_path / "checkpoints" / "step-00000012.ckpt"))
    with pytest.raises(ConfigError, match=said):
        resumption(resumed)
    assert resumption(dataclasses.replace(resumed, resume_allow=("seed", "global_batch_size", "data")))


def test_an_option_of_the_data_that_is_newer_than_the_run_changes_nothing_while_it_is_off(tmp_path: Path) -> None:
    off, on = (
        make_plan(compose(["name=run", "max_steps=20", *words]).jobs[0].config, Host(0))
        for words in ([], ["data.document_mask=true"])
    )
    record = json.loads(off.to_json())
    del record["data"]["document_mask"]
    (tmp_path / "plan.json").write_text(json.dumps(record))
    checkpoint = str(tmp_path / "checkpoints" / "step-00000012.ckpt")
    assert resumption(dataclasses.replace(off, resume=checkpoint)) == []
    with pytest.raises(ConfigError, match="data.document_mask null → true: .*give the same data"):
        resumption(dataclasses.replace(on, resume=checkpoint))


def test_every_damaged_checkpoint_that_is_passed_over_is_named(tmp_path: Path) -> None:
    """Whether a size tells or only a checksum, and whatever the order of the two."""

    def write(step: int, content: bytes) -> Path:
        path = checkpoint_path(tmp_path, step)
        path.mkdir(parents=True, exist_ok=True)
        (path / "data").write_bytes(content)
        files = {"data": {"bytes": 2, "sha256": hashlib.sha256(b"ok").hexdigest()}}
        (path / MANIFEST).write_text(json.dumps({"files": files, "format": 2}))
        return path

    first = write(2, b"ok")
    for step, content in ((4, b"no"), (6, b"short"), (8, b"no"), (10, b"short")):
        write(step, content)
    size, digest = "data has 5 bytes, and manifest.json says 2", "data is not what was written (another checksum)"
    told = [
        f"step-{step:08d}.ckpt is damaged: {why}" for step, why in ((10, size), (8, digest), (6, size), (4, digest))
    ]
    assert named_unchanged(str(tmp_path)) == (first, told)
    write(2, b"no")
    told.append(f"step-00000002.ckpt is damaged: {digest}")
    with pytest.raises(ConfigError) as refused:
        named_unchanged(str(tmp_path))
    assert str(refused.value) == f"{tmp_path} holds no whole checkpoint: {'; '.join(told)}; give another checkpoint"
    with pytest.raises(ConfigError) as refused:
        named_unchanged(str(first))
    assert str(refused.value) == f"{first} is damaged: {digest}; give another checkpoint"
    for step in (2, 4, 8):
        write(step, b"short")
    with pytest.raises(ConfigError) as refused:
        named_unchanged(str(tmp_path))
    assert all(f"step-{step:08d}.ckpt is damaged: {size}; " in str(refused.value) for step in (2, 4, 6, 8, 10))


def test_what_a_killed_process_has_left_is_removed_and_nothing_that_a_user_has_put_there(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for path in (
        "best-00000002.ckpt",
        "best-00000004.ckpt",
        "step-00000004.ckpt",
        "step-00000006.ckpt.partial",
        "mine",
    ):
        (folder / path).mkdir(parents=True)
        (folder / path / "file").touch()
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    for link in ("x.partial", "step-00000008.ckpt.partial", "step-00000002.ckpt"):
        (folder / link).symlink_to(elsewhere)
    remove_left_over(folder)  # no best.json: nothing says which best is the one
    kept = {"mine", "x.partial", "step-00000002.ckpt", "step-00000004.ckpt", "best-00000004.ckpt"}
    assert {path.name for path in folder.iterdir()} == kept | {"best-00000002.ckpt"}
    write_best(folder / "best-00000004.ckpt", "loss", 1.0)
    remove_left_over(folder)
    assert {path.name for path in folder.iterdir()} == kept | {"best.json"}
    remove(folder / "step-00000002.ckpt")
    assert (elsewhere / "file").exists() and not (folder / "step-00000002.ckpt").exists()


def test_a_checkpoint_that_was_being_replaced_gets_its_name_again(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 2)
    rename = os.rename

    def killed_after_the_first(source: Path, target: Path) -> None:
        if source != path:
            raise KeyboardInterrupt
        rename(source, target)

    for folder, content in ((path, "earlier"), (partial_path(path), "later")):
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(content)
    with patch("os.rename", killed_after_the_first), pytest.raises(KeyboardInterrupt):
        _rename(partial_path(path), path)
    assert not path.exists()
    give_name_again(tmp_path)
    assert (path / MANIFEST).read_text() == "earlier"
    _rename(partial_path(path), path)
    assert [(left.name, (left / MANIFEST).read_text()) for left in path.parent.iterdir()] == [(path.name, "later")]


def test_a_start_makes_up_for_the_best_checkpoint_that_a_killed_process_did_not_make(tmp_path: Path) -> None:
    words = ["name=run", f"runs_dir={tmp_path}", "checkpoint.monitor=loss", "max_steps=20"]
    plan = make_plan(compose(words).jobs[0].config, Host(0))
    last, before = checkpoint_path(plan.run_dir, 4), best_checkpoint_path(plan.run_dir, 2)
    for path in (last, before):
        path.mkdir(parents=True)
        (path / MANIFEST).write_text(path.name)
    write_best(before, "loss", 2.0)
    catch_up_on_best(plan, 4, 3.0)  # not better
    assert before.exists() and not best_checkpoint_path(plan.run_dir, 4).exists()
    catch_up_on_best(plan, 4, 1.0)
    best = best_checkpoint_path(plan.run_dir, 4)
    assert read_best(last.parent, "loss") == (1.0, str(best)) and not before.exists()
    assert (best / MANIFEST).read_text() == last.name


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step-00000002.ckpt"
    path.mkdir()
    (path / "manifest.json").touch()
    with patch("shutil.rmtree", side_effect=[None, OSError(errno.EIO, "the disk fails")]):  # as if killed there
        remove(path)
    assert "step-00000002.ckpt.removed.partial could not be removed: the disk fails" in capsys.readouterr().out
    assert [left.name for left in tmp_path.iterdir()] == ["step-00000002.ckpt.removed.partial"]


def test_a_folder_that_could_not_be_synced_is_an_error_unless_none_can(tmp_path: Path) -> None:
    with patch("os.fsync", side_effect=OSError(errno.EINVAL, "not supported")):
        sync(tmp_path)
    with patch("os.fsync", side_effect=OSError(errno.EIO, "the disk fails")), pytest.raises(OSError, match="disk"):
        sync(tmp_path)
