"""Interrupts runs in every way, again and again, and holds them to the run that nobody interrupted.

Used by `make chaos` (benchmarks/chaos.py) and, for a few minutes, by test_chaos.py.
"""

from __future__ import annotations

import csv
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from shardwise.checkpoint.files import changed
from shardwise.run_dir.checkpoints import list_checkpoints
from tests.harness.commands import Running, check, run
from tests.harness.patience import exit_code, slowness, wait_until

STEPS, SAVE_EVERY, RANKS = 120, 5, 2
PATIENCE = 90.0  # seconds until something that must come has come, on an idle machine: see tests/harness/patience.py
# The time limit without progress of a run that meets SIGSTOP, on an idle machine; in set-up it is three times as long.
# All other runs keep the usual limit: a busy machine would end them as hung, and they would come back once more.
HANG_SECONDS = {"cpu": 10.0, "cuda": 15.0}
SUBJECT = """
import os, time
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 96

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(x)))

class Subject(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer(), Layer())
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)
    def loss(self, batch):
        return nn.functional.cross_entropy(self.head(self.norm(self.layers(batch[0]))).float(), batch[1])
    def training_step(self, batch, batch_idx):
        time.sleep(float(os.environ.get("PAUSE", 0)))
        return self.loss(batch)
    def validation_step(self, batch, batch_idx):
        time.sleep(2 * float(os.environ.get("PAUSE", 0)))
        self.log("validation/loss", self.loss(batch) + 0 * torch.rand(()), sync_dist=True)
    def configure_optimizers(self):
        groups = [{"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
                  {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.drop = nn.Dropout(0.2)
    def forward(self, x):
        return x + self.drop(self.body(x))

class Divided(Subject):
    tensor_parallel_layers = {
        "embedding": "embedding", "layers.*.body": "gather", "layers.*.body.0": "column", "layers.*.body.2": "row",
        "norm": "norm", "head": "head",
    }
    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(40, WIDTH), nn.Sequential(Pair(), Pair(), Pair())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40)
    def loss(self, batch):
        tokens = (batch[0][:, :17] * 10).long() % 40
        logits = self.head(self.norm(self.layers(self.embedding(tokens[:, :-1]))))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

class Noise(Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), index % 3

class Data(LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size
    def train_dataloader(self):
        return DataLoader(Noise(25 * 8), batch_size=self.batch_size, shuffle=True, num_workers=1)
    def val_dataloader(self):
        return DataLoader(Noise(30), batch_size=2)
"""
WORDS = [
    "recipe=custom", "module._target_=subject.Subject", "data._target_=subject.Data",
    "+data.batch_size=${micro_batch_size}", "micro_batch_size=2",
    "validate_every_n_steps=10", f"checkpoint.save_every_n_steps={SAVE_EVERY}", "checkpoint.keep_last=3",
    "checkpoint.max_failures=1000", "checkpoint.monitor=validation/loss", "log_every_n_steps=1",
    "runs_dir=runs", "resume=auto",
]  # fmt: skip
STRATEGIES = ["ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3"]
# What a name means besides a strategy of this name
LAYOUTS = {
    "fsdp_hybrid": ["strategy=fsdp_hybrid", "strategy.shard_size=2"],
    "pipeline": ["strategy=fsdp", "strategy.pipeline_parallel_size=2"],
    "tensor": ["strategy=fsdp", "strategy.tensor_parallel_size=2", "module._target_=subject.Divided"],
}


def words_for(strategy: str, accelerator: str, ranks: int, steps: int) -> list[str]:
    """Of a strategy or of a layout."""
    sizes = [f"devices={ranks}", f"global_batch_size={4 * ranks}", f"max_steps={steps}"]
    layout = LAYOUTS.get(strategy, [f"strategy={strategy}"])
    return [*WORDS, *sizes, f"accelerator={accelerator}", "deterministic=true", *layout]


@dataclass
class Result:
    strategy: str
    fault: str
    survived: bool
    exit_code: int | None  # None: it went on
    in_place: bool  # brought back by its launcher, or never gone
    steps_lost: int | None = None  # that were made before and had to be made again
    seconds: float | None = None  # from the fault to the next step
    told: str = ""  # what is wrong, if anything


class Trouble(Exception):
    """Something that must never be."""


class Life:
    """One process tree of a run."""

    def __init__(self, home: Path, name: str, number: int, words: list[str], pause: float) -> None:
        (home / "tmp").mkdir(exist_ok=True)
        os.environ |= {"PAUSE": str(pause), "TMPDIR": str(home / "tmp")}
        try:
            self.running = Running(home, f"{name}-{number}", *words, f"name={name}")
        finally:
            del os.environ["PAUSE"], os.environ["TMPDIR"]
        self.process = self.running.process

    def text(self) -> str:
        return self.running.log.read_text()

    def told(self) -> str:
        """Its errors and restarts, and its last lines."""
        return "\n".join([*re.findall(r"^(?:shardwise|error): .*", self.text(), re.MULTILINE), self.text()[-3000:]])

    def step(self) -> int:
        """The last that it has told of."""
        found = re.findall(r"^step (\d+)/\d", self.text(), re.MULTILINE)
        return int(found[-1]) if found else -1

    def wait(self, until: Callable[[], Any], what: str) -> None:
        """Until then, or its end."""
        is_done = lambda: until() or self.process.poll() is not None  # noqa: E731
        wait_until(is_done, what, PATIENCE, self.told, pause=0.02)

    def ranks(self) -> dict[int, int]:
        return self.running.ranks()

    def end(self) -> int:
        """Its exit code, once nothing of it is left."""
        code = exit_code(self.process, PATIENCE, self.told)
        self.running.wait_until_gone()
        return code


# What is done to them. Each returns the exit codes that it may end with; none: it goes on.


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_one(life: Life, chance: random.Random, folder: Path) -> set[int]:
    if ranks := life.ranks():
        send(chance.choice(list(ranks.values())), signal.SIGKILL)
    return {137}


def kill_all(life: Life, chance: random.Random, folder: Path) -> set[int]:
    for pid in life.ranks().values():
        send(pid, signal.SIGKILL)
    return {137}


def kill_launcher(life: Life, chance: random.Random, folder: Path) -> set[int]:
    send(life.process.pid, signal.SIGKILL)
    return {-9}


def term_one(life: Life, chance: random.Random, folder: Path) -> set[int]:
    if ranks := life.ranks():
        send(chance.choice(list(ranks.values())), signal.SIGTERM)
    return {5, 0}


def term_all_skewed(life: Life, chance: random.Random, folder: Path) -> set[int]:
    for pid in chance.sample(pids := list(life.ranks().values()), len(pids)):
        send(pid, chance.choice([signal.SIGTERM, signal.SIGUSR2]))
        time.sleep(chance.uniform(0, 1))
    return {5, 0}


def term_everything(life: Life, chance: random.Random, folder: Path) -> set[int]:
    """Data workers too, as a job manager does."""
    for pid in life.running.pids():
        send(pid, signal.SIGTERM)
    return {5, 0}


def term_launcher_twice(life: Life, chance: random.Random, folder: Path) -> set[int]:
    for _ in range(2):
        send(life.process.pid, signal.SIGTERM)
        time.sleep(chance.uniform(0, 0.3))
    return {5, 0}


def term_in_validation(life: Life, chance: random.Random, folder: Path) -> set[int]:
    """Within a validation: after a step that is a multiple of ten."""
    life.wait(lambda: life.step() % 10 == 0 and life.step() > 0, "a validation")
    return term_one(life, chance, folder)


def save_and_go_on(life: Life, chance: random.Random, folder: Path) -> set[int]:
    if ranks := life.ranks():
        send(chance.choice(list(ranks.values())), signal.SIGUSR1)
    life.wait(lambda: "asked by a signal" in life.text(), "the save that was asked for")
    return set()


def stop_one(life: Life, chance: random.Random, folder: Path) -> set[int]:
    """For longer than the watchdog waits."""
    if ranks := life.ranks():
        send(chance.choice(list(ranks.values())), signal.SIGSTOP)
    return {6}


def kill_in_a_write(life: Life, chance: random.Random, folder: Path) -> set[int]:
    life.wait(lambda: list(folder.glob("step-*.partial")), "a save")
    return kill_all(life, chance, folder)


def fill_up(life: Life, chance: random.Random, folder: Path) -> set[int]:
    """Every byte of the file system that the checkpoints are on."""
    before = life.text().count("could not be written")
    with (folder / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(2**16))
    life.wait(lambda: life.text().count("could not be written") > before, "a save that fails")
    (folder / "filler").unlink()
    return set()


def make_read_only(life: Life, chance: random.Random, folder: Path) -> set[int]:
    before = life.text().count("could not be written")
    mount("--bind", folder, folder)
    try:
        mount_read_only(folder)
        life.wait(lambda: life.text().count("could not be written") > before, "a save that fails")
    finally:
        unmount(folder)
    return set()


def delete_a_shard(life: Life, chance: random.Random, folder: Path) -> set[int]:
    kill_launcher(life, chance, folder)
    life.end()
    if shards := newest_shards(folder):
        chance.choice(shards).unlink()
    return {-9}


def flip_a_byte(life: Life, chance: random.Random, folder: Path) -> set[int]:
    kill_launcher(life, chance, folder)
    life.end()
    if shards := newest_shards(folder):
        shard = chance.choice(shards)
        content = bytearray(shard.read_bytes())
        content[chance.randrange(len(content))] ^= 0x10
        shard.write_bytes(content)
    return {-9}


def newest_shards(folder: Path) -> list[Path]:
    """Of the newest checkpoint, unless it is the only one."""
    saved = list_checkpoints(folder.parent)
    return sorted(p for p in saved[-1].iterdir() if p.stat().st_size) if len(saved) > 1 else []


def mount_read_only(folder: Path) -> None:
    """As soon as nothing that was opened since is being written there."""
    for _ in range(100):
        with suppress(subprocess.CalledProcessError):
            return mount("-o", "remount,ro,bind", folder)
        time.sleep(0.05)
    raise AssertionError(f"{folder} is always being written to")


def mount(*words: Any) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", str(folder)], check=True, capture_output=True)


FAULTS: dict[str, Callable[[Life, random.Random, Path], set[int]]] = {
    "SIGKILL of one rank": kill_one,
    "SIGKILL of all ranks": kill_all,
    "SIGKILL of the launcher": kill_launcher,
    "SIGKILL in the middle of a write": kill_in_a_write,
    "SIGTERM to one rank": term_one,
    "SIGTERM to one rank in validation": term_in_validation,
    "SIGTERM and SIGUSR2, skewed": term_all_skewed,
    "SIGTERM to every process": term_everything,
    "SIGTERM to the launcher, twice": term_launcher_twice,
    "SIGUSR1 to one rank": save_and_go_on,
    "SIGSTOP of one rank": stop_one,
    "a deleted shard": delete_a_shard,
    "a flipped byte": flip_a_byte,
    "a full file system": fill_up,
    "a read-only directory": make_read_only,
}
MOUNTS = ("a full file system", "a read-only directory")


def may_mount(home: Path) -> bool:
    folder = home / "may-mount"
    folder.mkdir()
    try:
        mount("-t", "tmpfs", "tmpfs", folder)
        unmount(folder)
        return True
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        folder.rmdir()


def make_subject(home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / "subject.py").write_text(SUBJECT)


def undisturbed(home: Path, strategy: str, accelerator: str, ranks: int, steps: int) -> Path:
    name = f"{strategy}-undisturbed"
    if not (home / "runs" / name / "summary.json").exists():
        check(run(home, *words_for(strategy, accelerator, ranks, steps), f"name={name}", timeout=600))
    return home / "runs" / name


def torment(
    home: Path,
    strategy: str,
    faults: list[str],
    seed: int,
    *,
    in_place: bool,
    asynchronous: bool,
    accelerator: str = "cpu",
    ranks: int = RANKS,
    steps: int = STEPS,
) -> Iterator[Result]:
    """One run, which each of the faults meets in turn; the last lets it come to its end, and it is compared.

    `in_place`: its launcher may bring it back.
    """
    chance = random.Random(f"{seed}/{strategy}")
    straight = undisturbed(home, strategy, accelerator, ranks, steps)
    name = f"{strategy}-{seed}"
    run_dir = home / "runs" / name
    folder = run_dir / "checkpoints"
    words = [*words_for(strategy, accelerator, ranks, steps), f"checkpoint.asynchronous={str(asynchronous).lower()}"]
    words += [f"max_restarts={len(faults)}"] if in_place else []
    if "SIGSTOP of one rank" in faults:
        words += [f"strategy.timeout_minutes={HANG_SECONDS[accelerator] * slowness() / 60}"]
    folder.mkdir(parents=True)
    if mounted := may_mount(home):
        mount("-t", "tmpfs", "-o", "size=32m", "tmpfs", folder)
    shared = set(os.listdir("/dev/shm"))
    life, lives = Life(home, name, 0, words, 0.05), 1
    try:
        for number, fault in enumerate(faults):
            # Spread over the run, with steps in between that are made twice otherwise
            at = steps * (number + 1) // (len(faults) + 2) + chance.randrange(3)
            reached = -1
            result = Result(strategy, fault, False, None, False)
            try:
                life.wait(lambda at=at, life=life: life.step() >= at, f"step {at}")
                if life.process.poll() is not None:
                    logs = [log.read_text()[-6000:] for log in sorted(folder.parent.glob("logs/rank-*.log"))]
                    raise Trouble("\n".join([f"it ended by itself: {life.process.poll()}", life.told(), *logs]))
                before = restarts_told(life)
                codes = FAULTS[fault](life, chance, folder)
                reached, struck = life.step(), time.monotonic()
                restarts = in_place and codes & {137, 6}
                if not codes or restarts:
                    result.in_place = True
                    if restarts:
                        life.wait(lambda life=life, before=before: restarts_told(life) > before, "a restart")
                    seen = steps_told(life)
                    life.wait(lambda life=life, seen=seen: steps_told(life) > seen, "the next step")
                else:
                    result.exit_code = life.end()
                    if result.exit_code not in codes:
                        raise Trouble(f"exit code {result.exit_code}, not {sorted(codes)}:\n{life.told()}")
                    left = set(os.listdir("/dev/shm")) - shared | set(os.listdir(home / "tmp"))
                    # A cache of torch's; and what the ranks of a launcher that was killed have left the next removes
                    passing = ("torchinductor", "shardwise-scratch-") if -9 in codes else ("torchinductor",)
                    if left := {name for name in left if not name.startswith(passing)}:
                        raise Trouble(f"left behind: {left}")
                    if "shard" not in fault and "flipped" not in fault:
                        look_at_all(run_dir)
                    if result.exit_code == 6 and accelerator == "cuda" and not list(run_dir.glob("logs/nccl-trace-*")):
                        raise Trouble("NCCL's flight recorder has left nothing in logs/")
                    life = Life(home, name, lives, words, 0.05)
                    lives += 1
                    life.wait(lambda life=life: life.step() >= 0, "the first step of the next life")
                result.seconds = round(time.monotonic() - struck, 2)
                if codes:
                    begins = re.findall(r"from step[- ]0*(\d+)", life.text()) or ["0"]
                    result.steps_lost = max(0, reached - int(begins[-1]))
                result.survived = life.process.poll() in (None, 0)
                if not result.survived:
                    raise Trouble(f"exit code {life.process.poll()}:\n{life.told()}")
            except (Trouble, AssertionError) as trouble:
                result.told, result.survived = str(trouble), False
                yield result
                return
            yield result
        result = Result(strategy, "the end", False, None, False)
        try:
            life.wait(lambda: False, "its end")
            result.exit_code = life.end()
            compare(run_dir, straight)
            look_at_all(run_dir)
            if left := {n for n in os.listdir(home / "tmp") if not n.startswith("torchinductor")}:
                raise Trouble(f"left behind: {left}")
            result.survived = result.exit_code == 0
        except (Trouble, AssertionError) as trouble:
            result.told = str(trouble)
        yield result
    finally:
        life.running.__exit__()
        life.running.wait_until_gone()
        if mounted:
            unmount(folder)


def steps_told(life: Life) -> int:
    return len(re.findall(r"^step \d+/\d", life.text(), re.MULTILINE))


def restarts_told(life: Life) -> int:
    return life.text().count("shardwise: restart ")


def look_at_all(run_dir: Path) -> None:
    """Every checkpoint that is there is whole."""
    for path in list_checkpoints(run_dir):
        if damage := changed(path, 0, 1):
            raise Trouble(f"{path} is damaged: {damage}")


def compare(run_dir: Path, straight: Path) -> None:
    """Weights, optimizer state and everything that was logged: the same bits."""
    ours, theirs = contents(list_checkpoints(run_dir)[-1]), contents(list_checkpoints(straight)[-1])
    if ours.keys() != theirs.keys():
        raise Trouble(f"other tensors: {ours.keys() ^ theirs.keys()}")
    if unlike := [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]:
        raise Trouble(f"not the same bits: {unlike}")
    logged, expected = rows(run_dir), rows(straight)
    if logged != expected:
        raise Trouble(f"other rows: {sorted(set(logged) ^ set(expected))[:6]}")


def contents(checkpoint: Path) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def rows(run_dir: Path) -> list[tuple[str, ...]]:
    keys = ("train/loss", "train/gradient_norm", "train/samples", "validation/loss")
    with (run_dir / "metrics.csv").open(newline="") as file:
        found = [(row["step"], *(row.get(key) or "" for key in keys)) for row in csv.DictReader(file)]
    return [row for row in found if any(row[1:])]  # a save that failed is logged as well
