"""GPUs of NVIDIA and AMD: how they are found without torch, and what their Plans hold or refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise import accelerator, devices
from shardwise.config.compose import compose
from shardwise.devices import amd_gpus, count_rocm_devices, count_visible, intel_gpus
from shardwise.errors import ConfigError
from shardwise.launch.host import inspect_host
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan

CPU = Host(0, run_id="r")
AMD = Host(8, run_id="r", rocm=True, gpu="AMD Instinct MI300X")
NVIDIA = Host(8, run_id="r", gpu="NVIDIA H200", gpu_capability=(9, 0))


def plan(host: Host, *words: str) -> Plan:
    job = compose(["name=x", *words]).jobs[0]
    return make_plan(job.config, host, job.clusters)


@pytest.mark.parametrize(
    ("host", "name", "backend"),
    [
        (CPU, "cpu", "gloo"),
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
    (AMD, "strategy=zero3 devices=8 precision=bf16 global_batch_size=96"), (AMD, "precision=bf16 attention=flash"),
    (AMD, "compile=layer compile.cudagraphs=true"), (AMD, "memory_history=true"),
]  # fmt: skip


@pytest.mark.parametrize(("host", "words"), FITS)
def test_what_a_device_can_do_is_planned(host: Host, words: str) -> None:
    assert plan(host, *words.split()).chosen_attention.name in ("sdpa", "math", "flash")


NEVER = [
    (CPU, "accelerator=mps", "accelerator=mps: must be one of auto, cpu, cuda"),
    (CPU, "accelerator=xpu", "accelerator=xpu: must be one of auto, cpu, cuda"),
    (CPU, "accelerator=cuda", "accelerator=cuda: this process sees 0 CUDA devices; use accelerator=cpu"),
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


def test_intels_gpus_are_found_tile_by_tile(tmp_path: Path) -> None:
    for number, (vendor, tiles) in enumerate([("0x8086", 2), ("0x8086", 0), ("0x10de", 0)]):
        device = tmp_path / f"sys/class/drm/renderD{128 + number}/device"
        write(device / "vendor", f"{vendor}\n")
        write(device / "device", "0x0bd5\n")
        for tile in range(tiles):
            (device / f"tile{tile}").mkdir()
    assert intel_gpus(tmp_path) == ["0x0bd5"] * 3


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
