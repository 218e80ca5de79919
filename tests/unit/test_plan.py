"""The rules that span fields: what a Plan says follows from the config, or one message says what would."""

import ctypes
import dataclasses
import re
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config.groups import (
    CheckpointConfig,
    ClusterConfig,
    DdpConfig,
    Dtype,
    FsdpConfig,
    FsdpHybridConfig,
    GuardConfig,
    LoggerConfig,
    PeakTflopsConfig,
    PrecisionConfig,
)
from shardwise.config.schema import RunConfig, Stage
from shardwise.devices import count_cpus, count_granted_cpus
from shardwise.errors import ConfigError
from shardwise.launch.host import inspect_host
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from tests.harness.patience import run_patiently

SRC = Path(__file__).parents[2] / "src"
HOST = Host(cuda_devices=0, run_id="made-up")
CLUSTER = Host(cuda_devices=0, launcher="torchrun", run_id="made-up")  # any number of nodes and devices


def config(**changes: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "max_steps": 10,
        "module": {"_target_": "a.Module"},
        "data": {"_target_": "a.Data"},
        "strategy": DdpConfig(),
    }
    return RunConfig(**(defaults | changes))


def plan(host: Host = HOST, **changes: Any) -> Plan:
    return make_plan(config(**changes), host)


def refused(host: Host = HOST, **changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        plan(host, **changes)
    message = str(error.value)
    assert "\n" not in message
    return message


# --- the number of data workers


@pytest.mark.parametrize(
    ("cpus", "per_rank", "devices", "workers"),
    [(1, None, 1, 0), (2, None, 1, 1), (8, None, 2, 3), (2, None, 4, 0), (224, None, 8, 16), (224, 14, 8, 13),
     (224, 1, 8, 0)],
)  # fmt: skip
def test_workers_are_the_cpus_of_a_rank_without_one(
    cpus: int, per_rank: int | None, devices: int, workers: int
) -> None:
    host = dataclasses.replace(CLUSTER, cpus=cpus, cpus_per_rank=per_rank)
    data = {"_target_": "a.Data", "num_workers": "auto"}
    made = plan(host, devices=devices, micro_batch_size=1, data=data)
    assert made.data == {"_target_": "a.Data", "num_workers": workers}
    assert data["num_workers"] == "auto"  # the config is as the user wrote it
    assert plan(host, data={"_target_": "a.Data", "num_workers": 3}).data == {"_target_": "a.Data", "num_workers": 3}


@pytest.mark.parametrize(
    ("files", "most"),
    [({}, None), ({"cpu.max": "max 100000"}, None), ({"cpu.max": "100000 100000"}, 1), ({"cpu.max": "5000 100000"}, 1),
     ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
     ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1)],
)  # fmt: skip
def test_a_containers_quota_limits_the_cpus(tmp_path: Path, files: dict[str, str], most: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert count_granted_cpus(tmp_path) == (most or count_cpus())


# --- batches


def check_batch(nodes: int, devices: int, micro: int, batch: int) -> None:
    sizes = {"nodes": nodes, "devices": devices, "micro_batch_size": micro}
    ranks = nodes * devices
    if batch % (micro * ranks) == 0:
        made = plan(CLUSTER, **sizes, global_batch_size=batch)
        assert made.micro_batch_size == micro
        assert made.micro_batch_size * made.topology.data_parallel_size * made.accumulate_grad_batches == batch
        assert made.global_batch_size == batch
        return
    message = refused(CLUSTER, **sizes, global_batch_size=batch)
    rule, remedy = message.split("; use ")
    expected = "is not a multiple of micro_batch_size * data_parallel_size = "
    assert rule == f"global_batch_size={batch} {expected}{micro} * {ranks}"
    remedies = [int(number) for number in remedy.split(" or ")]
    assert remedies
    for number in remedies:
        assert abs(number - batch) < micro * ranks
        assert plan(CLUSTER, **sizes, global_batch_size=number).global_batch_size == number


def test_small_batches_exhaustively() -> None:
    for sizes in product((1, 2, 3), (1, 2, 3), (1, 2, 3), range(1, 28)):
        check_batch(*sizes)


@given(st.integers(1, 512), st.integers(1, 16), st.integers(1, 64), st.integers(1, 1 << 20))
def test_any_batch(nodes: int, devices: int, micro: int, batch: int) -> None:
    check_batch(nodes, devices, micro, batch)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 32), st.integers(1, 8))
def test_any_batch_that_fits(nodes: int, devices: int, micro: int, accumulate: int) -> None:
    check_batch(nodes, devices, micro, nodes * devices * micro * accumulate)


@pytest.mark.parametrize("word", ["micro_batch_size", "global_batch_size"])
@pytest.mark.parametrize("stage", get_args(Stage))
def test_batches_start_at_one_in_every_stage(word: str, stage: Stage) -> None:
    for value in (0, -4):
        assert refused(**{word: value, "stage": stage}) == f"{word}={value}: must be at least 1"


def test_only_fit_accumulates() -> None:
    for stage in ("validate", "test", "predict"):
        made = plan(stage=stage, devices=3, global_batch_size=7, max_steps=None, max_epochs=None)
        assert (made.accumulate_grad_batches, made.global_batch_size) == (1, 6)
        assert made.max_steps is made.max_epochs is None


# --- durations


DURATIONS = ("max_steps", "max_epochs", "max_samples")


@pytest.mark.parametrize("given_words", [w for n in (0, 2, 3) for w in combinations(DURATIONS, n)])
def test_exactly_one_duration_and_the_remedy_works(given_words: tuple[str, ...]) -> None:
    values = {word: 8 if word in given_words else None for word in DURATIONS}
    message = refused(**values)
    assert "exactly one of max_steps, max_epochs, max_samples" in message
    assert all(f"{word}=8" in message for word in given_words)
    remedy = re.findall(r"(\w+)=(null|N)", message)
    assert remedy
    plan(**(values | {word: 8 if value == "N" else None for word, value in remedy}))


def test_one_duration() -> None:
    for word in DURATIONS:
        made = plan(**(dict.fromkeys(DURATIONS) | {word: 16}))
        assert (made.max_steps, made.max_epochs) == {
            "max_steps": (16, None), "max_epochs": (None, 16), "max_samples": (2, None)
        }[word]  # fmt: skip
        assert refused(**(dict.fromkeys(DURATIONS) | {word: 0})) == f"{word}=0: must be at least 1"


@given(st.integers(1, 64), st.integers(1, 10_000))
def test_samples_are_steps_or_a_message_with_numbers_that_are(batch: int, samples: int) -> None:
    sizes: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": batch, "max_steps": None}
    if samples % batch == 0:
        assert plan(**sizes, max_samples=samples).max_steps == samples // batch
        return
    rule, remedy = refused(**sizes, max_samples=samples).split("; use ")
    assert rule == f"max_samples={samples} is not a multiple of global_batch_size={batch}"
    for number in map(int, remedy.split(" or ")):
        steps = plan(**sizes, max_samples=number).max_steps
        assert steps is not None and steps * batch == number and abs(number - samples) < batch


# --- where it runs


def test_accelerator_is_what_is_there() -> None:
    gpus = Host(cuda_devices=4, run_id="r")
    assert plan().accelerator == "cpu"
    assert plan(gpus).accelerator == "cuda"
    assert plan(gpus, accelerator="cpu", devices=8, global_batch_size=16).accelerator == "cpu"
    message = refused(accelerator="cuda")
    assert "sees 0 CUDA devices" in message and "use accelerator=cpu" in message


@given(st.integers(1, 8), st.integers(1, 16))
def test_no_more_gpu_ranks_than_gpus(there: int, asked: int) -> None:
    host, sizes = Host(cuda_devices=there, run_id="r"), {"global_batch_size": 2 * 720720}
    if asked <= there:
        assert plan(host, devices=asked, **sizes).topology.world_size == asked
        return
    message = refused(host, devices=asked, **sizes)
    assert f"devices={asked} is more than the {there} CUDA device{'s' * (there > 1)} " in message
    assert f"use devices={there} or fewer, or accelerator=cpu" in message
    plan(host, devices=there, **sizes)
    plan(host, devices=asked, accelerator="cpu", **sizes)


def test_nodes_and_devices_are_the_launchers() -> None:
    host = Host(cuda_devices=0, launcher="torchrun", nodes=2, devices=4, run_id="r")
    made = plan(host, global_batch_size=16)
    assert (made.topology.nodes, made.topology.devices) == (2, 4)
    plan(host, nodes=2, devices=4, global_batch_size=16)
    for word, value, told in (("nodes", 1, 2), ("devices", 8, 4), ("nodes", 0, 2)):
        message = refused(host, **{word: value})
        assert f"{word}={value}, but torchrun started {told}: leave {word} out" in message


def test_a_preflight_is_started_before_torchrun_is() -> None:
    host = Host(cuda_devices=0, launcher="torchrun", nodes=2, devices=2, run_id="r")
    message = refused(host, preflight=True)
    assert message.startswith("preflight=true: torchrun has started this run's ranks already; leave it out")
    assert "torchrun … -m shardwise preflight …" in message
    for word in (None, False):
        plan(host, preflight=word)
    plan(Host(cuda_devices=0, launcher="slurm", nodes=2, devices=2, run_id="r"), preflight=True)


@pytest.mark.parametrize("word", ["nodes", "devices"])
def test_sizes_start_at_one(word: str) -> None:
    for value in (0, -1):
        assert refused(**{word: value}) == f"{word}={value}: must be at least 1"


def test_a_local_launch_is_one_node() -> None:
    message = refused(nodes=2)
    assert "nodes=2: a local launch is one node" in message and "use nodes=1" in message and "torchrun" in message
    plan(nodes=1)


def test_a_cluster_bounds_the_devices_of_a_node() -> None:
    cluster = ClusterConfig("dgx", devices_per_node=8)
    message = refused(devices=9, cluster=cluster, global_batch_size=18)
    assert "devices=9 is more than a node of cluster=dgx has, 8; use devices=8 or fewer" in message
    plan(devices=8, cluster=cluster, global_batch_size=16)
    assert "devices_per_node=0: must be at least 1" in refused(cluster=ClusterConfig("x", devices_per_node=0))


@pytest.mark.parametrize(
    ("parameters", "compute", "tf32", "peak"),
    [
        ("float32", "bfloat16", False, 4.0),
        ("bfloat16", "bfloat16", False, 4.0),
        ("float32", "float16", False, 3.0),
        ("float32", "float32", True, 2.0),
        ("float32", "bfloat16", True, 4.0),
        ("float32", "float32", False, 1.0),
        ("float64", "float64", False, None),
    ],
)
def test_the_peak_is_that_of_what_layers_compute_in(
    parameters: Dtype, compute: Dtype, tf32: bool, peak: float | None
) -> None:
    cluster = ClusterConfig("own", gpu="X1", peak_tflops=PeakTflopsConfig(bf16=4.0, fp16=3.0, tf32=2.0, fp32=1.0))
    fp16 = compute == "float16"
    precision = PrecisionConfig(parameter_dtype=parameters, compute_dtype=compute, tf32=tf32, loss_scaling=fp16)
    for gpu in ("Acme X1", None):
        assert plan(Host(1, run_id="r", gpu=gpu), cluster=cluster, precision=precision).peak_tflops == peak
    if not tf32:
        assert plan(HOST, cluster=cluster, precision=precision).peak_tflops is None


def test_a_cluster_is_refused_where_another_gpu_is() -> None:
    cluster, host = ClusterConfig("own", gpu="X1"), Host(1, run_id="r", gpu="Acme X10")
    message = refused(host, cluster=cluster)
    assert "cluster=own has X1 GPUs, and this machine has Acme X10" in message and "use cluster=local" in message
    plan(host, cluster=ClusterConfig())
    plan(host, cluster=cluster, accelerator="cpu")
    plan(Host(0, run_id="r"), cluster=cluster)  # a login node


class Nvml:
    """The library as it answers on a machine with GPUs of these names."""

    def __init__(self, *names: str, mig: bool = False) -> None:
        self.names, self.mig = names, mig

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.names)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        device._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetMigMode(self, device: Any, current: Any, pending: Any) -> int:
        current._obj.value = int(self.mig)
        return 0 if self.mig else 3  # not supported

    def nvmlDeviceGetName(self, device: Any, name: Any, length: Any) -> int:
        name.value = self.names[device.value - 1].encode()
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device: Any, major: Any, minor: Any) -> int:
        major._obj.value = 9 if "H200" in self.names[device.value - 1] else 8
        return 0


@pytest.mark.parametrize(
    ("nvml", "visible", "devices", "gpu", "capability"),
    [
        (Nvml("NVIDIA H200", "NVIDIA H200"), None, 2, "NVIDIA H200", (9, 0)),
        (Nvml("NVIDIA H200", "NVIDIA H200"), "1", 1, "NVIDIA H200", (9, 0)),
        (Nvml("NVIDIA H200"), "", 0, None, None),
        (Nvml("NVIDIA H200", "NVIDIA A100-SXM4-80GB"), "0", 1, None, (8, 0)),
        (Nvml("NVIDIA H200", mig=True), None, 1, None, (9, 0)),
        (Nvml("NVIDIA H200"), "MIG-1b2c", 1, None, (9, 0)),
        (Nvml(), None, 0, None, None),
    ],
)
def test_the_host_names_its_gpus(
    nvml: Nvml, visible: str | None, devices: int, gpu: str | None, capability: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    host = inspect_host({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert (host.cuda_devices, host.gpu, host.gpu_capability) == (devices, gpu, capability)


# --- names


@pytest.mark.parametrize("name", ["a", "A9", "run_1.5-b", "2026", "x" * 128])
def test_a_name_is_a_folder_under_runs_dir(name: str) -> None:
    made = plan(name=name, runs_dir="/tmp/runs")
    assert (made.run_id, made.run_dir) == (name, f"/tmp/runs/{name}")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/abs", "-x", ".hidden", "a b", "a\nb", "a\n", "ä", "x" * 129, "~"]
)
def test_a_name_that_is_no_folder_under_runs_dir(name: str) -> None:
    message = refused(name=name)
    assert f"name={name!r} cannot name a folder under runs" in message and "use letters, digits" in message


@given(st.text(max_size=140))
def test_no_name_leaves_runs_dir(name: str) -> None:
    try:
        made = plan(name=name, runs_dir="/runs")
    except ConfigError:
        return
    assert made.run_dir == f"/runs/{name}" and "/" not in name and name not in ("", ".", "..")


def test_the_run_id_is_the_hosts_unless_named() -> None:
    assert plan().run_id == "made-up"
    assert plan(name="mine").run_id == "mine"
    message = refused(Host(cuda_devices=0, launcher="torchrun", nodes=2, devices=1))
    assert "--rdzv-id=ID, or name=NAME" in message


@pytest.mark.parametrize("runs_dir", ["", "a\0b", "~no-such-user/runs"])
def test_runs_dir_names_a_folder(runs_dir: str) -> None:
    assert "names no folder; give one, e.g. runs_dir=runs" in refused(runs_dir=runs_dir)


# --- values


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"log_every_n_steps": 0}, "log_every_n_steps=0: must be at least 1"),
        ({"validate_every_n_steps": 0}, "validate_every_n_steps=0: must be at least 1, or null"),
        ({"max_validation_batches": -1}, "max_validation_batches=-1: must be at least 1, 0 for"),
        ({"gradient_clip_val": 0.0}, "gradient_clip_val=0.0: must be above 0 and finite, or null"),
        ({"gradient_clip_val": float("nan")}, "gradient_clip_val=nan: must be above 0"),
        ({"gradient_clip_val": float("inf")}, "gradient_clip_val=inf: must be above 0 and finite"),
        ({"seed": -1}, "seed=-1: must be in [0, 2**63)"),
        ({"seed": 2**63}, "must be in [0, 2**63)"),
        ({"checkpoint": CheckpointConfig(save_every_n_steps=0)}, "checkpoint.save_every_n_steps=0: must be at least 1"),
        ({"checkpoint": CheckpointConfig(keep_last=0)}, "checkpoint.keep_last=0: must be at least 1"),
        ({"checkpoint": CheckpointConfig(mode="best")}, "checkpoint.mode=best: must be min or max"),
        ({"guard": GuardConfig(max_in_a_row=-1)}, "guard.max_in_a_row=-1: must be at least 0"),
        ({"guard": GuardConfig(spike_z=0.0)}, "guard.spike_z=0.0: must be above 0"),
        ({"logger": LoggerConfig(mode="on")}, "logger.mode=on: must be one of auto, online, offline"),
        ({"strategy": DdpConfig(timeout_minutes=0)}, "strategy.timeout_minutes=0: must be above 0"),
        ({"strategy": DdpConfig(timeout_minutes=1e12)}, "at most 525600, a year"),
        ({"strategy": FsdpConfig(timeout_minutes=float("nan"))}, "strategy.timeout_minutes=nan: must be above 0"),
        ({"strategy": DdpConfig(bucket_cap_mb=0)}, "strategy.bucket_cap_mb=0: must be at least 1"),
        ({"precision": PrecisionConfig("tf32", tf32=True)}, "use precision=fp32"),
        ({"module": None}, "module names no class: give module._target_=package.Class"),
        ({"data": {"a": 1}}, "data names no class: give data._target_=package.Class"),
        ({"optimizer": {"lr": 1}}, "optimizer names no class"),
        ({"optimizer": {"_target_": None}}, "optimizer._target_=null: must be a dotted path"),
        ({"schedule": "cosine"}, "schedule names no class"),
        ({"schedule": {"_target_": "a.b"}}, "give optimizer=adamw, or schedule=none"),
        ({"module": {"_target_": "a.B", "labels": {0: "cat"}}}, "module.labels: the key 0 is not text; quote it"),
        ({"data": {"_target_": "a.B", "raw": [b"x"]}}, "data.raw[0] is a bytes"),
        ({"data": {"_target_": "a.B", "inner": {"_target_": 3}}}, "data.inner._target_=3: must be a dotted path"),
    ],
)  # fmt: skip
def test_values_out_of_range(changes: dict[str, Any], said: str) -> None:
    assert said in refused(**changes)


def test_a_schedule_has_one_warm_up() -> None:
    nodes: dict[str, Any] = {"optimizer": {"_target_": "a.O"}, "schedule": {"_target_": "a.cosine", "warmup_steps": 2}}
    nodes["schedule"]["warmup_ratio"] = 0.1
    assert "schedule.warmup_steps=2 schedule.warmup_ratio=0.1: a warm-up is a number" in refused(**nodes)
    nodes["schedule"]["warmup_steps"] = None
    assert plan(**nodes, max_steps=None, max_epochs=3).schedule == {"_target_": "a.cosine", "warmup_ratio": 0.1}


# --- the Plan itself

optional = st.none() | st.integers(1, 1000)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts.filter(lambda t: t != "_target_"), inner, max_size=3)
    ),
    max_leaves=8,
)
timeouts = st.floats(0.1, 1000)
configs = st.builds(
    RunConfig,
    stage=st.sampled_from(get_args(Stage)),
    name=st.none() | st.from_regex(r"[a-z][a-z0-9._-]{0,20}", fullmatch=True),
    resume=st.none() | texts,
    seed=st.integers(0, 2**63 - 1),
    devices=st.sampled_from([1, 2, 4]),
    micro_batch_size=st.sampled_from([1, 2, 4]),
    global_batch_size=st.sampled_from([16, 64]),
    max_steps=st.integers(1, 10**9),
    gradient_clip_val=st.none() | st.floats(1e-6, 1e6),
    validate_every_n_steps=optional,
    max_validation_batches=optional,
    optimizer_override=st.booleans(),
    units=st.none() | st.lists(texts, max_size=3).map(tuple),
    module=st.fixed_dictionaries({"_target_": st.just("a.Module"), "options": plain}),
    data=st.fixed_dictionaries({"_target_": st.just("a.Data")}),
    strategy=st.builds(DdpConfig, timeout_minutes=timeouts, find_unused_parameters=st.booleans())
    | st.builds(FsdpConfig, timeout_minutes=timeouts, reshard_after_forward=st.booleans())
    | st.builds(FsdpHybridConfig, timeout_minutes=timeouts, shard_size=st.just(1), defer_gradient_sync=st.booleans()),
    precision=st.builds(
        PrecisionConfig,
        tf32=st.just(False),
        loss_scaling=st.just(False),
        parameter_dtype=st.just("float32"),
        compute_dtype=st.sampled_from([d for d in get_args(Dtype) if d != "float16"]),
    ),
    checkpoint=st.builds(
        CheckpointConfig, save_every_n_steps=optional, monitor=st.none() | texts, mode=st.sampled_from(["min", "max"])
    ),
    optimizer=st.none() | st.fixed_dictionaries({"_target_": st.just("a.Optimizer"), "lr": st.floats(0, 1)}),
    schedule=st.none(),
    logger=st.builds(
        LoggerConfig, name=st.sampled_from(["csv", "wandb", "tensorboard"]), tags=st.lists(texts, max_size=3).map(tuple)
    ),
    cluster=st.just(ClusterConfig()),
    accelerator=st.just("cpu"),
    nodes=st.none(),
    max_epochs=st.none(),
    max_samples=st.none(),
    runs_dir=st.just("/runs"),
)


@given(configs)
def test_json_carries_the_whole_plan(made_config: RunConfig) -> None:
    made = make_plan(made_config, HOST)
    read = Plan.from_json(made.to_json())
    assert read == made
    assert dataclasses.asdict(read) == dataclasses.asdict(made)
    assert isinstance(hash(read.logger.tags), int) and (read.units is None or isinstance(read.units, tuple))


@given(configs)
def test_a_plan_is_a_function_of_its_arguments(made_config: RunConfig) -> None:
    before = repr(made_config)
    assert make_plan(made_config, HOST) == make_plan(made_config, HOST)
    assert repr(made_config) == before


def test_a_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().seed = 3  # type: ignore[misc]


def test_planning_needs_neither_torch_nor_numpy_nor_hydra() -> None:
    foreign = ("torch", "lightning", "numpy", "hydra", "omegaconf")
    code = f"import sys, shardwise.plan; print([m for m in {foreign} if m in sys.modules])"
    done = run_patiently([sys.executable, "-c", code], 60, env={"PYTHONPATH": str(SRC)})
    assert done.returncode == 0 and done.stdout.strip() == "[]"


def test_a_quick_check_leaves_the_profiler_out() -> None:
    """It makes fewer steps than profiler=pytorch needs."""
    assert plan(quick_check=True, profiler="pytorch").profiler == "none"


def test_a_quick_check_looks_for_the_metric_that_is_monitored() -> None:
    made = plan(quick_check=True, checkpoint=CheckpointConfig(monitor="val/nope", mode="max")).checkpoint
    assert made.monitor == "val/nope" and not made.saves
