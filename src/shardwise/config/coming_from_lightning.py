"""A table of every name of Lightning's, and what it is here.

Each has the same name here, or another option, or is refused for a reason. docs/lightning.md is made from this table,
and messages on the command line use it. This file imports neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Answer = Literal["same", "word", "refused"]
Kind = Literal[
    "argument",  # an argument of Trainer
    "method",  # a method of Trainer
    "attribute",  # an attribute of Trainer
    "module hook",  # a method that a LightningModule may override
    "data hook",  # a method that a LightningDataModule may override
    "callback hook",
    "module",  # a method or attribute of LightningModule that users call or read
    "data",  # a method or attribute of LightningDataModule that users call or read
    "log",  # an argument of self.log or self.log_dict
    "logger",
]


@dataclass(frozen=True)
class Row:
    """A `name` of Lightning's, and what it is here. `test`: the pytest node that checks it."""

    kind: Kind
    name: str
    answer: Answer
    text: str
    test: str


@dataclass(frozen=True)
class _Entry:
    answer: Answer
    text: str
    test: str | None


def _same(text: str = "", test: str | None = None) -> _Entry:
    return _Entry("same", text, test)


def _word(text: str, test: str | None = None) -> _Entry:
    return _Entry("word", text, test)


def _refused(text: str, test: str | None = None) -> _Entry:
    return _Entry("refused", text, test)


def _rows(kind: Kind, test: str, names: Mapping[str, _Entry]) -> tuple[Row, ...]:
    """Make the rows of one kind. `test` checks all that have no test of their own."""
    return tuple(Row(kind, name, entry.answer, entry.text, entry.test or test) for name, entry in names.items())


_LIKE = "tests/distributed/test_like_lightning.py"
_LAUNCH, _RESUME = "tests/distributed/test_launch.py", "tests/distributed/test_resume.py"
_UNIT = "tests/unit/test_coming_from_lightning.py"
_ORDER = f"{_LIKE}::test_hooks_come_in_lightnings_order_and_as_often"
_TRAINERS = f"{_LIKE}::test_what_hooks_find_in_trainer_is_what_lightning_has_there"
_TOLD = f"{_LIKE}::test_a_module_is_told_of_itself_what_lightning_tells_it"
_LOGS = f"{_LIKE}::test_a_logger_gets_the_rows_that_lightning_gives_it"
_SAVING = f"{_LIKE}::test_saving_calls_lightnings_hooks_in_its_order"
_RESUMED = f"{_LIKE}::test_hooks_of_a_resumed_run_come_as_lightnings_and_as_if_it_had_not_stopped"
_OWNER = f"{_LIKE}::test_a_module_with_loaders_of_its_own_is_asked_as_under_lightning"
_EXCEPTION = f"{_LIKE}::test_an_exception_is_told_as_under_lightning"
_MANUAL = "tests/distributed/test_anybodys_module.py::test_every_strategy_equals_the_plain_loop"
_ANYBODY = "tests/distributed/test_anybodys_module.py"
_MIN = "tests/distributed/test_callbacks.py::test_an_early_stop_waits_for_min_steps"
_BY_VALUE = f"{_ANYBODY}::test_clipping_by_value_is_that_of_the_plain_loop"
_REFUSED_MODULES = "tests/distributed/test_anybodys_module.py::test_what_cannot_be_had_is_refused_and_not_passed_over"
_EXPORT = "tests/unit/test_export.py::test_torch_has_a_state_dict"
_EXPORTED = "`shardwise export` writes whole weights, which a module outside a run takes by `load_state_dict`"
_WINDOW = (
    "under accumulation the log has the mean over a step's micro-batches, where Lightning's log has the last one's; "
    "`callback_metrics` and `logged_metrics` have the last one's here, too"
)
_ARGUMENTS = _rows(
    "argument",
    f"{_UNIT}::test_every_argument_of_trainer_is_answered_on_the_command_line",
    {
        "accelerator": _same("`accelerator=auto|cpu|cuda`; `gpu` means `cuda`. Others have not been tried: refused"),
        "strategy": _word(
            "`strategy=ddp|fsdp|fsdp_hybrid|zero1|zero2|zero3`; `deepspeed_stage_2` is `zero2`. A strategy's options "
            "are its values: `strategy.find_unused_parameters=true`"
        ),
        "devices": _same("`devices=4`, processes a node. A list of GPUs is `CUDA_VISIBLE_DEVICES`"),
        "num_nodes": _word("`nodes=2`"),
        "precision": _word(
            "`precision=fp32|tf32|bf16|bf16_true|fp16|fp8|fp64`: `bf16-mixed` is `bf16`, `16-mixed` is `fp16`, "
            "`bf16-true` is `bf16_true`, `32-true` is `fp32`, `64-true` is `fp64`"
        ),
        "logger": _word(
            "`logger=csv|wandb|tensorboard`; one of your own: `loggers.NAME._target_=…`. metrics.csv is always written"
        ),
        "callbacks": _word("`callbacks.NAME._target_=…`, as many as you like, each with its arguments"),
        "fast_dev_run": _word("`quick_check=true`"),
        "max_epochs": _same("exactly one of `max_epochs`, `max_steps` and `max_samples` is given"),
        "min_epochs": _same("an early stop waits for them", _MIN),
        "max_steps": _same("optimizer steps"),
        "min_steps": _same("an early stop waits for them", _MIN),
        "max_time": _word(
            "a Timer in `callbacks`: `callbacks.timer._target_=lightning.pytorch.callbacks.Timer "
            "callbacks.timer.duration=00:12:00:00`, as which max_time is read"
        ),
        "limit_train_batches": _word("`max_train_batches=N`, micro-batches of one rank in an epoch"),
        "limit_val_batches": _word("`max_validation_batches=N`, of all ranks together; 0 switches validation off"),
        "limit_test_batches": _refused("a test counts every sample once; `quick_check=true` runs a few batches"),
        "limit_predict_batches": _refused("every sample gets its prediction; `quick_check=true` runs a few batches"),
        "overfit_batches": _word("`max_train_batches=N`, and a training loader that does not shuffle"),
        "val_check_interval": _word("`validate_every_n_steps=N`, in optimizer steps; without it after every epoch"),
        "check_val_every_n_epoch": _word("`validate_every_n_epochs=N`"),
        "num_sanity_val_steps": _refused(
            "validation is not tried before training, where it would change nothing: `quick_check=true` tries it"
        ),
        "log_every_n_steps": _same("optimizer steps, where Lightning counts micro-batches"),
        "enable_checkpointing": _word("`checkpoint=none|default|async`"),
        "enable_progress_bar": _word("`progress_bar=true|false`; left out, a bar in a terminal and lines elsewhere"),
        "enable_model_summary": _word(
            "`callbacks.layers._target_=lightning.pytorch.callbacks.ModelSummary`; a run says its layers by itself"
        ),
        "accumulate_grad_batches": _word(
            "`global_batch_size=N` and `micro_batch_size=N`: accumulation is what follows, and is exact"
        ),
        "gradient_clip_val": _same("by the norm of all gradients, over every rank"),
        "gradient_clip_algorithm": _same(
            "`norm` or `value`; under `zero1`, `zero2` and `zero3` `value` is refused: DeepSpeed knows the norm alone",
            _BY_VALUE,
        ),
        "deterministic": _same("`true` or `false`; `warn` is `false` and `torch.use_deterministic_algorithms` by hand"),
        "benchmark": _word("`cudnn_benchmark=true`"),
        "inference_mode": _refused("always off: FSDP2 uses the parameters that validation has gathered again"),
        "use_distributed_sampler": _refused(
            "which rank gets which sample is the library's, so that a run can go on with other ranks"
        ),
        "profiler": _same(
            "`profiler=simple|advanced|pytorch`; pytorch records three steps. What some steps spend their time on says "
            "`profile.start=N`"
        ),
        "detect_anomaly": _word(
            "`debug.anomaly=true`", test=f"{_ANYBODY}::test_detect_anomaly_names_the_forward_operation"
        ),
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
        "fit": _word(
            "`python train.py`; `ckpt_path` is `resume=auto|PATH`",
            f"{_LAUNCH}::test_resume_is_one_word_as_well",
        ),
        "validate": _word(
            "`stage=validate resume=auto|PATH`",
            f"{_RESUME}::test_validation_measures_what_fit_logged",
        ),
        "test": _word("`stage=test resume=auto|PATH`", _ORDER),
        "predict": _word(
            "`stage=predict resume=auto|PATH`",
            f"{_RESUME}::test_predictions_are_those_of_every_sample_once_in_order",
        ),
        "save_checkpoint": _word(
            "it writes a folder in this program's format, on all ranks; for one file of weights: `shardwise export`",
            f"{_LIKE}::test_a_module_saves_by_trainer_save_checkpoint",
        ),
        "print": _same(test=_TOLD),
        "init_module": _refused(
            "a run builds the module itself, and without memory for its parameters where the module can fill them",
            "tests/distributed/test_same_run.py::test_initial_state_depends_on_seed_and_model_alone",
        ),
    },
)

_ATTRIBUTES = _rows(
    "attribute",
    _TRAINERS,
    {
        **{
            name: _same()
            for name in (
                "current_epoch", "is_last_batch", "max_steps", "max_epochs", "min_epochs", "min_steps",
                "num_val_batches", "num_test_batches", "num_predict_batches",
                "num_sanity_val_batches", "accumulate_grad_batches", "should_stop",
                "state", "training", "validating", "testing", "predicting", "evaluating", "sanity_checking",
                "enable_validation", "lr_scheduler_configs", "datamodule",
                "ckpt_path", "world_size", "global_rank", "local_rank", "node_rank",
                "is_global_zero", "num_devices", "num_nodes", "device_ids", "accelerator",
                "scaler", "gradient_clip_val", "gradient_clip_algorithm",
                "fast_dev_run", "limit_train_batches", "limit_val_batches", "limit_test_batches",
                "limit_predict_batches", "overfit_batches", "val_check_interval", "val_check_batch",
                "check_val_every_n_epoch", "num_sanity_val_steps", "reload_dataloaders_every_n_epochs", "barebones",
                "enable_autolog_hparams", "early_stopping_callback", "early_stopping_callbacks", "interrupted",
                "received_sigterm", "validate_loop", "test_loop", "predict_loop", "progress_bar_metrics",
                "log_every_n_steps",
            )
        },
        "global_step": _same(
            "where a module optimizes by hand it counts batches, and stock Lightning the steps of every optimizer",
            "tests/distributed/test_by_hand.py::test_a_batch_is_a_step_however_many_optimizers_step_in_it",
        ),
        "callback_metrics": _same(_WINDOW),
        "logged_metrics": _same(_WINDOW),
        "num_training_batches": _same("micro-batches of this rank; samples that fill no global batch are left out"),
        "estimated_stepping_batches": _same("a resumed run that reads it goes on with the right samples, too"),
        "callbacks": _word("the run's own stand behind yours"),
        "precision": _word(
            "Lightning's word for `precision=`: `bf16-mixed` for `bf16`, `16-mixed` for `fp16`",
            f"{_UNIT}::test_trainer_precision_is_lightnings_word",
        ),
        "optimizers": _word("yours; under `zero1`, `zero2` and `zero3` DeepSpeed's around it"),
        "fit_loop": _word("Lightning's own, extended: it counts whole global batches"),
        "precision_plugin": _word("the run's own, under every strategy"),
        "strategy": _word("the run's own; `strategy.root_device`, `barrier`, `broadcast` and `reduce` are the same"),
        "lightning_module": _word("your module; `fsdp` puts `FSDP` before the name of its class, as FSDP2 does"),
        "model": _word("what the strategy makes of your module: use `lightning_module`"),
        "profiler": _word("`profiler=`"),
        "logger": _word("the tracker that `logger=` or `loggers.NAME` asks for; without one it is that of metrics.csv"),
        "loggers": _word("yours first, and that of metrics.csv"),
        "default_root_dir": _word("the run's folder, `runs_dir/name`"),
        "log_dir": _word("the run's folder, or the tracker's within it", f"{_LIKE}::test_log_dir_is_the_runs_folder"),
        **{
            name: _word(
                "a loader that deals out the run's order; `dataset`, `batch_size` and what else it is asked for are "
                "your loader's"
            )
            for name in ("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders")
        },
        "checkpoint_callback": _word("None: the run saves without ModelCheckpoint"),
        "checkpoint_callbacks": _word("empty: the run saves without ModelCheckpoint"),
        "progress_bar_callback": _word("None, or the one in `callbacks`: the run's own bar is no ProgressBar"),
        "distributed_sampler_kwargs": _word("not used: the order of samples is made by the run"),
    },
)  # fmt: skip

_EACH_STAGE = ("train", "validation", "test", "predict")
_STAGE_HOOKS = tuple(
    f"on_{stage}_{when}"
    for stage in _EACH_STAGE
    for when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
)
_GRADIENTS = "under `zero1`, `zero2` and `zero3` refused by name, because gradients are in DeepSpeed's hands there"
_LOOKS = "under `zero1`, `zero2` and `zero3` a hook that looks at a gradient is refused by name: DeepSpeed has it"
_SAVES = (
    "the same order and arguments; they are called at other times: every `checkpoint.save_every_n_steps`, at the end, "
    "once before the first step to find what cannot be saved, and before a validation, which a signal may interrupt; "
    '`checkpoint["state_dict"]` is empty in it, because tensors have files of their own'
)
_LOADS = (
    "before `on_fit_start` and after `configure_optimizers`, before which stock Lightning's `ddp` calls it; "
    '`checkpoint["state_dict"]` is empty in it'
)

_MODULE_HOOKS = _rows(
    "module hook",
    _ORDER,
    {
        **{name: _same() for name in ("configure_callbacks", "configure_optimizers", "configure_model")},
        "configure_sharded_model": _same(
            "Lightning's old name for `configure_model`", f"{_LIKE}::test_the_old_name_of_configure_model_is_called"
        ),
        **{name: _same() for name in ("prepare_data", "setup", "teardown", "on_fit_start", "on_fit_end")},
        **{name: _same() for name in _STAGE_HOOKS},
        **{name: _same() for name in ("on_train_epoch_start", "on_train_epoch_end")},
        "on_train_batch_start": _same(
            "to return -1, which skips the rest of an epoch, is refused: the next would begin with what was skipped",
            _REFUSED_MODULES,
        ),
        **{name: _same() for name in ("training_step", "validation_step", "test_step", "predict_step")},
        **{f"on_{stage}_model_eval": _same() for stage in ("validation", "test", "predict")},
        **{f"on_{stage}_model_train": _same() for stage in ("validation", "test")},
        "on_validation_model_zero_grad": _same(),
        "on_before_zero_grad": _same("the gradients of the step before have been freed by then, right after it"),
        "optimizer_zero_grad": _same("the gradients of the step before have been freed by then, right after it"),
        "on_before_backward": _same(),
        "backward": _same(_GRADIENTS),
        "on_after_backward": _same(_LOOKS),
        "on_before_optimizer_step": _same(_LOOKS),
        "configure_gradient_clipping": _same(_GRADIENTS),
        "optimizer_step": _same(),
        "lr_scheduler_step": _same("not called for a step that a loss scale or the guard has passed over"),
        "on_save_checkpoint": _same(_SAVES, _SAVING),
        "on_load_checkpoint": _same(_LOADS, _RESUMED),
        **{name: _same(test=_OWNER) for name in (
            "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
            "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
        )},
    },
)  # fmt: skip

_DATA_HOOKS = _rows(
    "data hook",
    _ORDER,
    {
        **{name: _same() for name in (
            "prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader", "test_dataloader",
            "predict_dataloader", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
        )},
        "state_dict": _same(_SAVES, _SAVING),
        "load_state_dict": _same(_LOADS, _RESUMED),
        "on_exception": _same(test=_EXCEPTION),
    },
)  # fmt: skip

_CALLBACK_HOOKS = _rows(
    "callback hook",
    _ORDER,
    {
        **{name: _same() for name in ("setup", "teardown", "on_fit_start", "on_fit_end", *_STAGE_HOOKS)},
        **{name: _same() for name in ("on_train_epoch_start", "on_train_epoch_end")},
        **{name: _same() for name in (
            "on_before_zero_grad", "on_before_backward",
        )},
        "on_after_backward": _same(_LOOKS),
        "on_before_optimizer_step": _same(_LOOKS),
        **{name: _same(_SAVES, _SAVING) for name in ("on_save_checkpoint", "state_dict", "state_key")},
        **{name: _same(_LOADS, _RESUMED) for name in ("on_load_checkpoint", "load_state_dict")},
        "on_exception": _same(test=_EXCEPTION),
        **{
            name: _same("never called, as with `num_sanity_val_steps=0`; `quick_check=true` tries validation")
            for name in ("on_sanity_check_start", "on_sanity_check_end")
        },
    },
)  # fmt: skip

_MODULE = _rows(
    "module",
    _TOLD,
    {
        **{
            name: _same()
            for name in (
                "print", "all_gather", "lr_schedulers",
                "freeze", "unfreeze", "toggle_optimizer", "untoggle_optimizer",
                "automatic_optimization", "current_epoch", "global_step", "global_rank", "local_rank", "device",
                "dtype", "on_gpu", "trainer", "hparams", "hparams_initial",
                "save_hyperparameters", "example_input_array", "strict_loading",
                "allow_zero_length_dataloader_with_multiple_devices", "prepare_data_per_node",
            )
        },
        "optimizers": _same("under `zero1`, `zero2` and `zero3` DeepSpeed's optimizer around yours"),
        "log": _same(test=_LOGS),
        "log_dict": _same(test=_LOGS),
        "manual_backward": _same(test=_MANUAL),
        "toggled_optimizer": _same("as `toggle_optimizer` and `untoggle_optimizer`, which it calls"),
        "clip_gradients": _same("by the norm of the gradients of all ranks", _MANUAL),
        "logger": _word("see `trainer.logger`", _TRAINERS),
        "loggers": _word("see `trainer.loggers`", _TRAINERS),
        "to_onnx": _word(_EXPORTED, _EXPORT), "to_torchscript": _word(_EXPORTED, _EXPORT),
        "to_tensorrt": _word(_EXPORTED, _EXPORT),
        "load_from_checkpoint": _word("`init_from=PATH` begins with exported weights; " + _EXPORTED, _EXPORT),
        "remove_ignored_hparams": _same("Lightning's own, for `save_hyperparameters`"),
        "device_mesh": _refused("None, as under stock Lightning's ddp: how weights are sharded is the strategy's"),
        "fabric": _refused("an error, as under stock Lightning's Trainer: it is for modules that Fabric runs"),
    },
)  # fmt: skip

_DATA = _rows(
    "data",
    _ORDER,
    {
        **{name: _same() for name in (
            "hparams", "hparams_initial", "save_hyperparameters", "name", "trainer", "prepare_data_per_node",
            "allow_zero_length_dataloader_with_multiple_devices", "from_datasets", "remove_ignored_hparams",
        )},
        "load_from_checkpoint": _refused("the arguments of the data are in the run's config.yaml"),
    },
)  # fmt: skip

_LOG = _rows(
    "log",
    _LOGS,
    {
        **{name: _same() for name in (
            "name", "value", "prog_bar", "logger", "on_epoch", "reduce_fx", "enable_graph", "sync_dist",
            "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only", "dictionary",
        )},
        "on_step": _same(
            _WINDOW + "; what the module logs in its `on_train_batch_end` stands in the row of the next step"
        ),
        "sync_dist_group": _same("passed on to torch.distributed; only the default group was tried"),
    },
)  # fmt: skip

_LOGGER = _rows(
    "logger",
    _LOGS,
    {
        "log_metrics": _same("`step` counts optimizer steps from 1, where Lightning counts from 0"),
        **{
            name: _same(test=f"{_LIKE}::test_a_logger_hears_of_begin_and_end_as_under_lightning")
            for name in ("log_hyperparams", "log_graph", "finalize")
        },
        "after_save_checkpoint": _refused(
            "checkpoints are folders, and no tracker is given one; `loggers.NAME.log_model=true` is refused",
            "tests/configs/test_bad_input.py::test_one_line_says_it",
        ),
        "save": _same("called where Lightning calls it; a row of metrics.csv is on the disk when it is logged"),
        **{name: _same("read, not called") for name in (
            "name", "version", "save_dir", "root_dir", "log_dir", "group_separator",
        )},
    },
)  # fmt: skip

ROWS: tuple[Row, ...] = (
    *_ARGUMENTS, *_TRAINER_METHODS, *_ATTRIBUTES, *_MODULE_HOOKS, *_DATA_HOOKS, *_CALLBACK_HOOKS, *_MODULE, *_DATA,
    *_LOG, *_LOGGER,
)  # fmt: skip


def find(kind: Kind, name: str) -> Row | None:
    """The row of Lightning's `name`; None if Lightning has no such name."""
    return next((row for row in ROWS if (row.kind, row.name) == (kind, name)), None)
