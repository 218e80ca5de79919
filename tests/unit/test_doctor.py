"""`shardwise doctor`: what it says of a machine, by a nvidia-smi and files that answer as the real ones do."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.paths import ROOT
from shardwise_tools import doctor, machine
from shardwise_tools.doctor import Package, Report, judge, optional, required, show
from shardwise_tools.machine import Accelerator, Machine, describe_machine
from tests.harness.patience import run_patiently

H200 = Accelerator("NVIDIA", "NVIDIA H200", 140.4, "580.65.06", 18, "5.0 x16")
MI300X = Accelerator("AMD", "AMD Instinct MI300X")
FITTING = [Package("torch", ">=2.11,<2.14", "2.13.0", True)]


def a_machine(*accelerators: Accelerator, torch: str | None = "2.13.0", **more: Any) -> Machine:
    given: dict[str, Any] = {
        "host": "node1", "system": "Linux", "accelerators": list(accelerators), "trouble": [],
        "torch_built_for": {"cuda": "13.0"}, "cpus": 8, "cpus_granted": 8, "cpus_of_machine": 8, "memory_gib": 64.0,
        "free_memory_gib": 60.0, "memory_limit_gib": None, "shared_memory_gib": 8.0, "runs_dir": "runs",
        "runs_dir_gib": 100.0, "runs_dir_is_writable": True, "slurm": None,
        "versions": {"python": "3.11.7", "torch": torch, "lightning": "2.6.6"},
    }  # fmt: skip
    return Machine(**given | more)


def report(found: Machine, packages: list[Package] = FITTING, extras: list[Package] = []) -> Report:  # noqa: B006
    return judge(found, packages, extras)


@pytest.mark.parametrize(
    "found",
    [
        a_machine(H200, H200),
        a_machine(),
        a_machine(torch_built_for={}),
        a_machine(MI300X, torch_built_for={"hip": "7.0"}),
        a_machine(H200, MI300X),  # an AMD processor with graphics of its own beside NVIDIA's GPUs
        a_machine(Accelerator("Intel", "Intel GPU 0x9a49"), torch_built_for={}),
        a_machine(Accelerator("Apple", "Apple M2 GPU"), torch_built_for={}),
        a_machine(dataclasses.replace(H200, driver=None)),
        a_machine(dataclasses.replace(H200, driver="525.60.13"), torch_built_for={"cuda": "12.8"}),
    ],
)
def test_a_machine_that_can_train_is_well(found: Machine) -> None:
    assert report(found).problems == [] and show(report(found)).startswith("node1 is well\n")


PROBLEMS = [
    (a_machine(H200, torch_built_for={}), "1 GPU of NVIDIA, and torch 2.13.0 is built for the CPU alone"),
    (a_machine(dataclasses.replace(H200, driver="570.1")), "driver 570.1 is too old for torch's CUDA 13.0"),
    (a_machine(dataclasses.replace(H200, faults=["3 ECC errors"])), "NVIDIA H200 (number 0): 3 ECC errors"),
    (a_machine(trouble=["nvidia-smi ended with exit code 9: x"]), "nvidia-smi ended with exit code 9"),
    (a_machine(runs_dir_is_writable=False), "runs_dir=runs cannot be written: give runs_dir= a folder of yours"),
    (a_machine(runs_dir_gib=0.25), "runs_dir=runs has 0.25 GiB left"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "problem"), PROBLEMS)
def test_what_is_broken_comes_first(found: Machine, problem: str) -> None:
    made = report(found)
    assert len(made.problems) == 1 and problem in made.problems[0]
    assert show(made).startswith(f"problem: {made.problems[0]}\n") and "is well" not in show(made)
    assert json.loads(doctor.as_json(made))["well"] is False


def test_versions_that_do_not_fit_are_named_with_the_command() -> None:
    packages = [
        Package("torch", ">=2.11,<2.14", "2.9.1", False, install="pip install -r requirements.txt"),
        Package("lightning", ">=2.6.6,<2.7", None, True, install="pip install -r requirements.txt"),
    ]
    extras = [
        Package("deepspeed", "==0.19.8", "0.18.0", False, "strategy=zero1", "pip install -r requirements-deepspeed.txt")
    ]
    assert report(a_machine(), packages, extras).problems == [
        "torch 2.9.1 is installed, and >=2.11,<2.14 is needed: pip install -r requirements.txt",
        "lightning is not installed: pip install -r requirements.txt",
        "deepspeed 0.18.0 is installed, and strategy=zero1 needs ==0.19.8: pip install -r requirements-deepspeed.txt",
    ]


def test_small_shared_memory_and_a_quota_are_notes() -> None:
    made = report(a_machine(shared_memory_gib=0.0625, cpus_granted=2))
    assert not made.problems and ["64 MiB" in made.notes[0], "2 of the 8 CPUs" in made.notes[1]] == [True, True]


def test_the_extras_are_those_of_the_project_with_their_comments(tmp_path: Path) -> None:
    names = {package.name: package for package in optional()}
    assert {"deepspeed", "torchao", "flash-attn-4", "quack-kernels", "zstandard"} <= names.keys()
    assert names["flash-attn-4"].brings == "attention=fa4" and names["flash-attn-4"].asked == "==4.0.0b36"
    assert names["flash-attn-4"].install == "pip install -e '.[kernels]'"
    assert names["deepspeed"].install == "pip install -r requirements-deepspeed.txt"
    assert all(package.brings for package in names.values())
    assert {"torch", "lightning", "python"} <= {package.name for package in required()}
    assert all(package.fits for package in required())
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nrequires-python = ">=3.99"\ndependencies = ["torch>=99", "no-such-package>=1"]\n'
        '[project.optional-dependencies]\nmore = ["torch[x]==1.0.0"] # all else\n'
    )
    assert [(p.name, p.fits, p.version is None) for p in required(tmp_path)] == [
        ("torch", False, False), ("no-such-package", True, True), ("python", False, False),
    ]  # fmt: skip
    [package] = optional(tmp_path)
    assert (package.asked, package.fits, package.brings) == ("==1.0.0", False, "all else")
    assert required(tmp_path / "nothing") == [] and optional(tmp_path / "nothing") == []


# ---- nvidia-smi, as a program that answers

SMI = r"""#!{python}
import sys
query = next((word for word in sys.argv if word.startswith("--query-gpu=")), None)
values = {{"name": "NVIDIA H200", "memory.total": "143771", "ecc.errors.uncorrected.volatile.total": "{ecc}",
          "driver_version": "{driver}", "pcie.link.gen.max": "5", "pcie.link.width.max": "16"}}
if query:
    for _ in range(2):
        print(", ".join(values.get(field, "[N/A]") for field in query.partition("=")[2].split(",")))
elif "nvlink" in sys.argv:
    for number in range(2):
        print(f"GPU {{number}}: NVIDIA H200 (UUID: GPU-1)")
        for link in range(18):
            print(f"\t Link {{link}}: 26.562 GB/s")
"""
BROKEN = "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n"


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def shardwise(*words: str, cwd: Path, path: Path | None = None, piped: str = "", **environ: str) -> Any:
    """A real `shardwise doctor` in `cwd`. `path`: a folder whose programs go before all others."""
    given = os.environ | {"PYTHONPATH": f"{ROOT}/src", "CUDA_VISIBLE_DEVICES": "0,1"} | environ
    given["PATH"] = f"{path}:{given['PATH']}" if path else given["PATH"]
    command = [sys.executable, "-m", "shardwise", "doctor", *words]
    if piped:
        command = ["bash", "-c", f'"$0" "$@" {piped}', *command]
    return run_patiently(command, 60, cwd=cwd, env=given)


def test_nvidias_gpus_are_described_by_nvidia_smi(tmp_path: Path) -> None:
    program(tmp_path / "bin", "nvidia-smi", SMI.format(python=sys.executable, ecc=4, driver="560.1"))
    program(tmp_path / "bin", "sbatch", "#!/bin/sh\necho slurm 24.05.1\n")
    done = shardwise("--json", f"runs_dir={tmp_path}/runs", cwd=tmp_path, path=tmp_path / "bin")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["well"] and found["machine"]["slurm"] == "24.05.1"
    assert len(found["machine"]["accelerators"]) == 2
    first = found["machine"]["accelerators"][0]
    assert (first["name"], first["driver"], first["links"], first["pcie"]) == ("NVIDIA H200", "560.1", 18, "5.0 x16")
    assert any("4 ECC errors that were not corrected" in line for line in found["problems"])
    text = shardwise(cwd=tmp_path, path=tmp_path / "bin").stdout
    assert text.startswith("problem: ") and "2 x NVIDIA H200, 140.4 GiB, driver 560.1, 18 NVLinks, PCIe 5.0 x16" in text


@pytest.mark.parametrize(
    "script", [BROKEN, "#!/bin/sh\nprintf '\\377\\376, , ,\\n\\n'\n", "#!/bin/sh\nkill -9 $$\n"],
    ids=["mismatch", "nonsense", "killed"],
)  # fmt: skip
def test_a_broken_nvidia_smi_ends_nothing(script: str, tmp_path: Path) -> None:
    program(tmp_path / "bin", "nvidia-smi", script)
    done = shardwise(
        cwd=tmp_path, path=tmp_path / "bin", TERM="dumb", COLUMNS="1", PYTHONIOENCODING="ascii", LC_ALL="C"
    )
    assert done.stderr == "" and "optional packages" in done.stdout
    if script is BROKEN:
        assert done.returncode == 1 and "version mismatch" in done.stdout.splitlines()[0]


def test_gpus_of_other_makers_are_named(tmp_path: Path) -> None:
    for name, content in {
        "dev/kfd": "", "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 1216\ndevice_id 29857\n",
        "sys/class/drm/renderD128/device/vendor": "0x8086\n", "sys/class/drm/renderD128/device/device": "0x0bd5\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    found = [one for one in describe_machine("runs", tmp_path).accelerators if one.maker in ("AMD", "Intel")]
    assert found == [MI300X, Accelerator("Intel", "Intel GPU 0x0bd5")]


def test_gpus_without_a_driver_and_limits_of_a_container_are_seen(tmp_path: Path) -> None:
    for name, content in {
        "sys/bus/pci/devices/0/vendor": "0x10de\n", "sys/bus/pci/devices/0/class": "0x030200\n",
        "sys/bus/pci/devices/1/vendor": "0x10de\n", "sys/bus/pci/devices/1/class": "0x040300\n",  # its sound
        "sys/fs/cgroup/memory.max": f"{2**33}\n", "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 1048576 kB\n",
        "dev/shm/x": "",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    found = describe_machine(str(tmp_path / "runs"), tmp_path)
    assert found.runs_dir_is_writable
    assert not describe_machine(str(tmp_path / "dev/shm/x/runs"), tmp_path).runs_dir_is_writable  # x is a file
    assert (found.memory_gib, found.free_memory_gib, found.memory_limit_gib) == (64.0, 1.0, 8.0)
    if not any(one.maker == "NVIDIA" for one in found.accelerators):
        assert any("NVIDIA GPUs on the PCI bus: 1; no driver answers" in line for line in found.trouble)


def test_a_look_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("name")

    monkeypatch.setattr(machine, "_nvidia", fails)
    assert any("KeyError" in line for line in describe_machine("runs").trouble)


# ---- The command


def without_torch(folder: Path) -> Path:
    """Every installed package but torch and lightning, as links."""
    folder.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith(("torch", "lightning", "pytorch")):
            (folder / path.name).symlink_to(path)
    return folder


def test_a_machine_without_torch_is_told_so(tmp_path: Path) -> None:
    site = without_torch(tmp_path / "site")
    code = "import sys; from shardwise_tools import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
    for words in ([], ["--measure"]):
        done = subprocess.run(
            [sys.executable, "-S", "-c", code, *words], env=os.environ | {"PYTHONPATH": f"{ROOT}/src:{site}"},
            capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 1 and done.stderr == "", done.stderr
        assert "problem: torch is not installed: pip install -r requirements.txt\n" in done.stdout


def test_torch_is_left_alone_and_the_output_may_be_cut(tmp_path: Path) -> None:
    code = (
        "import sys; from shardwise_tools import main; main(['doctor']); "
        "print([m for m in ('torch', 'lightning', 'numpy', 'hydra') if m in sys.modules], file=sys.stderr)"
    )
    done = run_patiently([sys.executable, "-c", code], 30, cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{ROOT}/src"})
    assert done.stderr.strip() == "[]" and "\x1b" not in done.stdout
    cut = shardwise(cwd=tmp_path, piped="| head -n 1; exit ${PIPESTATUS[0]}")
    assert cut.returncode in (0, 1) and cut.stderr == "" and len(cut.stdout.splitlines()) == 1
    full = shardwise(cwd=tmp_path, piped="> /dev/full")
    assert full.returncode == 2 and full.stderr.startswith("error: the output cannot be written: No space left")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    done = shardwise(cwd=tmp_path)
    assert done.returncode == 1 and "problem: runs_dir=runs cannot be written" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measured"], "error: --measured: there is no such flag"),
        (["fast"], "error: fast: doctor takes --measure, --json, cluster=NAME and runs_dir=DIR"),
        (["cluster=dgx_h200"], "error: cluster=dgx_h200: its figures are for --measure"),
        (["--measure", "cluster=nowhere"], "error: cluster=nowhere"),
        (["gpu=1"], "error: gpu: there is no such option"),
    ],
)
def test_a_wrong_word_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from shardwise_tools import main

    assert main(["doctor", *words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(message) and said.err.count("\n") == 1 and said.out == ""


def test_the_cpu_is_measured_and_labelled(tmp_path: Path) -> None:
    done = shardwise("--measure", "--json", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    speeds = json.loads(done.stdout)["speeds"]
    if [speed["device"] for speed in speeds] == ["CPU", "CPU"]:
        assert [speed["unit"] for speed in speeds] == ["GB/s", "TFLOP/s"] and all(
            speed["value"] > 0 for speed in speeds
        )
        assert "fp32" in speeds[1]["what"] and speeds[1]["expected"] is None


def test_a_figure_far_below_the_cluster_files_is_noted() -> None:
    made = report(a_machine(H200))
    made.speeds = [machine.Speed("0 NVIDIA H200", "bf16 products of matrices", 700.0, "TFLOP/s", 989.4)]
    made.speeds.append(machine.Speed("CPU", "fp32 products of matrices", 0.0437, "TFLOP/s", None))
    assert "0.044 TFLOP/s, fp32 products of matrices" in show(made)
    assert "700.0 TFLOP/s, bf16 products of matrices, 71% of the cluster file's 989" in show(made)
