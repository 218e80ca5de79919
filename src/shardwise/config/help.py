"""What `--help` prints."""

from __future__ import annotations

from pathlib import Path


def config_groups(directories: list[Path]) -> dict[str, list[str]]:
    """Group → its options, over all config folders."""
    groups: dict[str, set[str]] = {}
    for directory in directories:
        for file in sorted(directory.glob("*/*.yaml")):
            groups.setdefault(file.parent.name, set()).add(file.stem)
    return {name: sorted(options) for name, options in sorted(groups.items())}


def help_text(directories: list[Path]) -> str:
    """What can be said on the command line, made from the config folders themselves."""
    lines = [HELP_HEAD]
    for group, options in config_groups(directories).items():
        lines.append(f"  {group + '=':<13}{' | '.join(options)}")
    lines.append(HELP_TAIL)
    return "\n".join(lines)


HELP_HEAD = """\
usage: python train.py [key=value …] [-m] [--cfg job] [--config-dir DIR]

Trains a LightningModule under any strategy. One word at a time:

  python train.py                                         two minutes on two CPU cores
  python train.py strategy=fsdp precision=bf16 devices=8  the same run, sharded over eight GPUs
  python train.py model=gpt2_124m data=token_shards data.directory=/data/tokens
  python train.py name=first resume=auto                  go on where `first` stopped
  python train.py stage=validate name=first resume=auto   measure its newest checkpoint
  python train.py -m optimizer.lr=1e-3,3e-3 devices=2     one run a value, each in its own folder
  torchrun --standalone --nproc-per-node=8 train.py strategy=fsdp

Groups (each option is a file in conf/; its values can be set one by one, e.g. optimizer.lr=1e-4):
"""
HELP_TAIL = """
Run-level values:

  stage=fit|validate|test|predict
  name=NAME                 the run's folder under runs_dir=DIR; made up when left out
  resume=auto|PATH          the newest checkpoint of this name (from the seed if there is none), or that one
  resume=best               its best checkpoint, with stage=validate, test or predict
  resume_allow=[seed,…]     what may be another there: data, global_batch_size, optimizer, seed
  trust=true                read what a checkpoint holds as a pickle, which may run any code: docs/checkpointing.md
  init_from=PATH            start from the weights of a .safetensors file, or of a folder of them
  dry_run=true              print config and Plan, start nothing
  preflight=true|false      look the machines over first (docs/preflight.md); Slurm jobs on several nodes do
  exclude_bad_nodes=false   a Slurm job whose preflight finds some does not go back to the queue without them
  devices=N nodes=N         processes a node (one a GPU), nodes; under srun and torchrun both are known
  accelerator=auto|cpu|cuda
  micro_batch_size=N        samples per data-parallel rank per forward
  global_batch_size=N       samples per optimizer step over all ranks: a multiple of micro_batch_size * ranks
  max_steps=N | max_epochs=N | max_samples=N              exactly one; a step is an optimizer step
  min_steps=N  min_epochs=N an early stop waits for them
  gradient_clip_val=X       bound on the global gradient norm; gradient_clip_algorithm=value: on each element
  seed=N  log_every_n_steps=N  validate_every_n_steps=N
  max_validation_batches=N  of all ranks together; 0: no validation
  progress_bar=true|false   a bar, or lines; left out: a bar in a terminal
  max_train_batches=N       micro-batches of each rank in an epoch: whole steps
  quick_check=true          a few batches of every stage, to see whether they run; nothing is kept
  find_learning_rate=true   100 steps with ever larger learning rates: which to start with, and a picture
  profiler=simple|advanced|pytorch                        Lightning's: rank 0's report in the run's folder
  benchmark=true            cuDNN tries its algorithms for each shape and takes the fastest
  detect_anomaly=true       which forward operation gave a gradient that is not finite; slow
  deterministic=true        the same bits in every run on the same GPUs, at some cost
  compile=none|layer|model  torch.compile on each repeated layer, or on the whole step
  activation_checkpointing=none|full                      recompute each repeated layer in the backward pass
  ema_decay=X               keep an exponential moving average of the weights and validate with it
  guard.on_nonfinite=stop|skip                            a loss or gradient that is not finite: docs/guard.md
  guard.on_spike=warn|ignore|skip|rollback                a loss that leaps
  max_restarts=3            a run that crashed or hung is started again from its last checkpoint, at most so often
  memory_history=true       on CUDA: the snapshot of a rank that runs out of memory says what allocated each block
  units=[ClassName,…]       the repeated layers, where they are not found
  optimizer_override=true   optimizer= overrules the module's own configure_optimizers
  callbacks.NAME._target_=… callbacks.NAME.argument=…     a Lightning callback, any number: docs/callbacks.md
  loggers.NAME._target_=…   a Lightning logger of your own beside logger=, e.g. MLFlowLogger
  module._target_=my.Module data._target_=my.Data         your own classes, with recipe=custom

  --cfg job                 print the composed config
  --config-dir DIR          a folder of your own with the same groups
  -m                        sweep: every combination of comma-separated values
"""
