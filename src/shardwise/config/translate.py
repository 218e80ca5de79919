"""Translates options of Lightning and other trainers on the command line, if they have exactly one meaning here.

The user gets one line about each translation. An option without an exact counterpart is refused, with a message about
ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.config.coming_from_lightning import find
from shardwise.devices import count_cuda_devices
from shardwise.errors import ConfigError

_CALLBACKS = (
    "each callback has a name of your choice and a class: callbacks.stop._target_="
    "lightning.pytorch.callbacks.EarlyStopping callbacks.stop.monitor=validation/loss"
)


_AXIS = re.compile(r"strategy\.(tensor|context|pipeline)_parallel_size=(?!1$).*")


@dataclass(frozen=True)
class Translated:
    """The command line with our options, and messages about it for the user."""

    overrides: list[str]
    messages: tuple[str, ...]


def translate(words: Sequence[str]) -> Translated:
    """Translate overrides. Those that are ours already, and unknown ones, are not changed.

    Raises:
        ConfigError: an option of Lightning that has no exact counterpart here.
    """
    ours: list[str] = []
    messages: list[str] = []
    for word in words:
        new = _translate(word)
        if new != [word]:
            because = _BECAUSE.get(word.lstrip("+").removeprefix("trainer.").lower(), "")
            messages.append(f"{word} is read as {' '.join(new)}{because}" if new else f"{word} {_ANYWAY}")
        ours += new
    keys = {word.partition("=")[0] for word in ours}
    axis = next((word for word in ours if _AXIS.fullmatch(word)), None)
    if axis is not None and not {"strategy", "experiment"} & keys:
        ours.append("strategy=fsdp")
        messages.append(f"{axis} is an option of strategy=fsdp, which is taken")
    if "recipe=image_classification" in ours and "model._target_" in keys and not {"model", "experiment"} & keys:
        ours.append("model=custom")
        messages.append("model._target_ is given alone, so model=custom is taken")
    return Translated(ours, tuple(messages))


def _translate(word: str) -> list[str]:
    key, equals, value = word.partition("=")
    name = key.lstrip("+")
    if name == "trainer" or name.startswith("trainer."):
        return _argument_of_trainer(word, name.removeprefix("trainer").removeprefix("."), value)
    if not equals:
        return [word]
    if name == "callbacks":
        if not value.startswith("{"):
            raise ConfigError(f"{word}: {_CALLBACKS}")
        return [word]
    if name == "debug" and not value.startswith("{"):
        raise ConfigError(f"{word}: {_DEBUG}")
    if name in ("hydra/sweeper", "hydra/launcher", "optimized_metric", "hparams_search"):
        raise ConfigError(f"{word}: {_SWEEPS}")
    if (root := name.partition(".")[0]) in _OF_THE_TEMPLATE:
        raise ConfigError(f"{word}: no option here: {_OF_THE_TEMPLATE[root]}")
    if name in _VALUES:
        return _by_value(word, key, value)
    if name in _OTHERS:
        return _OTHERS[name](word, value)
    if name in _REFUSED or (name not in _SAME and find("argument", name) is not None):
        raise ConfigError(f"{word}: {_instead(name)}")
    return [word]


def _argument_of_trainer(word: str, name: str, value: str) -> list[str]:
    """Translate `trainer.max_steps=3`."""
    if not name or "." in name:
        raise ConfigError(
            f"{word}: the Trainer is made by the run, and what it takes is said without `trainer.`, e.g. max_steps=100 "
            f"strategy=ddp devices=4"
        )
    if name in _OTHERS:
        return _OTHERS[name](word, value)
    if name in _SAME or name in _VALUES or name == "callbacks":
        return _translate(f"{name}={value}")
    if find("argument", name) is None and name not in _REFUSED:
        raise ConfigError(f"{word}: Lightning's Trainer has no argument {name}, and there is no trainer here; "
                          "--help lists what there is")  # fmt: skip
    raise ConfigError(f"{word}: {_instead(name)}")


def _instead(name: str) -> str:
    if name in _REFUSED:
        return _REFUSED[name]
    row = find("argument", name)
    assert row is not None
    lead = "no option here; what there is: " if row.answer == "word" else "no option here: "
    return lead + row.text.replace("`", "")


def _by_value(word: str, key: str, value: str) -> list[str]:
    """Translate the value of an option that has the same name here, and some values with other names."""
    name, plain = key.lstrip("+"), value.strip("'\"")
    ours, refused = _VALUES[name], _REFUSED_VALUES.get(name, {})
    if name == "logger" and plain.startswith("["):
        raise ConfigError(f"{word}: {_LOGGERS}")
    if plain in refused:
        raise ConfigError(f"{word}: {refused[plain]}")
    if plain in ours:
        first, *more = ours[plain].split()
        return [f"{name}={first}", *more]
    if "," in plain and not plain.startswith("["):  # this is a sweep
        return _sweep(word, name, plain.split(","))
    return [word]


def _sweep(word: str, name: str, values: list[str]) -> list[str]:
    new = [_by_value(f"{name}={value}", name, value) for value in values]
    if all(one == [f"{name}={value}"] for one, value in zip(new, values, strict=True)):
        return [word]
    if more := next((" ".join(one) for one in new if len(one) > 1), None):
        raise ConfigError(f"{word}: a value of this sweep stands for several words, {more}; sweep over those")
    return [f"{name}={','.join(one[0].partition('=')[2] for one in new)}"]


def _devices(word: str, value: str) -> list[str]:
    if value not in ("-1", "auto", "'-1'", "'auto'"):
        if value.startswith("["):
            raise ConfigError(f"{word}: devices is a number of processes; a list of GPUs is said by the environment, "
                              f"e.g. CUDA_VISIBLE_DEVICES={value.strip('[]').replace(' ', '')}")  # fmt: skip
        return [f"devices={value}"]
    found = count_cuda_devices()
    if not found:
        raise ConfigError(f"{word}: all GPUs are meant, and this process sees no GPU to count; give devices=N, "
                          "the number of processes on each node")  # fmt: skip
    return [f"devices={found}"]


def _gpus(word: str, value: str) -> list[str]:
    return ["accelerator=cuda", *_devices(f"devices={value}", value)]


def _renamed(ours: str) -> Callable[[str, str], list[str]]:
    return lambda word, value: [f"{ours}={value}"]


def _by_table(values: dict[str, str], counts_as: str | None = None) -> Callable[[str, str], list[str]]:
    """A translation by a table from values to our overrides; an empty one means that nothing needs to be given.

    `counts_as`: the option that has the same meaning if the value is a count of at least one. Other values are refused.
    """

    def read(word: str, value: str) -> list[str]:
        if (plain := value.strip("'\"").lower()) in values:
            return values[plain].split()
        if counts_as is not None and re.fullmatch(r"[1-9][0-9]*", value):
            return [f"{counts_as}={value}"]
        raise ConfigError(f"{word}: {_instead(word.partition('=')[0].rpartition('.')[2].lstrip('+'))}")

    return read


def _truth(true: str, false: str, otherwise: str) -> Callable[[str, str], list[str]]:
    def read(word: str, value: str) -> list[str]:
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"{word}: {otherwise}")
        return [true if value.lower() == "true" else false]

    return read


def _zero(ours: str) -> dict[str, str]:
    return dict.fromkeys(("0", "0.0"), ours)


def _checkpoint_path(word: str, value: str) -> list[str]:
    return ["resume=auto" if value in ("last", "'last'") else f"resume={value}"]


_ANYWAY = "is what happens here anyway"
_LOGGERS = (
    "metrics.csv is always written, and logger= names one tracker beside it, e.g. logger=tensorboard; any others have "
    "names of your choice: loggers.NAME._target_=package.Logger"
)
_DEBUG = (
    "debug= has options, no files: quick_check=true tries a few batches of every stage (fdr), max_train_batches=N with "
    "max_epochs=M learns a few by heart (overfit), limit is max_train_batches=N max_validation_batches=N, profiler is "
    "profiler=simple, and debug.anomaly=true finds the operation that makes NaN"
)
_SWEEPS = (
    "-m runs every combination of values one after the other, and shardwise submit -m as an array; a search such as "
    "Optuna's is a loop of ten lines: docs/coming-from-lightning-hydra-template.md"
)
_OF_THE_TEMPLATE = {  # lightning-hydra-template
    "test": "stage=test name=RUN resume=best tests the best checkpoint of a run",
    "train": "stage=validate, test or predict is another stage than training",
    "paths": "runs_dir=FOLDER has the runs, and a path of your own is ${oc.env:NAME} or a word of data",
    "extras": "dry_run=true prints the config",
}
_PROCESSES = "one process drives one device; use strategy=ddp, which starts the processes by itself"
_VALUES: dict[str, dict[str, str]] = {
    "resume": {"true": "auto", "True": "auto"},
    "accelerator": {"gpu": "cuda"},
    "precision": {
        "bf16-mixed": "bf16", "16-mixed": "fp16", "16": "fp16", "bf16-true": "bf16_true",
        "32": "fp32", "32-true": "fp32", "64": "fp64", "64-true": "fp64",
    },
    "strategy": {
        "auto": "ddp", "ddp_find_unused_parameters_false": "ddp",
        "ddp_find_unused_parameters_true": "ddp strategy.find_unused_parameters=true",
        "fsdp2": "fsdp", "fsdp_native": "fsdp",
        "deepspeed": "zero2", "deepspeed_stage_1": "zero1", "deepspeed_stage_2": "zero2", "deepspeed_stage_3": "zero3",
        "deepspeed_stage_1_offload": "zero1 strategy.offload_optimizer=true",
        "deepspeed_stage_2_offload": "zero2 strategy.offload_optimizer=true",
        "deepspeed_stage_3_offload": "zero3 strategy.offload_optimizer=true strategy.offload_parameters=true",
    },
    "logger": {"false": "csv", "False": "csv"},
}  # fmt: skip
_BECAUSE = {
    "logger=false": ": metrics.csv is always written",
    "strategy=deepspeed": ", the stage that Lightning takes where none is named",
    "strategy=auto": ", which is right for one device and for several",
}
_REFUSED_VALUES: dict[str, dict[str, str]] = {
    "logger": dict.fromkeys(("many_loggers", "mlflow", "comet", "neptune", "aim"), _LOGGERS),
    "accelerator": dict.fromkeys(("rocm", "hip", "amd"), "AMD's GPUs are accelerator=cuda, with torch's ROCm build"),
    "precision": {
        "transformer-engine": "products in fp8 come from torchao here, around fp32 weights; use precision=fp8",
        "16-true": "weights in float16 lose what small gradients change, so there is no such run here; use "
        "precision=bf16_true, or precision=fp16, which keeps float32 weights",
    },
    "strategy": {
        "dp": _PROCESSES,
        "ddp_spawn": _PROCESSES,
        "ddp_fork": _PROCESSES,
        "ddp_notebook": _PROCESSES,
        "fsdp_cpu_offload": "fsdp keeps its shards on the GPU; use strategy=zero3 strategy.offload_optimizer=true "
        "strategy.offload_parameters=true",
        "deepspeed_stage_3_offload_nvme": "nothing is kept on NVMe here; use strategy=zero3 "
        "strategy.offload_optimizer=true strategy.offload_parameters=true, which uses the host's memory",
        "single_device": "leave strategy out: a run on one device is devices=1",
    },
}
_OTHERS: dict[str, Callable[[str, str], list[str]]] = {
    "devices": _devices,
    "gpus": _gpus,
    "num_nodes": _renamed("nodes"),
    "benchmark": _renamed("cudnn_benchmark"),
    "detect_anomaly": _renamed("debug.anomaly"),
    "epochs": _renamed("max_epochs"),
    "lr": _renamed("optimizer.lr"),
    "learning_rate": _renamed("optimizer.lr"),
    "weight_decay": _renamed("optimizer.weight_decay"),
    "num_workers": _renamed("data.num_workers"),
    "default_root_dir": _renamed("runs_dir"),
    "ckpt_path": _checkpoint_path,
    "tags": _renamed("logger.tags"),
    "task_name": _renamed("name"),
    "resume_from_checkpoint": _checkpoint_path,
    "limit_train_batches": _by_table({"1.0": "max_train_batches=null"}, "max_train_batches"),
    "limit_val_batches": _by_table({"1.0": "max_validation_batches=null", **_zero("max_validation_batches=0")}),
    "limit_test_batches": _by_table({"1.0": ""}),
    "limit_predict_batches": _by_table({"1.0": ""}),
    "overfit_batches": _by_table(_zero("")),
    "val_check_interval": _by_table({"1.0": "validate_every_n_steps=null"}),
    "check_val_every_n_epoch": _by_table({}, "validate_every_n_epochs"),
    "num_sanity_val_steps": _by_table({"0": ""}),
    "reload_dataloaders_every_n_epochs": _by_table({"0": ""}),
    "enable_model_summary": _by_table({"false": ""}),
    "sync_batchnorm": _by_table({"false": ""}),
    "inference_mode": _by_table({"false": ""}),
    "barebones": _by_table({"false": ""}),
    "use_distributed_sampler": _by_table({"true": ""}),
    "enable_progress_bar": _truth("progress_bar=true", "progress_bar=false", "give progress_bar=true or false"),
    "max_time": lambda word, value: [
        "callbacks.timer._target_=lightning.pytorch.callbacks.Timer",
        f"callbacks.timer.duration={value}",
    ],
    "fast_dev_run": _truth(
        "quick_check=true",
        "quick_check=false",
        "quick_check=true tries a few batches of every stage; max_steps=N and max_validation_batches=N set how many",
    ),
    "enable_checkpointing": _truth("checkpoint=default", "checkpoint=none", "give checkpoint=default or none"),
}
# Arguments of the Trainer that have the same name and the same meaning here.
_SAME = ("log_every_n_steps", "gradient_clip_val", "gradient_clip_algorithm", "max_steps", "max_epochs", "min_steps",
         "min_epochs", "deterministic", "profiler", "logger")  # fmt: skip
_REFUSED = {
    "batch_size": "micro_batch_size=N is the number of samples of one rank in one forward pass, and "
    "global_batch_size=N that of all ranks in one optimizer step: give both",
    "accumulate_grad_batches": "give global_batch_size=N and micro_batch_size=N: what is accumulated follows, "
    "global_batch_size / (micro_batch_size * ranks)",
    "limit_train_batches": "a share of the batches has no word here; max_train_batches=N is a number of them",
    "limit_val_batches": "max_validation_batches=N is a number of batches of all ranks together; 0 switches validation "
    "off",
    "val_check_interval": "validate_every_n_steps=N counts optimizer steps; null validates after every epoch",
    "check_val_every_n_epoch": "validate_every_n_epochs=N is a number of epochs; validate_every_n_steps=N counts "
    "optimizer steps, across epochs too",
    "warmup_ratio": "schedule.warmup_ratio=N is the share of all steps in which the learning rate rises",
    "warmup_steps": "schedule.warmup_steps=N is the number of steps in which the learning rate rises",
    "seed_everything": "give seed=N",
}
