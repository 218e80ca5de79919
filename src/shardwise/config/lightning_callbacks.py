"""A table of Lightning's own callbacks: which of them work here, and why the others are refused."""

from __future__ import annotations

WORKS = "works"

_UNFREEZES = (
    "it unfreezes parameters while training, and no strategy has prepared their gradients: give freeze=NAME, a part of "
    "the module, and freeze_epochs=N, after which it is trained"
)
# Every class of lightning.pytorch.callbacks: that it works under every strategy, or why it is refused.
LIGHTNING: dict[str, str] = {
    "BackboneFinetuning": _UNFREEZES,
    "BaseFinetuning": _UNFREEZES,
    "BasePredictionWriter": WORKS,
    "BatchSizeFinder": "it changes the batch size of a run whose global batch is fixed by global_batch_size: try "
    "micro_batch_size= in short runs with quick_check=true",
    "Callback": WORKS,
    "Checkpoint": WORKS,
    "DeviceStatsMonitor": WORKS,
    "EMAWeightAveraging": "it keeps a second whole model, which no strategy shards or saves: give ema_decay=0.999, "
    "which averages what each rank holds",
    "EarlyStopping": WORKS,
    "GradientAccumulationScheduler": "it changes the number of micro-batches of a step, which global_batch_size fixes "
    "for the whole run",
    "LambdaCallback": WORKS,
    "LearningRateFinder": "it trains in the middle of set-up and loads a checkpoint of its own: give "
    "find_learning_rate=true, which takes its hundred steps in a run of their own and suggests a rate",
    "LearningRateMonitor": WORKS,
    "ModelCheckpoint": "checkpoints are saved by this program, sharded and resumable: give checkpoint.monitor=, "
    "checkpoint.mode=, checkpoint.keep_last= and checkpoint.save_every_n_steps= instead",
    "ModelPruning": "it replaces parameters by others that no optimizer and no strategy knows",
    "ModelSummary": WORKS,
    "OnExceptionCheckpoint": "saving takes all ranks, and an exception may come on one alone: give "
    "checkpoint.save_every_n_steps=, after which resume=auto goes on",
    "ProgressBar": WORKS,
    "RichModelSummary": WORKS,
    "RichProgressBar": WORKS,
    "SpikeDetection": "it raises an exception and keeps its records in a file of its own: guard.on_spike= and "
    "guard.on_nonfinite= do this under every strategy",
    "StochasticWeightAveraging": "it keeps a second whole model, which no strategy shards or saves, and changes the "
    "schedule: give ema_decay=0.999, which averages what each rank holds",
    "TQDMProgressBar": WORKS,
    "ThroughputMonitor": "it makes the host wait for the device after every batch, and counts rank 0 for all: "
    "train/samples_per_second, train/mfu and the like are logged without it (docs/metrics.md)",
    "Timer": WORKS,
    "WeightAveraging": "it keeps a second whole model, which no strategy shards or saves: give ema_decay=0.999, which "
    "averages what each rank holds",
}  # fmt: skip
