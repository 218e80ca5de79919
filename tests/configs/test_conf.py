"""conf/: every file composes, binds to what it names and says all that its schema has."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from omegaconf import OmegaConf

from benchmarks.report import with_tables
from shardwise.cli import train
from shardwise.config.compose import compose, read_clusters
from shardwise.config.groups import (
    SAVED,
    STRATEGY_CONFIGS,
    ActivationCheckpointingConfig,
    CheckpointConfig,
    ClusterConfig,
    CompileConfig,
    FsdpConfig,
    LoggerConfig,
    PeakTflopsConfig,
    PrecisionConfig,
)
from shardwise.config.help import config_groups
from shardwise.config.paths import CONF
from shardwise.config.schema import RunConfig, bind
from shardwise.config.targets import build, check
from shardwise.errors import ConfigError
from shardwise.launch.host import planned_host
from shardwise.plan import Host, Plan
from shardwise.plan.capabilities import STRATEGIES
from shardwise.plan.plan import Compile
from shardwise.plan.resolve import make_plan
from shardwise.start.plans import make_run_plans

DGX = Host(cuda_devices=8, run_id="made-up")
GROUPS = config_groups([CONF])
OPTIONS = [f"{group}={option}" for group, options in GROUPS.items() for option in options]
CUSTOM = "recipe=custom module._target_=tests.configs.foreign.Own data._target_=tests.configs.foreign.Data"
IMAGES = "recipe=image_classification"
NEEDS = {  # other words without which an option cannot be composed: the recipe of a model, say
    "recipe=custom": CUSTOM,
    "model=none": CUSTOM,
    "data=custom": "data._target_=tests.configs.foreign.Data",
    "data=token_shards": "data.directory=anywhere",
    "data=mixture": "'data.corpora={a: {directory: anywhere, weight: 1}}'",
    "data=text_stream": "data.source._target_=tests.configs.foreign.Data",
    **{f"model={model}": IMAGES for model in ("resnet_tiny", "resnet18", "resnet50", "vit_tiny", "vit_b16")},
    "model=custom": f"{IMAGES} model._target_=tests.configs.foreign.Own",
    "model=timm": f"{IMAGES} model.name=resnet18",
    **{f"data={data}": IMAGES for data in ("digits", "synthetic_images")},
    **{f"data={data}": f"{IMAGES} data.directory=anywhere" for data in ("image_folder", "webdataset")},
    "optimizer=none": "schedule=none",
    "experiment=llama3_8b_fsdp": "data.directory=anywhere",
    "experiment=llama3_1b": "data.directory=anywhere",
    "strategy=fsdp_hybrid": "devices=4 strategy.shard_size=2",
}


def read(*argv: str) -> RunConfig:
    [job] = compose(list(argv)).jobs
    return job.config


def bind_targets(plan: Plan) -> None:
    check(plan.module, "module")
    check(plan.data, "data")
    if plan.optimizer is not None:
        check(plan.optimizer, "optimizer", positional=1)
    if plan.schedule is not None:
        check(plan.schedule, "schedule", positional=1, supplied=("total_steps",))


def load(file: Path) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file)))


def test_all_of_conf_is_tried() -> None:
    assert {f"{file.parent.name}={file.stem}" for file in CONF.glob("*/*")} == set(OPTIONS)
    assert [file.name for file in CONF.iterdir() if file.is_file()] == ["train.yaml"]
    assert NEEDS.keys() <= set(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_composes_plans_and_binds(option: str) -> None:
    plan = make_plan(read(option, *shlex.split(NEEDS.get(option, ""))), DGX)
    bind_targets(plan)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_command_line_has_the_last_word_over_an_experiment(experiment: str, strategy: str) -> None:
    needs = NEEDS.get(f"experiment={experiment}", "").split()
    plan = make_plan(read(f"experiment={experiment}", f"strategy={strategy}", "devices=4", "max_steps=7", *needs), DGX)
    assert (plan.strategy.name, plan.topology.devices, plan.max_steps) == (strategy, 4, 7)
    assert plan.strategy.symmetric_memory is False


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("words", ["", "accelerator=cpu", "strategy=ddp", "strategy=fsdp", "strategy=zero3",
                                   "strategy=fsdp_hybrid strategy.shard_size=8"])  # fmt: skip
def test_gpus_of_the_llama_experiment_copy_on_one_node_under_its_own_strategy(words: str, nodes: int) -> None:
    host = Host(cuda_devices=8, run_id="made-up", launcher="slurm", nodes=nodes, devices=8)
    plan = make_plan(read("experiment=llama3_8b_fsdp", "data.directory=/d", *words.split()), host)
    assert plan.strategy.symmetric_memory is (None if nodes == 1 and not words else False)
    assert plan.strategy.name == dict(word.split("=") for word in words.split()).get("strategy", "fsdp")
    assert (plan.compile.name, plan.topology.world_size) == ("layer", 8 * nodes)
    bind_targets(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_no_schedule_is_none_over_an_experiment() -> None:
    words = ["experiment=llama3_8b_fsdp", "data.directory=/d", "schedule=none"]
    job = compose(words).jobs[0]
    assert job.config.schedule is None
    assert "schedule.warmup_steps=200 of the experiment does not count" in job.messages[0]
    with pytest.raises(ConfigError, match="schedule names no class"):  # an option of a schedule is asked for
        make_plan(read(*words, "schedule.warmup_steps=3"), DGX)


def test_the_llama_experiment_is_what_it_says() -> None:
    plan = make_plan(read("experiment=llama3_8b_fsdp", "data.directory=/d"), DGX)
    assert (plan.strategy.name, plan.precision.name, plan.topology.shard) == ("fsdp", "bf16", 8)
    assert (plan.micro_batch_size, plan.global_batch_size, plan.accumulate_grad_batches) == (1, 64, 8)
    assert plan.module["model"]["dim"] == 4096 and plan.data["sequence_length"] == 8192
    plan = make_plan(read("experiment=llama3_1b", "data.directory=/d"), DGX)
    assert (plan.strategy.name, plan.precision.name, plan.compile.name) == ("ddp", "bf16", "model")
    assert (plan.micro_batch_size, plan.global_batch_size, plan.accumulate_grad_batches) == (4, 64, 2)


@pytest.mark.parametrize(
    ("group", "kind"),
    [
        ("precision", PrecisionConfig),
        ("cluster", ClusterConfig),
    ],
)
def test_a_file_has_the_keys_of_its_schema(group: str, kind: type[Any]) -> None:
    for file in sorted((CONF / group).iterdir()):
        assert load(file).keys() == {f.name for f in dataclasses.fields(kind)}, file
        assert load(file)["name"] == file.stem


def test_a_clusters_file_has_every_peak() -> None:
    for file in sorted((CONF / "cluster").iterdir()):
        peaks = load(file)["peak_tflops"]
        assert peaks.keys() == {f.name for f in dataclasses.fields(PeakTflopsConfig)}, file
        assert {type(peak) for peak in peaks.values()} == ({type(None)} if file.stem == "local" else {float}), file
    assert [cluster.gpu for cluster in read_clusters()] == ["A100", "B200", "H100", "H200"]


def test_the_tables_of_the_docs_are_made_from_conf() -> None:
    text = (CONF.parent / "docs" / "metrics.md").read_text()
    assert text.count("<!-- table: ") == 3 and "| H200 | `cluster=dgx_h200` | 989.4 |" in text
    assert with_tables(text) == text, "run python benchmarks/report.py"


@pytest.mark.parametrize(
    ("gpu", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H200", "bf16_true", 989.4),
        ("NVIDIA H200", "fp16", 989.4),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA H200", "fp64", 66.9),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", None),
        ("NVIDIA GH200 480GB", "bf16", None),
        ("NVIDIA H20", "bf16", None),
        ("NVIDIA H100 PCIe", "bf16", None),
        ("NVIDIA A100-PCIE-40GB", "bf16", None),
        ("NVIDIA H200 NVL", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", None),
        (None, "bf16", None),
    ],
)
def test_this_machines_peak_is_that_of_the_cluster_with_its_gpu(
    gpu: str | None, precision: str, peak: float | None
) -> None:
    [job] = compose([f"precision={precision}"]).jobs
    for devices, expected in ((8, peak), (0, None)):
        if devices or precision != "tf32":
            host = Host(cuda_devices=devices, run_id="made-up", gpu=gpu if devices else None)
            assert make_run_plans((job,), host)[1][0].peak_tflops == expected
    if peak is not None:
        [job] = compose([f"precision={precision}", "accelerator=cuda", "cluster.peak_tflops.bf16=1"]).jobs
        said = 1.0 if precision.startswith("bf16") else peak
        host = Host(cuda_devices=1, run_id="made-up", gpu=gpu)
        assert make_run_plans((job,), host)[1][0].peak_tflops == said


def test_the_default_of_an_option_is_that_of_its_field() -> None:
    sizes = ["micro_batch_size=1", "global_batch_size=1"]
    config = read("recipe=custom", "module._target_=a.B", "max_steps=null", *sizes)
    for f in dataclasses.fields(RunConfig):
        if f.name not in GROUPS and f.default is not dataclasses.MISSING and f.default != "???":
            assert getattr(config, f.name) == f.default, f.name
    variants = {"fsdp_copies": FsdpConfig(symmetric_memory=None)}  # of a strategy; not one of their own
    assert set(GROUPS["strategy"]) == STRATEGIES.keys() | variants.keys()
    for option, strategy in (variants | {name: kind() for name, kind in STRATEGY_CONFIGS.items()}).items():  # type: ignore[call-arg]
        assert read(f"strategy={option}").strategy == strategy


def test_the_prolog_of_a_cluster_stays_out_of_the_plan() -> None:
    """It may hold a secret, and a Plan goes into checkpoints, reports and trackers."""
    plan = make_plan(read("cluster.prolog='export TOKEN=hf_1234'", "cluster.sbatch.account=mine"), DGX)
    assert "hf_1234" not in plan.to_json() and plan.cluster.name == "local"


def test_a_plan_of_an_earlier_version_is_read() -> None:
    old = json.loads((Path(__file__).parents[1] / "golden/plan_of_version_0.1.json").read_text())
    plan = Plan.from_json(json.dumps(old))
    assert plan.strategy == FsdpConfig(tensor_parallel_size=2, defer_gradient_sync=True, context_parallel_method=None)
    assert (plan.guard.on_spike, plan.guard.pass_over, plan.profile.ranks) == ("skip", (64,), "all")
    assert (plan.loss, plan.chosen_loss.reason) == ("auto", old["loss"]["reason"])
    assert plan.whole_weights_in == ("on_train_batch_end",) and plan.precision.is_mixed and plan.freeze == ("backbone",)
    assert Plan.from_json(plan.to_json()) == plan


def test_help_mentions_everything() -> None:
    text = compose(["--help"]).print
    assert text is not None and compose(["-h", "nonsense"]).print == text
    for group, options in GROUPS.items():
        [line] = [line for line in text.splitlines() if line.startswith(f"  {group}=")]
        assert line.split("=")[1].strip().split(" | ") == options
    for f in dataclasses.fields(RunConfig):
        assert f"{f.name}=" in text or f"  {f.name}." in text, f.name
    described = [("checkpoint", CheckpointConfig), ("logger", LoggerConfig), ("compile", CompileConfig)]
    for group, kind in [*described, *(("strategy", kind) for kind in STRATEGY_CONFIGS.values())]:
        for f in dataclasses.fields(kind):
            assert f.name == "name" or f"  {group}.{f.name}=" in text, f"{group}.{f.name}"


@pytest.mark.parametrize("line", [*NEEDS.items(), ("strategy=fsdp", "name=a resume=b units=[A,B] gradient_clip_val=3")])
def test_cfg_job_is_yaml_that_loads_back(line: tuple[str, str]) -> None:
    argv = shlex.split(" ".join(line))
    text = compose([*argv, "--cfg", "job"]).print
    assert text is not None
    plain = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(text)))
    config = read(*argv)
    plain["strategy"] = bind(type(config.strategy), plain["strategy"], "strategy")
    assert bind(RunConfig, plain) == config


def test_a_sweep_is_every_combination_each_in_its_own_folder() -> None:
    jobs = compose(["-m", "micro_batch_size=1,2", "strategy=ddp,fsdp", "seed=5"]).jobs
    said = [(job.config.micro_batch_size, job.config.strategy.name, job.config.seed) for job in jobs]
    assert said == [(1, "ddp", 5), (1, "fsdp", 5), (2, "ddp", 5), (2, "fsdp", 5)]
    _, plans = make_run_plans(jobs, DGX)
    assert [Path(plan.run_dir).name for plan in plans] == [plan.run_id for plan in plans]
    assert [plan.run_id for plan in plans] == ["made-up-0", "made-up-1", "made-up-2", "made-up-3"]


def test_ranges_and_choices_are_swept() -> None:
    jobs = compose(["--multirun", "seed=range(0,3)", "optimizer.lr=choice(1e-3,3e-3)"]).jobs
    assert [(job.config.seed, job.config.optimizer["lr"]) for job in jobs] == [
        (seed, lr) for seed in range(3) for lr in (1e-3, 3e-3)
    ]
    for words, found in (("zero*", ["zero1", "zero2", "zero3"]), ("zero*,exclude=zero2", ["zero1", "zero3"])):
        jobs = compose(["-m", f"strategy=glob({words})"]).jobs
        assert [job.config.strategy.name for job in jobs] == found
    with pytest.raises(ConfigError, match="matches none of ddp, fsdp"):
        compose(["-m", "strategy=glob(x*)"])
    with pytest.raises(ConfigError, match="only a group has a glob"):
        compose(["-m", "seed=glob(*)"])


def test_a_folder_of_your_own_adds_options_and_has_the_groups_of_ours(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\nmax_steps: 3\noptimizer:\n  lr: 0.5\n")
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/rprop.yaml").write_text("_target_: torch.optim.Rprop\nlr: 0.1\n")
    config = read("--config-dir", str(tmp_path), "experiment=mine")
    assert (config.max_steps, config.optimizer["lr"]) == (3, 0.5)
    assert read("--config-dir", str(tmp_path), "optimizer=rprop").optimizer["_target_"] == "torch.optim.Rprop"
    assert "mine" in (compose(["--help", "--config-dir", str(tmp_path)]).print or "")


def test_plans_of_before_the_groups_mean_what_they_meant() -> None:
    words = ["compile=model", "activation_checkpointing=full", "cudnn_benchmark=true"]
    plan = make_plan(read(*words), Host(cuda_devices=0, run_id="made-up"))
    earlier = json.loads(plan.to_json()) | {"compile": "model", "activation_checkpointing": "full", "benchmark": True}
    del earlier["cudnn_benchmark"]
    assert Plan.from_json(json.dumps(earlier)) == plan


def test_options_of_the_groups_reach_the_plan() -> None:
    plan = make_plan(read("compile=model", "compile.memory_budget=0.5", "compile.mode=max-autotune"), DGX)
    assert plan.compile == Compile("model", memory_budget=0.5, mode="max-autotune")
    plan = make_plan(read("compile=layer", "compile.recompute_elementwise=true"), DGX)
    assert plan.compile == Compile("layer", recompute_elementwise=True)
    words = ["activation_checkpointing=selective", "activation_checkpointing.every_n_layers=2"]
    plan = make_plan(read(*words, "activation_checkpointing.save=[every_second_matmul,aten.mm]"), DGX)
    expected = ActivationCheckpointingConfig("selective", every_n_layers=2, save=("every_second_matmul", "aten.mm"))
    assert plan.activation_checkpointing == expected
    assert set(make_plan(read(*words), DGX).activation_checkpointing.save) <= set(SAVED)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3"])
def test_cuda_graphs_are_refused_where_memory_moves(strategy: str) -> None:
    words = ["compile=layer", "compile.cudagraphs=true", f"strategy={strategy}"]
    if strategy == "ddp":
        assert make_plan(read(*words), DGX).compile.cudagraphs
        return
    with pytest.raises(ConfigError, match=rf"^compile\.cudagraphs=true strategy={strategy}: a CUDA graph replays"):
        make_plan(read(*words), DGX)


def test_values_come_from_the_environment_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_NODES", "2")
    assert read("nodes=${oc.env:MY_NODES}", "gradient_clip_val=${oc.env:MY_NODES}").nodes == 2
    monkeypatch.setenv("MY_RATE", "1e-3")
    words = ["optimizer.lr=${oc.env:MY_RATE}", "optimizer.betas=[${oc.env:MY_RATE},0.9]", "optimizer.eps=2e-8"]
    config = read(*words, "schedule.warmup_steps=${oc.env:MY_NODES}")
    assert (config.optimizer["lr"], config.optimizer["betas"], config.optimizer["eps"]) == (1e-3, [1e-3, 0.9], 2e-8)
    assert config.schedule["warmup_steps"] == 2 and type(config.schedule["warmup_steps"]) is int
    # What conf/ does not know is as its words say
    assert read("model.dim=${oc.env:MY_NODES}").module["model"]["dim"] == "2"
    assert read("model.dim='${oc.decode:${oc.env:MY_NODES}}'").module["model"]["dim"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ""),
        (["schedule.warmup_steps=500"], ""),  # the last step has the peak
        (["schedule.warmup_steps=501"], "schedule.warmup_steps=501 is more than max_steps=500: the learning rate rises "
         "to the end, and reaches 0.998 of optimizer.lr=0.003"),
        (["max_steps=100", "schedule.warmup_steps=200"], "schedule.warmup_steps=200 is more than max_steps=100: the "
         "learning rate rises to the end, and reaches 0.5 of optimizer.lr=0.003"),
        (["validate_every_n_steps=500"], ""),
        (["validate_every_n_steps=501"], "checkpoint.monitor=validation/loss is not measured in this run, so it "
         "chooses no best checkpoint: validate_every_n_steps=501 is more than max_steps=500"),
        (["max_validation_batches=0"], "checkpoint.monitor=validation/loss is not measured in this run, so it chooses "
         "no best checkpoint: max_validation_batches=0 leaves validation out"),
        (["max_validation_batches=0", "checkpoint.monitor=null"], ""),
        (["max_steps=10", "stage=validate"], ""),
        (["quick_check=true", "schedule.warmup_steps=200"], ""),
        (["find_learning_rate=true"], ""),
    ],
)  # fmt: skip
def test_what_a_run_is_too_short_to_reach_is_said(words: list[str], said: str, capsys: Any) -> None:
    assert train([*words, "dry_run=true"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]
    assert told == [*([f"# {said}"] if said else []), "# config", "# plan"]


def test_text_that_looks_like_a_number_is_kept_when_it_is_quoted() -> None:
    assert read("name='1e3'").name == "1e3"
    assert read("name='20260101_1'").name == "20260101_1"
    assert read("name=2026").name == "2026"
    assert read("resume='a=b/~c'").resume == "a=b/~c"


def test_a_class_of_ones_own_may_take_a_name() -> None:
    words = ["recipe=custom", "module._target_=my.Module", "data._target_=my.Data", "data.name=rings", "module.name=a"]
    config = compose(words).jobs[0].config
    assert (config.data["name"], config.module["name"]) == ("rings", "a")


@pytest.mark.parametrize(
    ("words", "nodes", "devices", "accelerator", "said"),
    [
        ("nodes=32 devices=8", 32, 8, "cpu", "32 nodes of cluster=local with 8 CPU processes each"),
        ("nodes=32 devices=8 accelerator=cuda", 32, 8, "cuda", "32 nodes of cluster=local with 8 GPUs each"),
        ("nodes=4 cluster=dgx_h100 strategy=fsdp_hybrid", 4, 8, "cuda", "4 nodes of cluster=dgx_h100 with 8 GPUs each"),
        ("devices=4 cluster=dgx_h100", 1, 4, "cuda", "1 node of cluster=dgx_h100 with 4 GPUs each"),
        ("nodes=2 devices=4 accelerator=cpu cluster=dgx_h100", 2, 4, "cpu", "2 nodes of cluster=dgx_h100 with 4 CPU"),
        ("devices=2", 1, 2, "cpu", ""),
    ],
)
def test_a_dry_run_plans_for_machines_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    nodes: int,
    devices: int,
    accelerator: str,
    said: str,
) -> None:
    monkeypatch.setattr("shardwise.cli.inspect_host", lambda: Host(0, run_id="made-up"))
    assert train(["dry_run=true", "global_batch_size=1024", *words.split()]) == 0
    text = capsys.readouterr().out
    plan = json.loads(text.partition("# plan\n")[2])
    topology = plan["topology"]
    assert (topology["nodes"], topology["devices"], plan["accelerator"]) == (nodes, devices, accelerator)
    assert (f"# planned for {said}" in text) if said else "# planned" not in text


def test_a_dry_run_on_a_machine_with_gpus_plans_for_those_of_the_cluster() -> None:
    here = Host(cuda_devices=2, gpu="NVIDIA A100-SXM4-80GB", gpu_capability=(8, 0), run_id="made-up", cpus=4)
    hosts = {}
    for words in ("devices=2", "devices=4", "devices=4 cluster=dgx_a100", "devices=2 cluster=dgx_h100"):
        [job] = compose(words.split()).jobs
        hosts[words] = planned_host(job.config, here)
        assert make_plan(job.config, hosts[words], job.clusters).accelerator == "cuda"
    assert hosts["devices=2"] is here
    assert [(host.cuda_devices, host.gpu, host.gpu_capability) for host in hosts.values()] == [
        (2, here.gpu, (8, 0)), (4, here.gpu, (8, 0)), (4, here.gpu, (8, 0)), (2, "H100", None),
    ]  # fmt: skip


@pytest.mark.parametrize("plus", ["", "+"])
def test_a_variable_of_the_cluster_is_added_and_replaced_by_its_name(plus: str) -> None:
    word = f"{plus}cluster.environment.NCCL_ALGO=Ring"
    [job] = compose(["cluster=dgx_h100", word, "cluster.environment.NCCL_IB_TIMEOUT=20"]).jobs
    assert job.config.cluster.environment["NCCL_ALGO"] == "Ring"
    assert job.config.cluster.environment["NCCL_IB_TIMEOUT"] == "20"


def test_a_partial_is_the_target_with_some_of_its_arguments() -> None:
    node = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 0.5}
    check({"a": node}, "module")
    made = build({"a": node}, "module")["a"]
    assert (made.func, made.keywords) == (torch.optim.AdamW, {"lr": 0.5})
    for bad, said in (({"rate": 1}, "unexpected keyword argument 'rate'"), ({"_partial_": 1}, "must be true or false")):
        with pytest.raises(ConfigError, match=said):
            check({"a": node | bad}, "module")
    with pytest.raises(ConfigError, match="leave _partial_ out"):
        check(node, "optimizer", torch.optim.Optimizer, positional=1)
