"""A rank without memory ends the run with exit code 4 and one message; what the run had written stays."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.callbacks.out_of_memory import OutOfMemoryWatch, explain, is_out_of_memory, requested_gib, start_history
from shardwise.checkpoint.writer import PinnedMemory
from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.metrics.memory_remedies import GpuMemory, remedies
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from tests.harness.commands import OWN, check, make_home, metrics, run

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 12.00 GiB is "
    "free. Including non-PyTorch memory, this process has 67.14 GiB memory in use."
)
# A module that asks for too much, once, on one rank.
OOM = f"""
import os
import torch
from torch.utils.data import DataLoader
import mine

def ask(how):
    if how == "gpu":
        raise torch.OutOfMemoryError({CUDA_TEXT!r})
    torch.empty(1 << 60 if how == "cpu" else 1 << 50, device=how)

class Module(mine.Module):
    def __init__(self, rank=1, where="training", how="gpu"):
        super().__init__()
        self.rank, self.where, self.how = str(rank), where, how
        if where == "building" and os.environ.get("RANK") == self.rank:
            ask(how)
    def training_step(self, batch, batch_idx):
        if (self.where, self.global_step, os.environ["RANK"]) == ("training", 1, self.rank):
            ask(self.how)
        return super().training_step(batch, batch_idx)
    def validation_step(self, batch, batch_idx):
        if (self.where, os.environ["RANK"]) == ("validation", self.rank):
            ask(self.how)

class Data(mine.Data):
    def val_dataloader(self):
        return DataLoader(torch.randn(8, 4), batch_size=2)
"""
WORDS = [*OWN, "module._target_=oom.Module", "data._target_=oom.Data", "checkpoint.save_every_n_steps=1"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_home(tmp_path_factory.mktemp("home"))
    (folder / "oom.py").write_text(OOM)
    return folder


def message(home: Path, *words: str) -> str:
    said = check(run(home, *WORDS, *words), 4).stderr
    assert said.startswith("error: rank ") and said.count("out of") == 1 and "Traceback" not in said, said
    return said


def test_of_two_ranks_the_one_without_memory_is_heard(home: Path) -> None:
    said = message(home, "name=two")
    assert said == (
        "error: rank 1 is out of memory: training, in step 2, micro_batch_size=2\n"
        "  20.00 GiB were asked for\n"
        "  what would need less, the cheapest first:\n"
        "    micro_batch_size=1 (global_batch_size=4 stays)\n"
        "    activation_checkpointing=full (recomputes each repeated layer in backward)\n"
        "    strategy=fsdp (parameters, gradients and optimizer state sharded over the 2 ranks)\n"
    )
    assert sorted(metrics(home / "runs" / "two", "train/loss")) == [1]
    assert [path.name for path in (home / "runs" / "two" / "checkpoints").iterdir()] == ["step-00000001.ckpt"]
    check(run(home, *WORDS, "name=two", "resume=auto", "+module.rank=7"))  # and goes on once it fits
    assert sorted(metrics(home / "runs" / "two", "train/loss"))[-1] == 3


def test_the_cpus_own_allocator_in_validation(home: Path) -> None:
    words = ["strategy=fsdp", "validate_every_n_steps=2", "+module.where=validation", "+module.how=cpu"]
    said = message(home, "name=fsdp", *words)
    assert said.startswith("error: rank 1 is out of memory: validating after step 2, micro_batch_size=2\n")
    assert "\n  4,294,967,296.00 GiB were asked for\n" in said and "strategy=" not in said
    assert (home / "runs" / "fsdp" / "checkpoints").is_dir()


@pytest.mark.parametrize(("where", "doing"), [("training", "training, in step 2"), ("building", "while starting")])
def test_a_single_rank_within_the_launchers_process(home: Path, where: str, doing: str) -> None:
    words = ["devices=1", f"name=one-{where}", "+module.rank=0", "+module.how=cpu", f"+module.where={where}"]
    said = message(home, *words)
    assert said.startswith(f"error: rank 0 is out of memory: {doing}, micro_batch_size=2\n"), said
    assert (home / "runs" / f"one-{where}" / "plan.json").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_without_memory_leaves_a_snapshot_with_stacks(home: Path) -> None:
    words = ["accelerator=cuda", "devices=1", "memory_history=true", "+module.rank=0", "+module.how=cuda"]
    said = message(home, "name=gpu", *words)
    assert "4194304.00 GiB were asked for" in said.replace(",", "") and "free on GPU 0" in said
    snapshot = pickle.loads((home / "runs" / "gpu" / "memory-rank0.pickle").read_bytes())
    assert any(entry["action"] == "oom" and entry["frames"] for entry in snapshot["device_traces"][0])


# --- what is told apart, and what is advised


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_an_error_that_came_of_one_is_one() -> None:
    for text in (CUDA_TEXT, "CUDA error: out of memory", "[…] DefaultCPUAllocator: can't allocate memory: you tried …"):
        assert is_out_of_memory(RuntimeError(text)) and is_out_of_memory(RuntimeError(f"in a worker:\n{text}"))
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("allocation on device"))
    assert is_out_of_memory(raised(ValueError("lost"), torch.OutOfMemoryError(CUDA_TEXT)))
    for other in (RuntimeError("Connection closed by peer"), ValueError("memory"), raised(KeyError("a"), OSError(28))):
        assert not is_out_of_memory(other)
    loop = RuntimeError("its own cause")
    loop.__cause__ = loop
    assert not is_out_of_memory(loop)


def test_what_was_asked_for() -> None:
    assert requested_gib(CUDA_TEXT) == 20.0
    assert requested_gib("Tried to allocate 512.00 MiB. GPU") == 0.5
    assert requested_gib("you tried to allocate 4611686018427387904 bytes. Error code 12") == 2.0**32
    assert requested_gib("CUDA error: out of memory") is None


def test_a_message_of_our_own_is_kept() -> None:
    with pytest.raises(ConfigError, match="mine"), OutOfMemoryWatch(planned()):
        raise ConfigError("mine") from MemoryError()
    with pytest.raises(ValueError, match="theirs"), OutOfMemoryWatch(planned()):
        raise ValueError("theirs")


def planned(*words: str, gpus: int = 0) -> Plan:
    [job] = compose([*OWN[:5], "max_steps=3", "micro_batch_size=6", "global_batch_size=36", *words]).jobs
    return make_plan(job.config, Host(cuda_devices=gpus, run_id="run"))


SHARDS = " (parameters, gradients and optimizer state sharded over the 2 ranks)"
OFFLOAD = "strategy=zero2 strategy.offload_optimizer=true (its state and step on the CPU; DeepSpeed)"
CHECKPOINTING = "activation_checkpointing=full (recomputes each repeated layer in backward)"
MICRO = "micro_batch_size=3 (global_batch_size=36 stays)"


@pytest.mark.parametrize(
    ("words", "advised"),
    [
        ("", [MICRO, CHECKPOINTING, OFFLOAD, "devices=N strategy=fsdp, on a machine with N GPUs"]),
        ("devices=2", [MICRO, CHECKPOINTING, "strategy=fsdp" + SHARDS, OFFLOAD]),
        ("devices=2 activation_checkpointing=full strategy=fsdp", [MICRO, OFFLOAD]),
        ("devices=2 activation_checkpointing=full strategy=fsdp precision=fp64", [MICRO]),
        (
            "devices=2 activation_checkpointing=full strategy=fsdp strategy.reshard_after_forward=false "
            "strategy.defer_gradient_sync=true",
            [MICRO, "strategy.reshard_after_forward=true", "strategy.defer_gradient_sync=false", OFFLOAD],
        ),
        (
            "devices=2 strategy=zero1",
            [MICRO, CHECKPOINTING, "strategy=zero3" + SHARDS,
             "strategy.offload_optimizer=true (its state and step on the CPU)"],
        ),
        (
            "devices=2 activation_checkpointing=full strategy=zero3 strategy.offload_optimizer=true micro_batch_size=1",
            ["strategy.offload_parameters=true"],
        ),
        ("devices=2 strategy=zero2 compile=model", [MICRO, CHECKPOINTING, "strategy=fsdp" + SHARDS,
                                                    "strategy.offload_optimizer=true (its state and step on the CPU)"]),
        ("devices=2 stage=validate strategy=fsdp", ["micro_batch_size=3"]),
        ("devices=2 stage=validate strategy=fsdp micro_batch_size=1",
         ["a smaller model, shorter samples or more devices"]),
    ],
)  # fmt: skip
def test_what_is_advised_is_what_the_plan_has_not_done(words: str, advised: list[str]) -> None:
    made = planned(*words.split(), gpus=2)
    assert remedies(made, None, None) == advised
    for advice in advised:  # each is a command line that the rules admit
        if not advice.startswith(("devices=N", "a smaller")):
            changed = advice.split(" (")[0].split()
            kept = [word for word in words.split() if not (changed[0].startswith("strategy=") and "strategy" in word)]
            planned(*kept, *changed, gpus=2)


@pytest.mark.parametrize(
    ("micro", "batch", "ranks", "smaller"),
    [(1, 8, 1, None), (2, 8, 1, 1), (5, 10, 1, 2), (7, 7, 1, 1), (9, 90, 1, 3), (8, 24, 1, 4), (7, 21, 3, 1)],
)
def test_a_smaller_micro_batch_keeps_the_global_batch(micro: int, batch: int, ranks: int, smaller: int | None) -> None:
    words = [f"micro_batch_size={micro}", f"global_batch_size={batch}", f"devices={ranks}"]
    advised = [word.split()[0] for word in remedies(planned(*words), None, None) if word.startswith("micro_batch_size")]
    assert advised == ([] if smaller is None else [f"micro_batch_size={smaller}"])
    for word in advised:
        assert planned(*words, word).global_batch_size == batch


@pytest.mark.parametrize(
    ("allocated", "reserved", "asked", "told", "is_advised"),
    [
        (60.0, 70.0, 2.0, "", True),  # it would have fitted
        (60.0, 70.0, 20.0, "", True),  # more than a tenth of the GPU
        (69.0, 70.0, 2.0, "", False),
        (60.0, 70.0, None, "", True),
        (60.0, 70.0, 2.0, "expandable_segments:True", False),
    ],
)
def test_fragments_are_spoken_of_where_they_matter(
    allocated: float, reserved: float, asked: float | None, told: str, is_advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", told)
    advised = remedies(planned(gpus=1), GpuMemory(allocated, reserved, 1.0, 80.0), asked)
    found = [word for word in advised if "PYTORCH_ALLOC_CONF=expandable_segments:True" in word]
    assert [f"({reserved - allocated:.2f} GiB" in word for word in found] == [True] * is_advised


def test_a_gpus_numbers_and_its_snapshot_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA calls answered by hand: what is measured stands in the message, and the snapshot in the run's folder."""
    answers: dict[str, Any] = {"mem_get_info": (1 << 30, 80 << 30), "memory_allocated": 60 << 30,
                               "memory_reserved": 61 << 30, "current_device": 3, "is_initialized": True}  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("blocks"))
    monkeypatch.setenv("RANK", "3")
    made = planned(f"runs_dir={tmp_path}", gpus=4)
    Path(made.run_dir).mkdir()
    said = explain(made, torch.OutOfMemoryError(CUDA_TEXT), "training, in step 9").splitlines()
    assert said[:2] == [
        "rank 3 is out of memory: training, in step 9, micro_batch_size=6",
        "  20.00 GiB were asked for; 60.00 GiB are allocated, 61.00 reserved (these included), 1.00 of 80.00 free on "
        "GPU 3",
    ]
    snapshot = Path(made.run_dir) / "memory-rank3.pickle"
    assert snapshot.read_text() == "blocks"
    assert said[-1].startswith(
        f"  {snapshot} shows every block: open it at https://pytorch.org/memory_viz; memory_history"
    )


def test_history_is_kept_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: asked.append(how))
    start_history(planned(gpus=1))
    assert asked == []
    start_history(planned("memory_history=true", gpus=1))
    assert asked == [{"max_entries": 100_000, "stacks": "python"}]


def test_a_host_without_memory_is_told_apart_from_its_gpus() -> None:
    words = ["strategy=zero3", "strategy.offload_optimizer=true", "+data.num_workers=4"]
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes.")
    said = explain(planned(*words, gpus=1), error, "while starting").splitlines()
    assert said[0] == "rank 0 is out of host memory: while starting, micro_batch_size=6"
    assert said[1] == "  1.00 GiB were asked for"
    assert said[3:] == ["    strategy.offload_optimizer=false",
                        "    checkpoint.asynchronous=false (a save then needs no copy of what a rank holds)",
                        "    fewer data.num_workers than 4, of each of the ranks on this machine"]  # fmt: skip
    with pytest.raises(MemoryError) as raised:
        PinnedMemory().like(torch.empty(2**46, device="meta"))
    said = explain(planned("checkpoint.asynchronous=false", gpus=1), raised.value, "saving").splitlines()
    assert said[0] == "rank 0 is out of host memory: saving, micro_batch_size=6"
    assert said[1] == "  262,144.00 GiB were asked for"
    assert "asynchronous" not in "".join(said)
