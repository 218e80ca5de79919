"""Every name of Lightning's that a user may know, and what answers to it here: the same, our word for it, or refused.

docs/lightning.md is made from it, and the command line answers from it. No torch and no Lightning is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Answer = Literal["same", "word", "refused"]
Kind = Literal[
    "argument",  # of Trainer
    "method",  # of Trainer
    "attribute",  # of Trainer
    "module hook",  # what a LightningModule may override
    "data hook",  # what a LightningDataModule may override
    "callback hook",
    "module",  # what a LightningModule calls and reads on itself
    "data",  # the same, of a LightningDataModule
    "log",  # arguments of self.log and self.log_dict
    "logger",
]


@dataclass(frozen=True)
class Row:
    """`name` of Lightning's, and what it is here. `test`: the pytest node that holds it."""

    kind: Kind
    name: str
    answer: Answer
    text: str
    test: str


@dataclass(frozen=True)
class _Said:
    answer: Answer
    text: str
    test: str | None


def _same(text: str = "", test: str | None = None) -> _Said:
    return _Said("same", text, test)


def _word(text: str, test: str | None = None) -> _Said:
    return _Said("word", text, test)


def _refused(text: str, test: str | None = None) -> _Said:
    return _Said("refused", text, test)


def _rows(kind: Kind, test: str, names: Mapping[str, _Said]) -> tuple[Row, ...]:
    """Rows of one kind; `test` holds those that name none of their own."""
    return tuple(Row(kind, name, said.answer, said.text, said.test or test) for name, said in names.items())


_ARGUMENTS = _rows(
    "argument",
    "",
    {
        "accelerator": _same("`accelerator=auto|cpu|cuda`; `gpu` means `cuda`. Others have not been tried: refused"),
        "strategy": _word(
            "`strategy=ddp|fsdp|fsdp_hybrid|zero1|zero2|zero3`; `deepspeed_stage_2` is `zero2`. A strategy's options "
            "are its values: `strategy.find_unused_parameters=true`"
        ),
        "devices": _same("`devices=4`, processes a node. A list of GPUs is `CUDA_VISIBLE_DEVICES`"),
        "num_nodes": _word("`nodes=2`"),
        "precision": _word(
            "`precision=fp32|tf32|bf16|bf16_true|fp16|fp64`: `bf16-mixed` is `bf16`, `16-mixed` is `fp16`, `bf16-true` "
            "is `bf16_true`, `32-true` is `fp32`, `64-true` is `fp64`"
        ),
        "logger": _word(
            "`logger=csv|wandb|tensorboard`; one of your own: `loggers.NAME._target_=…`. metrics.csv is always written"
        ),
        "callbacks": _word("`callbacks.NAME._target_=…`, as many as you like, each with its arguments"),
        "fast_dev_run": _word("`quick_check=true`"),
        "max_epochs": _same("exactly one of `max_epochs`, `max_steps` and `max_samples` is given"),
        "min_epochs": _refused(
            "a run ends at its length, or where a callback ends it: give EarlyStopping the `patience` that it needs"
        ),
        "max_steps": _same("optimizer steps"),
        "min_steps": _refused(
            "a run ends at its length, or where a callback ends it: give EarlyStopping the `patience` that it needs"
        ),
        "max_time": _word(
            "`callbacks.timer._target_=lightning.pytorch.callbacks.Timer callbacks.timer.duration=00:12:00:00`"
        ),
        "limit_train_batches": _word("`max_train_batches=N`, micro-batches of one rank in an epoch"),
        "limit_val_batches": _word("`max_validation_batches=N`, of all ranks together"),
        "limit_test_batches": _refused("a test counts every sample once; `quick_check=true` runs a few batches"),
        "limit_predict_batches": _refused("every sample gets its prediction; `quick_check=true` runs a few batches"),
        "overfit_batches": _word("`max_train_batches=N`, with `shuffle=False` in the training loader"),
        "val_check_interval": _word("`validate_every_n_steps=N`, in optimizer steps; without it after every epoch"),
        "check_val_every_n_epoch": _word("`validate_every_n_steps=N` counts steps, across epochs too"),
        "num_sanity_val_steps": _refused(
            "validation is not tried before training, where it would change nothing: `quick_check=true` tries it"
        ),
        "log_every_n_steps": _same("optimizer steps, where Lightning counts micro-batches"),
        "enable_checkpointing": _word("`checkpoint=none|default|async`"),
        "enable_progress_bar": _word("a bar in a terminal, lines elsewhere"),
        "enable_model_summary": _word(
            "`callbacks.layers._target_=lightning.pytorch.callbacks.ModelSummary`; a run says its layers by itself"
        ),
        "accumulate_grad_batches": _word(
            "`global_batch_size=N` and `micro_batch_size=N`: accumulation is what follows, and is exact"
        ),
        "gradient_clip_val": _same("by the norm of all gradients, over every rank"),
        "gradient_clip_algorithm": _refused(
            "the norm is clipped, everywhere: DeepSpeed knows no other; a module under `ddp` or `fsdp` may clip by "
            "value in its own `configure_gradient_clipping`"
        ),
        "deterministic": _same("`true` or `false`; `warn` is `false` and `torch.use_deterministic_algorithms` by hand"),
        "benchmark": _refused("set `torch.backends.cudnn.benchmark` in the module's `on_fit_start`"),
        "inference_mode": _refused("always off: FSDP2 uses the parameters that validation has gathered again"),
        "use_distributed_sampler": _refused(
            "which rank gets which sample is the library's, so that a run can go on with other ranks"
        ),
        "profiler": _same("`profiler=simple|advanced|pytorch`"),
        "detect_anomaly": _refused("call `torch.autograd.set_detect_anomaly(True)` in the module's `on_fit_start`"),
        "barebones": _refused("what is measured costs next to nothing here: docs/overhead.md"),
        "plugins": _refused(
            "precision, processes and checkpoints are the strategies' own, so that they agree: `precision=`, "
            "`checkpoint=`, torchrun and Slurm are understood"
        ),
        "sync_batchnorm": _refused(
            "call `torch.nn.SyncBatchNorm.convert_sync_batchnorm` in the module's constructor, where it is wanted"
        ),
        "reload_dataloaders_every_n_epochs": _refused(
            "the order of samples is a function of seed and samples consumed: a data set that changes looks at its "
            "epoch by itself"
        ),
        "default_root_dir": _word("`runs_dir=DIR name=NAME`: a run writes `DIR/NAME` and nothing else"),
        "enable_autolog_hparams": _word("config.yaml and plan.json are a run's hyperparameters, always written"),
        "model_registry": _refused("a cloud service's; checkpoints are folders, and `shardwise export` copies them"),
    },
)

_TRAINER_METHODS = _rows(
    "method",
    "",
    {
        "fit": _word("`python train.py`; `ckpt_path` is `resume=auto|PATH`"),
        "validate": _word("`stage=validate resume=auto|PATH`"),
        "test": _word("`stage=test resume=auto|PATH`"),
        "predict": _word("`stage=predict resume=auto|PATH`"),
        "save_checkpoint": _same("a folder in this library's format; `weights_only` is refused: `shardwise export`"),
        "print": _same(),
        "init_module": _refused("the run builds the module, without memory for its parameters where it can"),
    },
)

_ATTRIBUTES = _rows(
    "attribute",
    "",
    {
        **{
            name: _same()
            for name in (
                "callback_metrics", "logged_metrics", "progress_bar_metrics", "callbacks", "current_epoch",
                "is_last_batch", "max_steps", "max_epochs", "min_epochs", "min_steps",
                "num_training_batches", "num_val_batches", "num_test_batches", "num_predict_batches",
                "num_sanity_val_batches", "estimated_stepping_batches", "accumulate_grad_batches", "should_stop",
                "state", "training", "validating", "testing", "predicting", "evaluating", "sanity_checking",
                "enable_validation", "optimizers", "lr_scheduler_configs", "lightning_module", "model", "datamodule",
                "train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders", "logger", "loggers",
                "log_dir", "default_root_dir", "ckpt_path", "world_size", "global_rank", "local_rank", "node_rank",
                "is_global_zero", "num_devices", "num_nodes", "device_ids", "accelerator", "strategy",
                "precision_plugin", "scaler", "profiler", "gradient_clip_val", "gradient_clip_algorithm",
                "log_every_n_steps", "fast_dev_run", "limit_train_batches", "limit_val_batches", "limit_test_batches",
                "limit_predict_batches", "overfit_batches", "val_check_interval", "val_check_batch",
                "check_val_every_n_epoch", "num_sanity_val_steps", "reload_dataloaders_every_n_epochs", "barebones",
                "enable_autolog_hparams", "early_stopping_callback", "early_stopping_callbacks", "interrupted",
                "received_sigterm", "fit_loop", "validate_loop", "test_loop", "predict_loop",
            )
        },
        "global_step": _same(
            "where a module optimizes by hand it counts batches, and stock Lightning the steps of every optimizer",
            "tests/distributed/test_by_hand.py::test_a_batch_is_a_step_however_many_optimizers_step_in_it",
        ),
        "precision": _word("Lightning's word for the run's precision"),
        "checkpoint_callback": _word("None: the run's own saving is no ModelCheckpoint"),
        "checkpoint_callbacks": _word("empty: the run's own saving is no ModelCheckpoint"),
        "progress_bar_callback": _word("None: the bar is the run's own"),
        "distributed_sampler_kwargs": _refused("the order of samples is the library's"),
    },
)  # fmt: skip

_EACH_STAGE = ("train", "validation", "test", "predict")
_STAGE_HOOKS = tuple(
    f"on_{stage}_{when}"
    for stage in _EACH_STAGE
    for when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
)
_GRADIENTS = "under `zero1`, `zero2` and `zero3` refused by name: gradients are in DeepSpeed's hands there"

_MODULE_HOOKS = _rows(
    "module hook",
    "",
    {
        **{name: _same() for name in ("configure_callbacks", "configure_optimizers", "configure_model")},
        "configure_sharded_model": _refused("Lightning's old name for `configure_model`"),
        **{name: _same() for name in ("prepare_data", "setup", "teardown", "on_fit_start", "on_fit_end")},
        **{name: _same() for name in _STAGE_HOOKS},
        **{name: _same() for name in ("training_step", "validation_step", "test_step", "predict_step")},
        **{f"on_{stage}_model_eval": _same() for stage in ("validation", "test", "predict")},
        **{f"on_{stage}_model_train": _same() for stage in ("validation", "test")},
        "on_validation_model_zero_grad": _same(),
        "on_before_zero_grad": _same(),
        "optimizer_zero_grad": _same(),
        "on_before_backward": _same(),
        "backward": _same(_GRADIENTS),
        "on_after_backward": _same(_GRADIENTS),
        "on_before_optimizer_step": _same(_GRADIENTS),
        "configure_gradient_clipping": _same(_GRADIENTS),
        "optimizer_step": _same(),
        "lr_scheduler_step": _same(),
        "on_save_checkpoint": _same(),
        "on_load_checkpoint": _same(),
        **{name: _same() for name in (
            "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
            "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
        )},
    },
)  # fmt: skip

_DATA_HOOKS = _rows(
    "data hook",
    "",
    {name: _same() for name in (
        "prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader", "test_dataloader",
        "predict_dataloader", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
        "state_dict", "load_state_dict", "on_exception",
    )},
)  # fmt: skip

_CALLBACK_HOOKS = _rows(
    "callback hook",
    "",
    {
        **{name: _same() for name in ("setup", "teardown", "on_fit_start", "on_fit_end", *_STAGE_HOOKS)},
        **{name: _same() for name in (
            "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
            "on_save_checkpoint", "on_load_checkpoint", "state_dict", "load_state_dict", "state_key", "on_exception",
        )},
        "on_sanity_check_start": _refused("validation is not tried before training; `quick_check=true` tries it"),
        "on_sanity_check_end": _refused("validation is not tried before training; `quick_check=true` tries it"),
    },
)  # fmt: skip

_MODULE = _rows(
    "module",
    "",
    {
        **{
            name: _same()
            for name in (
                "log", "log_dict", "print", "all_gather", "optimizers", "lr_schedulers", "manual_backward",
                "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer", "clip_gradients", "freeze", "unfreeze",
                "automatic_optimization", "current_epoch", "global_step", "global_rank", "local_rank", "device",
                "dtype", "on_gpu", "trainer", "logger", "loggers", "hparams", "hparams_initial",
                "save_hyperparameters", "example_input_array", "strict_loading", "to_onnx", "to_torchscript",
                "to_tensorrt", "remove_ignored_hparams", "allow_zero_length_dataloader_with_multiple_devices",
                "prepare_data_per_node",
            )
        },
        "load_from_checkpoint": _word("`shardwise export` writes weights that any program reads; `init_from=PATH`"),
        "device_mesh": _refused("the mesh is the strategy's"),
        "fabric": _refused("a module of Fabric's has no Trainer"),
    },
)  # fmt: skip

_DATA = _rows(
    "data",
    "",
    {
        **{name: _same() for name in (
            "hparams", "hparams_initial", "save_hyperparameters", "name", "trainer", "prepare_data_per_node",
            "allow_zero_length_dataloader_with_multiple_devices", "from_datasets", "remove_ignored_hparams",
        )},
        "load_from_checkpoint": _refused("the data's arguments are in the run's config.yaml"),
    },
)  # fmt: skip

_LOG = _rows(
    "log",
    "",
    {
        **{name: _same() for name in (
            "name", "value", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist",
            "sync_dist_group", "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only", "dictionary",
        )},
    },
)  # fmt: skip

_LOGGER = _rows(
    "logger",
    "",
    {name: _same() for name in (
        "log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint", "name", "version",
        "save_dir", "root_dir", "log_dir", "group_separator",
    )},
)  # fmt: skip

ROWS: tuple[Row, ...] = (
    *_ARGUMENTS, *_TRAINER_METHODS, *_ATTRIBUTES, *_MODULE_HOOKS, *_DATA_HOOKS, *_CALLBACK_HOOKS, *_MODULE, *_DATA,
    *_LOG, *_LOGGER,
)  # fmt: skip


def find(kind: Kind, name: str) -> Row | None:
    """What is said of Lightning's `name`; None where it has none of that name."""
    return next((row for row in ROWS if (row.kind, row.name) == (kind, name)), None)
