"""Exported weights are the checkpoint's, to the bit, and Hugging Face's Llama computes with them what ours does."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import LightningModule
from safetensors import safe_open
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from transformers import LlamaForCausalLM

from recipes.language_modeling.model import Transformer
from recipes.language_modeling.module import LanguageModel
from shardwise.checkpoint.state import persistent_buffers
from shardwise.weights.safetensors import Entry, list_weights, shards
from shardwise_tools import main
from tests.harness.saved import save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES: dict[str, Any] = {
    "vocab_size": 61, "dim": 24, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 41, "max_seq_len": 32,
}  # fmt: skip
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


class Foreign(LightningModule):
    """A module that knows nothing of Hugging Face, with buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(5), nn.Linear(5, 3)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def language_model(**more: Any) -> tuple[LanguageModel, dict[str, Any]]:
    torch.manual_seed(0)
    model = Transformer(**SIZES, **more)
    node = {"_target_": "recipes.language_modeling.module.LanguageModel",
            "model": {"_target_": "recipes.language_modeling.model.Transformer", **SIZES, **more}}  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return LanguageModel(model), node


def export(*words: str) -> None:
    assert main(["export", *words]) == 0


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def load(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            found |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    return found


def state(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(persistent_buffers(module))


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_shards_hold_what_one_file_would(tmp_path: Path) -> None:
    module, node = language_model()
    checkpoint = save(tmp_path, module, node)
    export(str(tmp_path), "format=safetensors")
    one = tmp_path / "export-safetensors"
    assert [file.name for file in one.iterdir()] == ["model.safetensors"]
    check_equal(load(one), state(module))
    export(str(checkpoint), "format=safetensors", f"out={tmp_path}/many", "shard_gb=0.00001")
    names = sorted(file.name for file in (tmp_path / "many").iterdir())
    total = len(names) - 1
    assert total > 3 and names == [
        *(f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)), "model.safetensors.index.json",
    ]  # fmt: skip
    check_equal(load(tmp_path / "many"), state(module))
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in module.parameters())
    stored = list_weights(tmp_path / "many", "x")
    assert {name: tensor.file.name for name, tensor in stored.items()} == index["weight_map"]


def test_an_export_that_has_its_name_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, *language_model())
    synced: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    export(str(tmp_path), "format=hf", f"out={tmp_path}/out")
    assert {path.name for path in (tmp_path / "out").iterdir()} | {"out.partial", tmp_path.name} <= synced


def test_a_shard_is_full_before_the_next_begins() -> None:
    entries = [Entry(str(i), (size,), "float32", 4) for i, size in enumerate([2, 1, 1, 9, 1, 2, 1])]
    cut = [[entry.name for entry in shard] for shard in shards(entries, 16)]
    assert cut == [["0", "1", "2"], ["3"], ["4", "5", "6"]]


def test_torch_has_a_state_dict(tmp_path: Path) -> None:
    module, other = Foreign(), Foreign()
    module.norm.running_mean.normal_()
    module.norm.num_batches_tracked.fill_(7)
    save(tmp_path, module, {})
    export(str(tmp_path), "format=torch", "dtype=fp32")
    found = torch.load(tmp_path / "export-torch/model.pt", weights_only=True)
    other.load_state_dict(found)
    check_equal(dict(other.state_dict()), dict(module.state_dict()))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_dtype_is_that_of_floating_point_tensors(tmp_path: Path, dtype: str) -> None:
    module = Foreign()
    save(tmp_path, module, {})
    export(str(tmp_path), "format=safetensors", f"dtype={dtype}")
    to = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    expected = {n: t.to(to) if t.is_floating_point() else t for n, t in state(module).items()}
    check_equal(load(tmp_path / "export-safetensors"), expected)


def test_the_average_is_of_parameters_and_buffers_are_as_they_are(tmp_path: Path) -> None:
    module = Foreign()
    save(tmp_path, module, {}, average=True)
    export(str(tmp_path), "format=safetensors", "weights=average")
    expected = {name: tensor.detach() + 1 for name, tensor in module.named_parameters()}
    check_equal(load(tmp_path / "export-safetensors"), expected | dict(persistent_buffers(module)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", [None, SCALING])
def test_hugging_face_s_llama_has_our_logits(tmp_path: Path, tied: bool, scaling: Any) -> None:
    more = {"tie_embeddings": tied, "rope_scaling": scaling, "rope_theta": 100.0, "norm_eps": 1e-3}
    module, node = language_model(**more)
    save(tmp_path, module, node)
    export(str(tmp_path), "format=hf", "shard_gb=0.00001")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "export-hf")
    assert theirs.dtype == torch.float32
    tokens = torch.randint(0, 61, (2, 32))
    with torch.no_grad():
        ours = module.model.head(module.model(tokens))
        torch.testing.assert_close(theirs(tokens).logits, ours, rtol=1e-5, atol=1e-5)
        assert ours.std() > 0.3


def test_hugging_face_s_dtype_is_that_of_the_weights(tmp_path: Path) -> None:
    save(tmp_path, *language_model())
    export(str(tmp_path), "format=hf", "dtype=bf16")
    assert json.loads((tmp_path / "export-hf/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert LlamaForCausalLM.from_pretrained(tmp_path / "export-hf").dtype == torch.bfloat16


def test_words_that_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path)
    checkpoint = save(tmp_path, Foreign(), {"_target_": f"{__name__}.Foreign"})
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    (tmp_path / "empty").mkdir()
    for words, said in (
        (
            ["exprt"],
            "shardwise exprt: there is no such tool (did you mean export?); there is bench-data, chat, doctor, export",
        ),
        (["export"], "format has no value, and nothing can be assumed for it: give format=…"),
        (["export", "format=hf"], "export takes one run or checkpoint, and got none"),
        (["export", run, run, "format=hf"], "export takes one run or checkpoint, and got"),
        (["export", run, "fromat=hf"], "fromat: there is no such option (did you mean format?)"),
        (["export", run, "format=hff"], "format=hff: must be one of safetensors, hf, torch (did you mean hf?)"),
        (["export", run, "format=hf", "format=hf"], "format=hf is given already; give it once"),
        (["export", run, "--format=hf"], "--format=hf: there is no such flag; words look like key=value"),
        (["export", run, "format=torch", "dtype=fp8"], "dtype=fp8: must be one of fp32, bf16, fp16"),
        (["export", run, "format=torch", "weights=ema"], "weights=ema: must be one of model, average"),
        (["export", run, "format=torch", "shard_gb=0"], "shard_gb=0.0: must be above 0"),
        (["export", run, "format=torch", "shard_gb=big"], "shard_gb=big: must be a number"),
        (["export", run, "format=torch", f"out={run}/taken"], "taken is not empty, and nothing is overwritten: give"),
        (["export", run, "format=torch", f"out={run}/taken/file"], "is a file: give another out="),
        (["export", run, "format=torch", "out=/proc/here"], "cannot be written: No such file or directory"),
        (["export", run, "format=torch", "weights=average"], "holds no average, the run had no ema_decay"),
        (["export", run, "format=hf"], "Foreign has no hugging_face_names and no hugging_face_config: define"),
        (["export", f"{run}/nowhere", "format=hf"], "nowhere: there is no such run or checkpoint; give runs/<id>"),
        (["export", f"{run}/empty", "format=hf"], "empty holds no whole checkpoint: neither a manifest.json nor"),
        (["export", str(checkpoint / "manifest.json"), "format=hf"], "neither a manifest.json nor checkpoints"),
    ):
        assert said in refused(capsys, *words), words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "empty", "plan.json", "taken"]
    assert main(["--help"]) == main(["export", "--help"]) == 0
    out = capsys.readouterr().out
    assert "export      a run's weights" in out and "shard_gb=5" in out


def test_other_names_than_were_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, node = language_model()
    save(tmp_path, module, {**node, "model": {**node["model"], "n_layers": 2}})
    said = refused(capsys, "export", str(tmp_path), "format=hf")
    assert "model.blocks.2.attention.wk.weight: not in hugging_face_names" in said and "and 1 more" in said
    save(tmp_path, module, {**node, "model": {**node["model"], "_target_": "my.Transformer"}})
    assert "module.model._target_=my.Transformer: Hugging" in refused(capsys, "export", str(tmp_path), "format=hf")


def test_damage_is_told_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Foreign()
    older, newer = save(tmp_path, module, {}), save(tmp_path, module, {}, step=6)
    [data] = newer.glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said = refused(capsys, "export", str(newer), "format=torch")
    assert f"{newer} is damaged: {data.name} is not what was written (another checksum)" in said
    export(str(tmp_path), "format=torch", f"out={tmp_path}/older")
    out = capsys.readouterr().out
    assert f"{newer.name} is damaged: {data.name} is not what" in out and f"exporting {older.name}" in out
    data.write_bytes(content[:-1])
    assert f"{data.name} has {len(content) - 1} bytes, and manifest.json says {len(content)}" in refused(
        capsys, "export", str(newer), "format=torch"
    )
    export(str(tmp_path), "format=torch")
    out = capsys.readouterr().out
    assert f"{newer.name} is damaged: {data.name} has" in out and f"exporting {older.name}" in out
    next(older.glob("*.distcp")).unlink()
    assert f"{data.name} is missing" in refused(capsys, "export", str(older), "format=torch", f"out={tmp_path}/x")
    assert "holds no whole checkpoint: step-00000006.ckpt is" in refused(capsys, "export", str(tmp_path), "format=hf")


def test_what_fp16_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Foreign()
    module.linear.bias.data[1] = 1e5
    save(tmp_path, module, {})
    said = refused(capsys, "export", str(tmp_path), "format=safetensors", "dtype=fp16")
    assert "dtype=fp16: linear.bias reaches 1e+05, and fp16 ends at 65504; use bf16" in said
    assert not list(tmp_path.glob("export-*"))


@pytest.mark.parametrize("moment", ["shardwise.weights.loading.read_metadata", "shardwise.weights.loading.read_tensors",
                                    "shardwise.checkpoint.files.changed"])  # fmt: skip
def test_a_checkpoint_that_its_run_removes_gives_way_to_a_newer_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run, module, steps = tmp_path / "run", Foreign(), iter([6, 9, 12, 15, 18, 21])
    node = {"_target_": f"{__name__}.Foreign"}
    save(run, module, node)
    place, _, name = moment.rpartition(".")
    own, removals = getattr(importlib.import_module(place), name), [1]

    def read(path: Path, *more: Any) -> Any:
        if removals and path.exists():
            removals.pop()
            [newest] = (run / "checkpoints").iterdir()
            save(run, module, node, next(steps))
            shutil.rmtree(newest)
        return own(path, *more)

    monkeypatch.setattr(moment, read)
    export(str(run), "format=torch")
    assert capsys.readouterr().out.startswith("step-00000006.ckpt: ")
    assert torch.load(run / "export-torch/model.pt", weights_only=True).keys() == module.state_dict().keys()
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "export-torch", "plan.json"]
    removals += [1, 1, 1]
    said = refused(capsys, "export", str(run), "format=torch", f"out={run}/x")
    assert (
        "step-00000012.ckpt vanished while it was read: a run that is under way removes its older checkpoints" in said
    )
    assert "give one that stays, a best-….ckpt" in said and not (run / "x").exists()
    removals.append(1)
    [named] = (run / "checkpoints").iterdir()
    assert f"{named} vanished" in refused(capsys, "export", str(named), "format=torch", f"out={run}/x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the full disk is Linux's /dev/full")
def test_a_full_disk_is_one_message_in_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Foreign()
    module.big = nn.Parameter(torch.ones(100_000))
    save(tmp_path, module, {})
    own = Path.mkdir

    def mkdir(path: Path, *given: Any, **more: Any) -> None:
        own(path, *given, **more)
        for name in ("model.pt", "model.safetensors") if "export-" in path.name else ():
            (path / name).symlink_to("/dev/full")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    for kind in ("torch", "safetensors"):
        said = refused(capsys, "export", str(tmp_path), f"format={kind}")
        full = f"out={tmp_path}/export-{kind} cannot be written: No space left on device; make room, or give another"
        assert full in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "plan.json"]
