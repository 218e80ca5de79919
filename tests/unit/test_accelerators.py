"""Other accelerators than NVIDIA's: how they are found without torch, and what their Plans hold or refuse."""

from __future__ import annotations

import dataclasses
import platform
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise import accelerator, devices
from shardwise.config.compose import compose
from shardwise.devices import amd_gpus, apple_gpu, count_rocm_devices, count_visible, count_xpu_devices, intel_gpus
from shardwise.errors import ConfigError
from shardwise.launch.host import inspect_host
from shardwise.plan import Host, Plan, make_plan
from shardwise.strategies.other_accelerators import lightning_accelerator
from tests.harness.cells import cell_plan, fit
from tests.harness.processes import spawn

CPU = Host(0, run_id="r")
MAC = Host(0, run_id="r", macos=15)
INTEL = Host(0, run_id="r", xpu_devices=2)
AMD = Host(8, run_id="r", rocm=True, gpu="AMD Instinct MI300X")
NVIDIA = Host(8, run_id="r", gpu="NVIDIA H200", gpu_capability=(9, 0))


def plan(host: Host, *words: str) -> Plan:
    job = compose(["name=x", *words]).jobs[0]
    return make_plan(job.config, host, job.clusters)


@pytest.mark.parametrize(
    ("host", "name", "backend"),
    [
        (CPU, "cpu", "gloo"),
        (MAC, "mps", "gloo"),
        (INTEL, "xpu", "xccl"),
        (AMD, "cuda", "nccl"),
        (NVIDIA, "cuda", "nccl"),
    ],
)
def test_auto_is_the_gpus_that_are_there(host: Host, name: str, backend: str) -> None:
    made = plan(host)
    assert made.accelerator == name and accelerator.backend(name) == backend
    assert Plan.from_json(made.to_json()) == made
    assert made == plan(host, f"accelerator={name}")
    assert plan(host, "accelerator=cpu").accelerator == "cpu"
    assert made.checkpoint.asynchronous == (name == "cuda")


FITS = [
    (MAC, ""), (MAC, "precision=bf16"), (MAC, "precision=bf16_true compile=layer"), (MAC, "attention=math"),
    (INTEL, "strategy=fsdp devices=2 precision=bf16"), (INTEL, "precision=fp64"), (INTEL, "precision=fp16"),
    (AMD, "strategy=zero3 devices=8 precision=bf16 global_batch_size=96"), (AMD, "precision=bf16 attention=flash"),
    (AMD, "compile=layer compile.cudagraphs=true"), (AMD, "memory_history=true"),
]  # fmt: skip


@pytest.mark.parametrize(("host", "words"), FITS)
def test_what_a_device_can_do_is_planned(host: Host, words: str) -> None:
    assert plan(host, *words.split()).attention.name in ("sdpa", "math", "flash")


NEVER = [
    (CPU, "accelerator=mps", "accelerator=mps is the GPU of a Mac with Apple silicon"),
    (CPU, "accelerator=xpu", "accelerator=xpu: this process sees no Intel GPU that the installed torch can use"),
    (MAC, "accelerator=cuda", "accelerator=cuda: this process sees 0 CUDA devices; use accelerator=cpu"),
    (MAC, "devices=2", "accelerator=mps devices=2 nodes=1: a Mac has one GPU"),
    (MAC, "strategy=fsdp", "strategy=fsdp accelerator=mps: one process has nobody to share with; use strategy=ddp"),
    (MAC, "strategy=zero3", "strategy=zero3 accelerator=mps"),
    (MAC, "precision=fp64", "precision=fp64 accelerator=mps: Apple's GPUs have no float64; use precision=fp32"),
    (MAC, "precision=fp16", "precision=fp16 accelerator=mps: torch's loss scale takes float64"),
    (MAC, "precision=tf32", "precision=tf32 needs CUDA on NVIDIA's GPUs"),
    (MAC, "precision=fp8", "precision=fp8 accelerator=mps: Apple's GPUs have no fp8"),
    (MAC, "precision=fp8 precision.fp8.emulate=true", "precision=fp8 accelerator=mps: Apple's GPUs have no fp8"),
    (dataclasses.replace(MAC, macos=13), "precision=bf16", "bfloat16 needs macOS 14, and this is macOS 13"),
    (MAC, "compile=layer compile.cudagraphs=true", "leave it out on accelerator=mps"),
    (MAC, "attention=flex", "flex_attention has no kernel for Apple's GPUs"),
    (MAC, "attention=flash", "is not for an Apple GPU"),
    (MAC, "loss=fused", "its kernel runs on NVIDIA's GPUs alone"),
    (MAC, "memory_history=true", "memory_history=true needs CUDA, whose allocator keeps it; leave it out on mps"),
    (MAC, "preflight=true", "preflight=true accelerator=mps"),
    (INTEL, "devices=3", "devices=3 is more than the 2 Intel GPUs that this process sees; use devices=2 or fewer"),
    (INTEL, "strategy=zero2", "strategy=zero2 accelerator=xpu: DeepSpeed needs"),
    (INTEL, "precision=fp8", "on Intel GPUs use precision=bf16"),
    (INTEL, "attention=fa4 precision=bf16", "FlashAttention 4 runs on Hopper and Blackwell GPUs, and this run is on I"),
    (AMD, "precision=tf32", "on AMD GPUs use precision=fp32"),
    (AMD, "precision=fp8", "on AMD GPUs use precision=bf16"),
    (AMD, "loss=fused precision=bf16", "its kernel runs on NVIDIA's GPUs alone"),
    (AMD, "attention=cudnn precision=bf16", "cuDNN runs on NVIDIA GPUs, and this run is on AMD GPUs"),
    (AMD, "cluster=dgx_h200", "cluster=dgx_h200 has H200 GPUs, and this machine has AMD Instinct MI300X"),
]  # fmt: skip


@pytest.mark.parametrize(("host", "words", "message"), NEVER)
def test_what_it_cannot_do_is_refused_in_a_sentence(host: Host, words: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(host, *words.split())
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("gpu", "words", "peak"),
    [
        ("AMD Instinct MI300X", "precision=bf16", 1307.4),
        ("AMD Instinct MI325X", "precision=bf16", 1307.4),
        ("AMD Instinct MI355X", "precision=bf16", 2516.6),
        ("AMD Instinct MI250X", "precision=bf16", 191.5),  # one of its two devices
        ("AMD Instinct MI300X", "precision=fp32", 163.4),
        ("AMD Instinct MI210", "precision=bf16", None),
        (None, "precision=bf16", None),
    ],
)
def test_the_peak_of_amds_gpus_is_known(gpu: str | None, words: str, peak: float | None) -> None:
    assert plan(dataclasses.replace(AMD, gpu=gpu), *words.split()).peak_tflops == peak


# ---- Finding them


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def with_amd(root: Path, *numbers: int) -> Path:
    write(root / "dev/kfd", "")
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 96\nsimd_count 0\ndevice_id 0\n")
    for number, device in enumerate(numbers, 1):
        write(nodes / f"{number}/properties", f"cpu_cores_count 0\nsimd_count 1216\ndevice_id {device}\n")
    return root


def built_for(monkeypatch: pytest.MonkeyPatch, **build: str) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: build)


def test_amds_gpus_are_found_by_their_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert amd_gpus(tmp_path) == []
    with_amd(tmp_path, 29857, 29857, 1)
    write(tmp_path / "sys/class/kfd/kfd/topology/nodes/9/properties", "half a line")
    assert amd_gpus(tmp_path) == ["AMD Instinct MI300X", "AMD Instinct MI300X", None]
    assert count_rocm_devices({}, tmp_path) == 0, "this torch is not built for ROCm"
    built_for(monkeypatch, hip="7.0.51831")
    assert count_rocm_devices({}, tmp_path) == 3
    assert count_rocm_devices({"ROCR_VISIBLE_DEVICES": "0,1"}, tmp_path) == 2
    assert count_rocm_devices({"HIP_VISIBLE_DEVICES": "2", "ROCR_VISIBLE_DEVICES": "0,1"}, tmp_path) == 1
    assert count_rocm_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0


def test_a_host_with_amds_gpus_plans_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_for(monkeypatch, hip="7.0")
    root = with_amd(tmp_path, 29857, 29857)
    found = devices.amd_gpus
    monkeypatch.setattr(devices, "amd_gpus", lambda _=None: found(root))
    host = inspect_host({})
    assert (host.cuda_devices, host.rocm, host.gpu, host.gpu_capability) == (2, True, "AMD Instinct MI300X", None)


def test_intels_gpus_are_found_tile_by_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (vendor, tiles) in enumerate([("0x8086", 2), ("0x8086", 0), ("0x10de", 0)]):
        device = tmp_path / f"sys/class/drm/renderD{128 + number}/device"
        write(device / "vendor", f"{vendor}\n")
        write(device / "device", "0x0bd5\n")
        for tile in range(tiles):
            (device / f"tile{tile}").mkdir()
    assert intel_gpus(tmp_path) == ["0x0bd5"] * 3
    assert count_xpu_devices({}, tmp_path) == 0, "this torch is not built for them"
    built_for(monkeypatch, xpu="20250302")
    assert count_xpu_devices({}, tmp_path) == 3
    assert count_xpu_devices({"ZE_AFFINITY_MASK": "0.0,1"}, tmp_path) == 2


def test_an_apple_gpu_is_found_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("14.6.1", ("", "", ""), "arm64"))
    assert apple_gpu({}) == 14
    assert apple_gpu({"DISABLE_MPS": "1"}) is None
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert apple_gpu({}) is None


def test_lists_of_devices_hide_the_others() -> None:
    assert [count_visible(4, ("A", "B"), e) for e in ({}, {"A": "0,1"}, {"A": "-1"}, {"A": "0,1,2", "B": "1"})] == [
        4,
        2,
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", {}),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\nxpu: Optional[str] = None\n", {"cuda": "13.0"}),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831-7c9236b16'\n", {"hip": "7.0.51831-7c9236b16"}),
        ("cuda = None\nxpu = '20250302'\n", {"xpu": "20250302"}),
    ],
)
def test_what_torch_is_built_for_stands_in_a_file(text: str, build: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(text)
    assert devices.torch_build(tmp_path) == build
    assert devices.torch_build(tmp_path / "nothing") == {}


def test_this_torch_says_what_it_is_built_for() -> None:
    built = {"cuda": torch.version.cuda, "hip": torch.version.hip, "xpu": torch.version.xpu}
    assert devices.torch_build() == {key: value for key, value in built.items() if value}


# ---- Lightning


@pytest.mark.parametrize(("host", "name", "count"), [(MAC, "mps", 1), (INTEL, "xpu", 2)])
def test_lightning_takes_our_accelerators(host: Host, name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "is_present", lambda kind: kind == name)
    kind = lightning_accelerator(plan(host))
    trainer = Trainer(accelerator=kind, devices=count, strategy="ddp", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, barebones=False)  # fmt: skip
    assert trainer.accelerator is kind and trainer.strategy.root_device == torch.device(name, 0)
    assert trainer.num_devices == count
    assert lightning_accelerator(plan(CPU)) == "cpu" and lightning_accelerator(plan(NVIDIA)) == "cuda"


# ---- A run on a Mac, as far as a CPU can show it: nothing in float64 on the device, and nothing sent in a group of one


class No64(TorchDispatchMode):
    """Notes which lines make tensors in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if any(isinstance(one, torch.Tensor) and one.dtype == torch.float64 for one in tree_leaves(made)):
            files = [frame.filename for frame in traceback.extract_stack() if "/shardwise/" in frame.filename]
            self.found.add(f"{files[-1] if files else 'elsewhere'}: {function}")
        return made


def as_on_a_mac(folder: Path) -> tuple[set[str], list[str], list[float]]:
    sent: list[str] = []
    for name in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce", "scatter", "gather"):
        setattr(torch.distributed, name, lambda *_, name=name, **__: sent.append(name))
    accelerator.exact_dtype.__code__ = (lambda device: torch.float32).__code__
    accelerator.can_exchange.__code__ = (lambda kind: False).__code__
    words = ["strategy=ddp", "max_steps=4", "micro_batch_size=2", "global_batch_size=4", "validate_every_n_steps=2",
             "checkpoint.save_every_n_steps=2", "precision=bf16", "ema_decay=0.9", "guard.on_spike=skip",
             "optimizer=adamw_bf16"]  # fmt: skip
    plan = cell_plan(folder / "run", 1, *words)
    with No64() as mode:
        made = fit(plan)
    return mode.found, sent, made["losses"]


def test_a_run_needs_no_float64_and_sends_nothing_where_it_cannot(tmp_path: Path) -> None:
    [(found, sent, losses)] = spawn(1, as_on_a_mac, tmp_path)
    found = {line for line in found if "config/targets.py" not in line}  # a module is made on the host
    assert not found and not sent and len(losses) == 4
