"""A mistake gets one line that states the rule, the numbers and the remedy: exit code 2, nothing written, no start."""

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import shardwise.cli
import shardwise.preflight.run
from shardwise.data.tokens import write_token_shards
from shardwise.plan import Host
from tests.harness.patience import run_patiently

ROOT = Path(__file__).parents[2]
FOREIGN = "tests.configs.foreign"
CUSTOM = f"recipe=custom data._target_={FOREIGN}.Data"
OWN, BARE = f"{CUSTOM} module._target_={FOREIGN}.Own", f"{CUSTOM} module._target_={FOREIGN}.Bare"
SHARDS = "data=token_shards data.sequence_length=8 data.directory=TMP"
LM = "recipes.language_modeling"

# (argv, what the message says); TMP is a folder that `files` below fills. These need no torch.
WORDS: list[tuple[str, list[str]]] = [
    # groups, options, keys
    ("data=mixture 'data.corpora={a: {directory: x, weight: 7}, a: {directory: y, weight: 3}}'",
     ["a is there twice, and only the last would count: name it once"]),
    ("strateg=ddp", ["strateg=ddp: there is no strateg (did you mean strategy?)", "--help"]),
    ("optimzer.lr=1", ["optimzer.lr=1: there is no optimzer (did you mean optimizer?)"]),
    ("max_step=3", ["there is no max_step (did you mean max_steps?)"]),
    ("trainer=x", ["trainer=x: the Trainer is made by the run, and what it takes is said without `trainer.`"]),
    ("trainer.foo=3", ["trainer.foo=3: Lightning's Trainer has no argument foo, and there is no trainer here; --help"]),
    ("trainer.sync_batchnorm=true", ["trainer.sync_batchnorm=true: no option here: call torch.nn.SyncBatchNorm"]),
    ("num_sanity_val_steps=2", ["no option here: validation is not tried before training"]),
    ("enable_progress_bar=2", ["enable_progress_bar=2: give progress_bar=true or false"]),
    ("limit_test_batches=0.5", ["limit_test_batches=0.5: no option here: a test counts every sample once"]),
    ("logger=[csv,tensorboard]", ["metrics.csv is always written, and logger= names one tracker beside it, e.g. logger="
                                  "tensorboard", "loggers.NAME._target_=package.Logger"]),
    (f"{OWN} lr=0.1", ["lr=0.1 is read as optimizer.lr=0.1; optimizer.lr=0.1: optimizer is none here, so it has no lr",
                       "or give module.lr=0.1 where it is an argument of the module's constructor"]),
    ("--max_epochs=3", ["unrecognized arguments: --max_epochs=3; write max_epochs=3, without --"]),
    ("stage=validate max_validation_batches=0", ["nothing would be measured; leave out one of them"]),
    ("batch_size=8", ["batch_size=8: micro_batch_size=N is the number of samples of one rank", "global_batch_size=N"]),
    ("accumulate_grad_batches=2", ["global_batch_size / (micro_batch_size * ranks)"]),
    ("+trainer.accumulate_grad_batches=2", ["give global_batch_size=N and micro_batch_size=N"]),
    ("limit_val_batches=3", ["max_validation_batches=N is a number of batches of all ranks together"]),
    ("limit_train_batches=0.5", ["a share of the batches has no word here; max_train_batches=N"]),
    ("val_check_interval=0.5", ["validate_every_n_steps=N counts optimizer steps"]),
    ("callbacks=[early_stopping]", ["callbacks=[early_stopping]: each callback has a name of your choice and a class: ",
                                    "callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping"]),
    ("+callbacks=early_stopping", ["+callbacks=early_stopping: each callback has a name of your choice and a class"]),
    ("strategy=dp", ["strategy=dp: one process drives one device; use strategy=ddp"]),
    ("strategy=ddp_spawn", ["strategy=ddp_spawn: one process drives one device; use strategy=ddp"]),
    ("strategy=fsdp_cpu_offload", ["use strategy=zero3 strategy.offload_optimizer=true"]),
    ("strategy=deepspeed_stage_3_offload_nvme", ["nothing is kept on NVMe here; use strategy=zero3"]),
    ("-m strategy=ddp,deepspeed_stage_2_offload", ["stands for several words, strategy=zero2 strategy.offload_optimi"]),
    ("precision=16-true", ["use precision=bf16_true, or precision=fp16, which keeps float32 weights"]),
    ("devices=-1", ["devices=-1: all GPUs are meant, and this process sees no GPU to count; give devices=N"]),
    ("devices=[0,1]", ["devices is a number of processes", "CUDA_VISIBLE_DEVICES=0,1"]),
    ("gpus=2", ["accelerator=cuda: this process sees 0 CUDA devices"]),
    # a recipe's own model and data with another's module
    ("model=resnet50", ["model=resnet50 belongs to the recipe image_classification, and this run's is language_model",
                        "use recipe=image_classification"]),
    ("data=digits", ["data=digits belongs to the recipe image_classification", "use recipe=image_classification"]),
    ("recipe=image_classification model=gpt2_124m", ["model=gpt2_124m belongs to the recipe language_modeling"]),
    # numbers of optimizers and schedules
    ("optimizer.lr=abc", ["optimizer.lr=abc: must be a number, as it is in conf/optimizer/"]),
    ("optimizer.lr=nan", ["optimizer.lr=nan: must be a number"]),
    ("optimizer.lr=true", ["optimizer.lr=true: must be a number"]),
    ("optimizer.lr=null", ["optimizer.lr=null: must be a number"]),
    ("-m optimizer.weight_decay=0.1,inf", ["optimizer.weight_decay=inf: must be a number"]),
    ("optimizer.lr=-1 dry_run=true", ["optimizer.lr=-1: must be at least 0"]),
    ("optimizer=muon optimizer.eps=-1e-8 dry_run=true", ["optimizer.eps=-1e-08: must be at least 0"]),
    ("init_from=TMP/nowhere dry_run=true", ["init_from=TMP/nowhere: there is no such file or folder"]),
    ("runs_dir=/dev/null dry_run=true", ["cannot write the run's folder /dev/null/", "/dev/null is not a folder"]),
    ("optimizer.betas=[0.9,x]", ["must be a list of 2 numbers, e.g. [0.9, 0.95]"]),
    ("\"optimizer.betas='[0.9,0.95]'\"", ["must be a list of 2 numbers, e.g. [0.9, 0.95], as it is in conf/optimizer/, "
                                          "and this is text: write it without quotes; the environment's is "
                                          "'${oc.decode:${oc.env:NAME}}', quoted so"]),
    ("\"units='[a,b]'\"", ["units=[a,b]: must be a list, e.g. [a,b], or null, and this is text: write it without"]),
    ("schedule.final_factor=low", ["schedule.final_factor=low: must be a number, as it is in conf/schedule/"]),
    ("+foo=1", ["+foo=1: there is no foo"]),
    ("~foo", ["~foo: there is no foo"]),
    ("strategy=dpp", ["strategy=dpp: no such option; strategy is one of ddp, fsdp, fsdp_copies, fsdp_hybrid",
                      "(did you mean"]),
    ("experiment=llama", ["experiment=llama: no such option", "llama3_8b_fsdp"]),
    ("cluster=dgx", ["cluster is one of dgx_a100, dgx_b200, dgx_h100, dgx_h200, local"]),
    ("strategy=null", ["strategy=null: no such option; strategy is one of ddp, fsdp, fsdp_copies, fsdp_hybrid, z"]),
    ("optimizer=null", ["optimizer=null: no such option", "(did you mean none?)"]),
    ("strategy=3", ["strategy=3: no such option; strategy is one of ddp"]),
    ("strategy=[ddp,fsdp]", ["strategy=[ddp,fsdp]: no such option; strategy is one of ddp"]),
    ("strategy=FSDP", ["strategy=FSDP: no such option", "(did you mean fsdp?)"]),
    ("-m strategy=ddp,fdsp", ["strategy=fdsp: no such option", "(did you mean fsdp?)"]),
    ("+strategy=fsdp", ["a run always has one strategy; write strategy=…, without + or ~"]),
    ("~strategy", ["~strategy: a run always has one strategy"]),
    ("strategy@foo=ddp", ["a group has one place here; write strategy=…, without @foo"]),
    ("strategy.name=fsdp", ["a name alone changes nothing; strategy=fsdp brings its values as well"]),
    ("precision.name=bf16", ["a name alone changes nothing; precision=bf16"]),
    ("recipe.module=3", ["recipe names a file and has no values of its own; recipe is one of custom,"]),
    ("test=true", ["test=true: no option here: stage=test name=RUN resume=best tests the best checkpoint of a run"]),
    ("logger=mlflow", ["loggers.NAME._target_=package.Logger"]),
    ("trainer=ddp", ["strategy=ddp devices=4"]),
    ("hydra.run.dir=x", ["hydra.run.dir=x: Hydra's own node is set by this program; leave it out"]),
    ("optimizer.lrr=1", ["optimizer.lrr=1: optimizer has no option lrr; it has _target_, lr,", "(did you mean lr?)"]),
    ("checkpoint.keep=1", ["checkpoint has no option keep; it has save_every_n_steps, save_every_n_epochs, keep_last"]),
    ("seed.foo=3", ["seed.foo=3: seed is a single value; write seed=…"]),
    ("+max_steps=3", ["+max_steps=3: max_steps is there already; leave out the +"]),
    ("optimizer=none schedule=none optimizer.lr=3", ["optimizer is none here, so it has no lr; choose optimizer=…"]),
    ("strategy=ddp strategy.reshard_after_forward=false",
     ["strategy.reshard_after_forward=false: strategy has no option reshard_after_forward", "find_unused_parameters"]),
    ("strategy=fsdp strategy.find_unused_parameters=true",
     ["strategy has no option find_unused_parameters", "it has name, timeout_minutes, reshard_after_forward"]),
    ("strategy=fsdp strategy.shard_size=2", ["strategy has no option shard_size"]),
    ("logger=csv logger.project=x", ["logger.project=x: logger has no option project; it has name"]),
    # types
    ("max_steps=abc", ["max_steps=abc: must be a whole number, or null"]),
    ("max_steps=1.5", ["max_steps=1.5: must be a whole number"]),
    ("max_steps=1e4", ["max_steps=10000.0: must be a whole number; write 10000"]),
    ("max_steps=true", ["max_steps=true: must be a whole number"]),
    ("max_steps=", ["max_steps=: must be a whole number, or null"]),
    ("max_steps=[1,2]", ["max_steps=[1, 2]: must be a whole number"]),
    ("devices=two", ["devices=two: must be a whole number, or null"]),
    ("gradient_clip_val=high", ["gradient_clip_val=high: must be a number, or null"]),
    ("dry_run=maybe", ["dry_run=maybe: must be true or false"]),
    ("preflight=maybe", ["preflight=maybe: must be true or false, or null"]),
    ("exclude_bad_nodes=[dgx03]", ["exclude_bad_nodes=[dgx03]: must be true or false"]),
    ("precision.tf32=maybe", ["precision.tf32=maybe: must be true or false"]),
    ("units=Block", ["units=Block: must be a list, e.g. [a,b], or null"]),
    ("units=[null]", ["units[0]=null: must be text"]),
    ("name=[a,b]", ["name=[a, b]: must be text"]),
    ("name=true", ["name=true: is read as true, not as text; quote it: \"name='true'\""]),
    ("name=12e34", ["name=12e34: is read as 1.2e+35, not as text; quote it: \"name='12e34'\""]),
    ("+module.commit=123e456", ["is read as inf, not as text; quote it: \"module.commit='123e456'\""]),
    ("name=20260101_1", ["is read as 202601011, not as text; quote it: \"name='20260101_1'\""]),
    ("stage=fitt", ["stage=fitt: must be one of fit, validate, test, predict (did you mean fit?)"]),
    ("stage=null", ["stage=null: must be one of fit, validate, test, predict"]),
    ("accelerator=tpu", ["accelerator=tpu: must be one of auto, cpu, cuda"]),
    ("accelerator=rocm", ["accelerator=rocm: AMD's GPUs are accelerator=cuda, with torch's ROCm build"]),
    ("accelerator=gpu", ["accelerator=cuda: this process sees 0 CUDA devices; use accelerator=cpu"]),
    ("precision.compute_dtype=float16", ["float16, and nothing else, needs a loss scale; use precision=fp16"]),
    ("precision=bf16 precision.loss_scaling=true", ["float16, and nothing else, needs a loss scale"]),
    ("precision=fp16 precision.parameter_dtype=float16", ["gradients in float16 cannot be unscaled"]),
    ("precision=fp16_true", ["precision is one of bf16, bf16_true, fp16, fp32, fp64, fp8, tf32"]),
    ("strategy=zero2 precision=fp64", ["strategy=zero2 precision=fp64: DeepSpeed keeps master weights in fp32; use"]),
    ("strategy=zero1 precision=fp16", ["strategy=zero1 precision=fp16 on the CPU: DeepSpeed refuses float16 there"]),
    ("loss=fast", ["loss=fast: must be one of auto, full, chunked, fused"]),
    ("loss=fused precision=bf16", ["loss=fused: its kernel runs on GPUs alone; use loss=chunked"]),
    ("strategy=zero3 compile=model", ["strategy=zero3 compile=model: ", "use compile=layer, or strategy=zero2"]),
    ("strategy.offload_optimizer=true", ["strategy has no option offload_optimizer; it has name, timeout_min"]),
    ("strategy=fsdp strategy.offload_optimizer=true", ["strategy has no option offload_optimizer; it has name, "]),
    ("strategy=zero2 strategy.offload_parameters=true", ["strategy has no option offload_parameters; it has name"]),
    ("strategy=zero4", ["strategy=zero4: no such option", "(did you mean zero"]),
    ("strategy=zero1 strategy.shard_size=2", ["strategy has no option shard_size"]),
    ("strategy=zero3 strategy.offload_optimizer=cpu", ["strategy.offload_optimizer=cpu: must be true or false"]),
    ("strategy=zero1 strategy.timeout_minutes=0", ["strategy.timeout_minutes=0.0: must be above 0"]),
    ("strategy=fsdp_hybrid devices=3 strategy.shard_size=2", ["does not divide nodes * devices = 1 * 3 = 3"]),
    ("compile=true", ["compile=true: no such option; compile is one of layer, model, none"]),
    ("compile=layers", ["compile=layers: no such option", "layer, model, none (did you mean layer?)"]),
    ("compile.memory_budget=0.5", ["compile.memory_budget=0.5: compile=none compiles nothing; give compile=model"]),
    ("compile.recompute_elementwise=true", ["compile.recompute_elementwise=true: compile=none compiles nothing; give"]),
    ("compile=layer compile.recompute_elementwise=true compile.memory_budget=0.5",
     ["compile.recompute_elementwise=true compile.memory_budget=0.5: both decide what is kept", "leave out one of"]),
    ("compile=layer compile.recompute_elementwise=true activation_checkpointing=selective",
     ["activation_checkpointing=selective: checkpointed layers compute elementwise operations again without it"]),
    ("compile.mode=max-autotune", ["compile.mode=max-autotune: compile=none compiles nothing"]),
    ("compile=model compile.mode=fastest", ["compile.mode=fastest: must be one of default, max-autotune"]),
    ("compile=model compile.memory_budget=0", ["compile.memory_budget=0.0: must be above 0 and at most 1", "or null"]),
    ("compile=model compile.memory_budget=50", ["compile.memory_budget=50.0: must be above 0 and at most 1"]),
    ("compile=layer compile.memory_budget=0.5 activation_checkpointing=full",
     ["compile.memory_budget=0.5 activation_checkpointing=full: both decide what is kept", "leave out one of them"]),
    ("compile=model compile.cudagraphs=true accelerator=cpu", ["compile.cudagraphs=true: a CUDA graph is a GPU's"]),
    ("activation_checkpointing=true", ["=true: no such option; activation_checkpointing is one of full, none"]),
    ("activation_checkpointing.every_n_layers=2", ["every_n_layers=2: activation_checkpointing=none checkpoints no"]),
    ("activation_checkpointing=full activation_checkpointing.every_n_layers=0", ["=0: must be at least 1"]),
    ("activation_checkpointing=full activation_checkpointing.save=[matmul]",
     ["save=[matmul]: activation_checkpointing=full keeps no operation's result", "selective"]),
    ("activation_checkpointing=selective activation_checkpointing.save=[]",
     ["activation_checkpointing.save=[]: nothing would be kept, which is activation_checkpointing=full"]),
    ("activation_checkpointing=selective activation_checkpointing.save=[attention,matmull]",
     ["save=[attention,matmull]: there is no operation matmull (did you mean matmul?); known are matmul, ", "aten.mm"]),
    ("activation_checkpointing=selective activation_checkpointing.save=[matmul,every_second_matmul]",
     ["matmul keeps every one, every_second_matmul every second one; leave out one of them"]),
    ("attention=fast", ["attention=fast: must be one of auto, cudnn, flash, efficient, math, flex, fa4"]),
    ("ema_decay=1", ["ema_decay=1.0: must be between 0 and 1, e.g. 0.999, or null"]),
    ("ema_decay=-0.1", ["ema_decay=-0.1: must be between 0 and 1"]),
    ("ema_decay=often", ["ema_decay=often: must be a number, or null"]),
    ("micro_batch_size=4 global_batch_size=12 devices=2 strategy=zero1", ["global_batch_size=12 is not a multiple of"]),
    ("micro_batch_size=null", ["micro_batch_size=null: must be a whole number"]),
    ("strategy=fsdp_hybrid strategy.shard_size=two", ["strategy.shard_size=two: must be a whole number, or null"]),
    # values left open
    ("global_batch_size=???", ["global_batch_size has no value, and nothing can be assumed: give global_batch_size=…"]),
    ("optimizer.lr=???", ["optimizer.lr has no value", "give optimizer.lr=…"]),
    ("model.dim=???", ["model.dim has no value", "give model.dim=…"]),
    ("recipe=custom", ["module._target_ has no value", "give module._target_=…"]),
    ("recipe=custom module._target_=my.Module +data.batch_size=4",
     ["data.batch_size=4: an option of no class; give data._target_=package.Data, or leave it out"]),
    ("data=text_stream data.source._target_=a.Texts +data.validation_source.path=x",
     ["data.validation_source.path=x: an option of no class; give data.validation_source._target_=package.Class"]),
    ("data=token_shards", ["data.directory has no value", "give data.directory=…"]),
    ("recipe=image_classification data=image_folder", ["data.directory has no value", "give data.directory=…"]),
    ("~module", ["module has no value", "give module=…"]),
    # syntax, flags, sweeps
    ("strategy", ["'strategy' is not key=value; strategy is one of ddp, fsdp, fsdp_copies, fsdp_hybrid"]),
    ("train", ["'train' is not key=value; e.g. strategy=fsdp"]),
    ("''", ["'' is not key=value; e.g. strategy=fsdp"]),
    ("=x", ["=x: no key before the =; overrides look like strategy=fsdp"]),
    ("a=b=c[", ["a=b=c[: the value cannot be read; if it is meant as text, quote it: \"a='b=c['\""]),
    ("optimizer.betas=[1", ["optimizer.betas=[1: the value cannot be read"]),
    ("runs_dir=~/runs", ["the value cannot be read; if it is meant as text, quote it: \"runs_dir='~/runs'\""]),
    ("--foo", ["unrecognized arguments: --foo", "--help"]),
    ("--strategy=fsdp", ["unrecognized arguments: --strategy=fsdp; write strategy=fsdp, without --"]),
    ("--max_steps 10", ["unrecognized arguments: --max_steps", "; write max_steps=10, without --"]),
    ("--max-steps=10", ["unrecognized arguments: --max-steps=10; write max_steps=10, without --"]),
    ("--config-dir=TMP --max-steps seed=1 --recipe custom --foo",
     ["unrecognized arguments: --max-steps", "; write max_steps=… recipe=custom, without --"]),
    ("\"name='a\" \"b'\"", ["name='a: the value cannot be read; its quote is not closed", "all of it: \"name='a …'\""]),
    ("--cfg hydra", ["invalid choice: 'hydra' (choose from 'job')"]),
    ("--config-dir", ["argument --config-dir/-cd: expected one argument"]),
    ("seed=1,2", ["seed=1,2: several values make a sweep; add -m, or quote the value"]),
    ("-m --cfg job seed=1,2", ["--cfg prints one job, and this sweep has 2: give one value each"]),
    ("-m optimizer.lr=interval(0,1)", ["only lists of values, choice() and range() are swept"]),
    ("-m seed=1,x", ["seed=x: must be a whole number"]),
    ("--config-dir TMP/nowhere", ["--config-dir=TMP/nowhere: no such folder"]),
    ("--config-dir TMP/file", ["--config-dir=TMP/file: no such folder"]),
    # files of one's own
    ("--config-dir TMP/conf experiment=broken", ["not YAML:", "broken.yaml", "line 1"]),
    ("--config-dir TMP/conf experiment=typo", ["max_stepz: there is no such option (did you mean max_steps?)"]),
    ("--config-dir TMP/conf experiment=group", ["strategy=zz: no such config file; strategy is one of ddp, fsdp"]),
    ("--config-dir TMP/conf experiment=option", ["strategy.foo: there is no such option; strategy has name,"]),
    ("--config-dir TMP/conf experiment=package", ["start it with `# @package _global_`"]),
    ("--config-dir TMP/conf experiment=keys", ["module.labels: the key 0 is not text; quote it in YAML: '0'"]),
    ("--config-dir TMP/conf experiment=text", ["name=1000.0: must be text; quote it"]),
    # interpolations
    ("name=${nope}", ["name=${nope}: Interpolation key 'nope' not found; ${…} takes a key of this config"]),
    ("name=${name}", ["name=${name}: Recursive interpolation detected"]),
    ("name=${foo:3}", ["name=${foo:3}: Unsupported interpolation type foo"]),
    ("name=${oc.env:NOT_SET_ANYWHERE}", ["Environment variable 'NOT_SET_ANYWHERE' not found", "oc.env:NAME"]),
    ("name=${open", ["name=${open: the value cannot be read"]),
    # sizes
    ("global_batch_size=30", ["global_batch_size=30 is not a multiple of micro_batch_size * data_parallel_size = 4 * 1",
                              "use 28 or 32"]),
    ("devices=3", ["global_batch_size=32 is not a multiple", "= 4 * 3; use 24 or 36"]),
    ("global_batch_size=2", ["= 4 * 1; use 4"]),
    ("micro_batch_size=0", ["micro_batch_size=0: must be at least 1"]),
    ("micro_batch_size=0 stage=validate", ["micro_batch_size=0: must be at least 1"]),
    ("global_batch_size=-32", ["global_batch_size=-32: must be at least 1"]),
    ("max_steps=0", ["max_steps=0: must be at least 1"]),
    ("devices=0", ["devices=0: must be at least 1"]),
    ("nodes=0", ["nodes=0: must be at least 1"]),
    ("guard.on_spike=rollback checkpoint=none", ["goes back to the last checkpoint", "guard.on_spike=skip"]),
    ("metrics.telemetry_seconds=0", ["metrics.telemetry_seconds=0.0: must be at least 0.1, which the GPU's"]),
    ("metrics.telemetry=false metrics.telemetry_seconds=1", ["metrics.telemetry_seconds=1.0: nothing looks at a GPU"]),
    ("metrics.prometheus_port=70000", ["metrics.prometheus_port=70000: must be 1 to 65535, or 0 for a free one"]),
    ("metrics.prometheus=textfile metrics.prometheus_port=9000", ["nothing listens with metrics.prometheus=textfile",
                                                                  "give metrics.prometheus=http"]),
    ("metrics.prometheus_directory=/tmp", ["metrics.prometheus_directory=/tmp: nothing is written there without"]),
    ("log_every_n_steps=0", ["log_every_n_steps=0: must be at least 1"]),
    ("validate_every_n_steps=0", ["validate_every_n_steps=0: must be at least 1, or null"]),
    ("max_validation_batches=-1", ["max_validation_batches=-1: must be at least 1, 0 for no validation, or null"]),
    ("checkpoint.keep_last=0", ["checkpoint.keep_last=0: must be at least 1"]),
    ("checkpoint.save_every_n_steps=0", ["checkpoint.save_every_n_steps=0: must be at least 1, or null"]),
    ("checkpoint.mode=best", ["checkpoint.mode=best: must be min or max"]),
    ("checkpoint.monitor=val/acc", ["checkpoint.monitor=val/acc: give checkpoint.mode=max if its largest value"]),
    ("logger=wandb logger.mode=on", ["logger.mode=on: must be one of auto, online, offline"]),
    ("gradient_clip_val=-1", ["gradient_clip_val=-1.0: must be above 0 and finite, or null for no clipping"]),
    ("gradient_clip_val=nan", ["gradient_clip_val=nan: must be above 0"]),
    ("strategy.timeout_minutes=0", ["strategy.timeout_minutes=0.0: must be above 0"]),
    ("strategy.bucket_cap_mb=0", ["strategy.bucket_cap_mb=0: must be at least 1"]),
    # the engines' knobs
    ("strategy=fsdp strategy.forward_prefetch_units=0",
     ["strategy.forward_prefetch_units=0: must be at least 1, or null for FSDP2's own order"]),
    ("strategy=fsdp strategy.backward_prefetch_units=-1", ["strategy.backward_prefetch_units=-1: must be at least 1"]),
    ("strategy=fsdp strategy.forward_prefetch_units=true", ["must be a whole number, or null"]),
    ("strategy=fsdp strategy.reshard_after_forward=half", ["must be true or false, or a whole number"]),
    ("strategy=fsdp devices=2 micro_batch_size=1 strategy.reshard_after_forward=2",
     ["strategy.reshard_after_forward=2: must divide the 2 ranks", "use true or false"]),
    ("strategy=fsdp devices=8 micro_batch_size=1 strategy.reshard_after_forward=3",
     ["strategy.reshard_after_forward=3: must divide the 8 ranks", "use 2, 4, true or false (true: over all 8"]),
    ("strategy=fsdp devices=8 micro_batch_size=1 strategy.reshard_after_forward=1", ["use 2, 4, true or false"]),
    ("strategy=fsdp_hybrid devices=8 micro_batch_size=1 strategy.shard_size=4 strategy.reshard_after_forward=4",
     ["must divide the 4 ranks that share the parameters", "use 2, true or false"]),
    ("strategy=fsdp strategy.symmetric_memory=true", ["accelerator=cpu: it is memory of NVIDIA GPUs; leave it out"]),
    ("strategy=fsdp devices=2 micro_batch_size=1 strategy.context_parallel_size=2 data.sequence_length=33",
     ["data.sequence_length=33 strategy.context_parallel_size=2: 2 ranks cannot divide 33 positions", "length=32"]),
    ("strategy=fsdp devices=4 micro_batch_size=1 strategy.context_parallel_size=4 model.n_heads=4 model.n_kv_heads=2 "
     "strategy.context_parallel_method=heads",
     ["context_parallel_size=4 does not divide the model's 2 key heads", "use strategy.context_parallel_method=keys"]),
    ("strategy=fsdp strategy.context_parallel_method=keys",
     ["strategy.context_parallel_method=keys strategy.context_parallel_size=1: no sequence is divided"]),
    ("strategy=fsdp devices=2 strategy.context_parallel_size=2 stage=predict", ["predictions are of whole sequences"]),
    ("strategy=fsdp devices=2 micro_batch_size=1 strategy.context_parallel_size=2 attention=flex "
     "strategy.context_parallel_method=keys",
     ["attention=flex: strategy.context_parallel_method=keys has fewer queries than keys, which", "use attention="]),
    ("strategy=ddp strategy.context_parallel_size=2", ["context_parallel_size"]),
    ("strategy=zero2 strategy.reduce_bucket_elements=0", ["strategy.reduce_bucket_elements=0: must be at least 1"]),
    ("strategy=zero2 strategy.reduce_bucket_elements=5e8", ["must be a whole number; write 500000000"]),
    ("strategy=zero1 strategy.allgather_bucket_elements=1", ["must be at least 2"]),
    ("strategy=zero1 strategy.allgather_bucket_elements=7", ["=7: must be even, because DeepSpeed aligns"]),
    ("strategy=zero3 strategy.allgather_bucket_elements=8", ["strategy has no option allgather_bucket_elements"]),
    ("strategy=zero2 strategy.sub_group_elements=8", ["strategy has no option sub_group_elements"]),
    ("strategy=zero3 strategy.prefetch_bucket_elements=-1", ["must be at least 0; 0 gathers nothing ahead"]),
    ("strategy=zero3 strategy.persistence_threshold_elements=-1", ["must be at least 0; 0 shards every parameter"]),
    ("strategy=zero3 strategy.max_live_elements=-1", ["strategy.max_live_elements=-1: must be at least 0"]),
    ("strategy=zero3 strategy.max_reuse_distance_elements=-1", ["must be at least 0; 0 frees every parameter"]),
    ("strategy=zero3 strategy.sub_group_elements=0", ["strategy.sub_group_elements=0: must be at least 1"]),
    ("strategy=zero3 strategy.overlap_comm=maybe", ["strategy.overlap_comm=maybe: must be true or false"]),
    ("strategy=zero1 precision=bf16 strategy.reduce_bucket_elements=1000",
     ["strategy=zero1 precision=bf16 strategy.reduce_bucket_elements=1000: DeepSpeed's optimizer for bf16",
      "use strategy=zero2"]),
    ("strategy=fsdp devices=4 micro_batch_size=1 precision=fp8 precision.fp8.emulate=true "
     "strategy.reshard_after_forward=2", ["FSDP2 keeps no shards of weights that are gathered in fp8; use true or"]),
    ("strategy=zero1 precision=bf16 strategy.overlap_comm=false", ["strategy.overlap_comm=false", "would ignore it"]),
    ("seed=-1", ["seed=-1: must be in [0, 2**63)"]),
    # durations
    ("max_steps=3 max_epochs=1", ["exactly one of max_steps, max_epochs, max_samples",
                                  "given: max_steps=3, max_epochs=1; add max_steps=null"]),
    ("max_samples=64 max_epochs=1", ["given: max_epochs=1, max_samples=64; add max_epochs=null"]),
    ("max_steps=null", ["given: none of them; give max_steps=N"]),
    ("max_samples=100", ["max_samples=100 is not a multiple of global_batch_size=32; use 96 or 128"]),
    ("schedule.warmup_steps=5 schedule.warmup_ratio=0.1", ["a warm-up is a number of steps, or a share of all"]),
    ("validate_every_n_steps=5 validate_every_n_epochs=1", ["validation comes after so many steps, or after so many"]),
    ("validate_every_n_epochs=0", ["validate_every_n_epochs=0: must be at least 1"]),
    ("checkpoint.save_every_n_steps=5 checkpoint.save_every_n_epochs=1", ["give one of them"]),
    ("checkpoint.save_every_n_epochs=0", ["checkpoint.save_every_n_epochs=0: must be at least 1"]),
    # the machine
    ("accelerator=cuda", ["accelerator=cuda: this process sees 0 CUDA devices; use accelerator=cpu"]),
    ("memory_history=true", ["memory_history=true needs CUDA", "leave it out on the CPU"]),
    ("debug.sync=warn", ["debug.sync=warn needs CUDA: nothing on cpu tells of waiting for the device; leave it out"]),
    ("debug.launch_blocking=true", ["debug.launch_blocking=true needs CUDA"]),
    ("debug.nccl=info", ["debug.nccl=info needs CUDA"]),
    ("debug.nccl=loud", ["debug.nccl=loud: must be one of off, version, warn, info, trace"]),
    # profiles
    ("profile.start=0", ["profile.start=0: must be at least 1"]),
    ("profile.start=2 profile.steps=0", ["profile.steps=0: must be at least 1"]),
    ("profile.steps=3 profile.stacks=true",
     ["profile.steps profile.stacks: profile.start=null profiles no step; give profile.start=N"]),
    ("profile.start=20 max_steps=20 profile.steps=2",
     ["profile.start=20 profile.steps=2 ends with step 21, and the run with step 20: use profile.start=19"]),
    ("profile.start=2 profile.ranks=[0,1]",
     ["profile.ranks=[0,1]: must be all, or a list such as [0] of ranks from 0 to 0"]),
    ("profile.start=2 profile.ranks=[]", ["profile.ranks=[]: must be all, or a list"]),
    ("profile.start=2 profile.ranks=some", ["profile.ranks=some: must be all, or a list"]),
    ("profile.start=2 profile.memory=true", ["profile.memory=true needs a GPU", "leave it out on cpu"]),
    ("profile.start=2 profile.tool=nsys",
     ["profile.tool=nsys sees what NVIDIA's GPUs do; use profile.tool=torch on cpu"]),
    ("profile.start=2 profiler=pytorch",
     ["profiler=pytorch: torch profiles one window at a time; leave profiler= out"]),
    ("profiler=pytorch max_steps=4", ["profiler=pytorch max_steps=4: it leaves two steps out", "profile.start=1"]),
    ("stage=validate profile.start=2", ["profile.start=2: stage=validate makes no steps; leave it out"]),
    ("precision=tf32", ["precision=tf32 needs CUDA", "on the CPU use precision=fp32"]),
    ("attention=fa4 precision=bf16", ["attention=fa4: FlashAttention 4 runs on Hopper and Blackwell GPUs, and this run "
                                      "is on the CPU; use attention=flash or attention=auto"]),
    ("nodes=2", ["nodes=2: a local launch is one node", "torchrun"]),
    ("cluster=dgx_h100 devices=16 global_batch_size=64",
     ["devices=16 is more than a node of cluster=dgx_h100 has, 8; use devices=8 or fewer, and more nodes"]),
    ("cluster.peak_tflops.bf16=0", ["cluster.peak_tflops.bf16=0.0: must be above 0 and finite, or null"]),
    ("cluster.peak_tflops.bf16=fast", ["cluster.peak_tflops.bf16=fast: must be a number, or null"]),
    ("cluster.peak_tflops.bf8=1", ["cluster.peak_tflops has no option bf8; it has bf16, fp16, tf32, fp32, fp64"]),
    ("cluster.gpu=[H200]", ["cluster.gpu=[H200]: must be text, or null"]),
    ("strategy=fsdp_hybrid devices=4", ["strategy=fsdp_hybrid on one node needs strategy.shard_size",
                                        "nodes * devices = 4 (one of [1, 2, 4])"]),
    ("strategy=fsdp_hybrid devices=4 strategy.shard_size=3",
     ["strategy.shard_size=3 does not divide nodes * devices = 1 * 4 = 4; use one of [1, 2, 4]"]),
    # optimizers under strategies
    ("strategy=zero2 optimizer=muon", ["strategy=zero2 optimizer=muon: a matrix is orthogonalised as a whole",
                                       "use strategy=fsdp, fsdp_hybrid or ddp"]),
    ("strategy=zero3 optimizer=adamw_8bit", ["8-bit state is kept in blocks within rows",
                                             "or optimizer=adamw or adamw_bf16"]),
    ("optimizer=muon optimizer.newton_schulz_dtype=float16",
     ["optimizer.newton_schulz_dtype=float16: must be auto or one of float64, float32, bfloat16"]),
    # names and checkpoints
    ("name=../x", ["name='../x' cannot name a folder under", "use letters, digits"]),
    ("name=a/b", ["name='a/b' cannot name a folder"]),
    ("name=", ["name='' cannot name a folder"]),
    ("name=..", ["name='..' cannot name a folder"]),
    ("name=-x", ["name='-x' cannot name a folder", "starting with a letter or digit"]),
    ("runs_dir=", ["runs_dir=: names no folder; give one, e.g. runs_dir=runs"]),
    ("\"runs_dir='~no-such-user/x'\"", ["runs_dir=~no-such-user/x: names no folder"]),
    ("resume=TMP/nowhere.ckpt", ["resume=TMP/nowhere.ckpt: no such checkpoint; name=RUN resume=auto takes the newest"]),
    ("resume=TMP/runs/taken", ["runs/taken is a run's folder: it holds no checkpoint that is whole; give another"]),
    ("resume=auto", ["resume=auto: without name= a run has a new name each time", "give name= of the run"]),
    ("resume=TMP/file.ckpt", ["without a manifest.json it is no complete checkpoint"]),
    ("resume_allow=[weights]", ["resume_allow=[weights]: known are data, global_batch_size, optimizer, seed"]),
    ("checkpoint.keep_every_n_steps=150", ["must be a multiple of checkpoint.save_every_n_steps=100"]),
    ("checkpoint.keep_every_n_steps=100 checkpoint.save_every_n_steps=null",
     ["checkpoint.keep_every_n_steps=100: must be a multiple of checkpoint.save_every_n_steps=null"]),
    ("checkpoint.max_failures=-1", ["checkpoint.max_failures=-1: must be at least 0"]),
    ("checkpoint.when_busy=drop", ["checkpoint.when_busy", "wait", "skip"]),
    (f"resume={'x' * 300}", ["cannot look for checkpoints", "File name too long"]),
    ("freeze_epochs=1", ["freeze_epochs=1 and no freeze=: say what is frozen, e.g. freeze=backbone"]),
    ("freeze=backbone freeze_epochs=0", ["freeze_epochs=0: must be at least 1, or null to freeze for the whole run"]),
    ("freeze=model freeze_epochs=1 strategy=zero2", ["freeze_epochs=1 strategy=zero2: DeepSpeed", "two runs: freeze"]),
    ("freeze=3", ["freeze=3: must be a list, e.g. [a,b], or text"]),
    ("init_from=", ["init_from=: names no file or folder; give one, or null"]),
    ("init_from=[a,b]", ["init_from=[a, b]: must be text, or null"]),
    ("init_from=x resume=y", ["init_from=x resume=y: a checkpoint has its own weights; give one of them"]),
    ("resume=best name=new", ["resume=best: a run goes on from its newest checkpoint, with resume=auto"]),
    ("stage=test resume=best name=new", ["resume=best: ", "runs/new holds no checkpoint to test"]),
    ("stage=validate resume=auto name=new", ["runs/new holds no checkpoint to validate; name= a run that has one"]),
    ("name=taken", ["runs/taken already holds a run: resume=auto goes on with it, another name= starts a new one"]),
    ("name=taken resume=TMP/some.ckpt", ["runs/taken already holds a run"]),
    # targets, as far as they can be told without importing them
    ("module=null", ["module names no class: give module._target_=package.Class"]),
    ("optimizer._target_=null", ["optimizer._target_=null: must be a dotted path, package.module.Class"]),
    ("data._target_=3", ["data._target_=3: must be a dotted path"]),
    ("optimizer=none", ["schedule is given and optimizer is not: give optimizer=adamw, or schedule=none"]),
]  # fmt: skip

# What only the user's classes, data and file system can tell.
TARGETS: list[tuple[str, list[str]]] = [
    ("module._target_=nope.Module", ["module._target_=nope.Module: there is no module nope; it is looked for in"]),
    ("module._target_=LanguageModel", ["not a dotted path; write package.module.Class"]),
    ("module._target_='a.b:C'", ["not a dotted path"]),
    (f"module._target_={LM}.module.LanguageModl", [f"{LM}.module has no LanguageModl (did you mean LanguageModel?)"]),
    (f"module._target_={LM}.modul.LanguageModel", [f"{LM} has no modul (did you mean module?)"]),
    (f"{CUSTOM} module._target_={FOREIGN}.Data", [f"module._target_={FOREIGN}.Data is no LightningModule, and is not "
     "called: module._target_ names a subclass of lightning.pytorch.LightningModule, or a Python function that"]),
    (f"{OWN} data._target_={FOREIGN}.Bare", [f"data._target_={FOREIGN}.Bare is no LightningDataModule, and is not"]),
    ("recipe=custom module._target_=os.system module.command='touch TMP/was_run'",
     ["module._target_=os.system is of Python's standard library (posix), and is not called", "(SECURITY.md)"]),
    (f"{OWN} module.name={{_target_:subprocess.getoutput,cmd:'touch TMP/was_run'}}",
     ["module.name._target_=subprocess.getoutput is of Python's standard library (subprocess), and is not called"]),
    (f"{CUSTOM} module._target_={FOREIGN}.shell module.command='touch TMP/was_run'",
     [f"module._target_={FOREIGN}.shell is of Python's standard library (posix), and is not called"]),
    (f"{CUSTOM} module._target_=torch.tensor module.data=[1]",
     ["module._target_=torch.tensor is a builtin_function_or_method, and is not called"]),
    (f"recipe=custom module._target_={FOREIGN}.Own", [f"{FOREIGN}.Own has no train_dataloader, and no data is given"]),
    (f"{OWN} loss=chunked", [f"loss=chunked: {FOREIGN}.Own has no choose_loss, so its loss is its own; leave it"]),
    (f"{OWN} attention=math", [f"attention=math: {FOREIGN}.Own has no choose_attention, so its attention is its own"]),
    (f"{OWN} data.batch=3",
     ["got an unexpected keyword argument 'batch'; it takes batch_size"]),
    (f"{CUSTOM} module._target_={FOREIGN}.number", [f"{FOREIGN}.number: an int, neither a class nor a function"]),
    (f"{CUSTOM} module._target_=tests.configs.needs_a_package.Module",
     ["importing it needs no_such_package_anywhere, which is not there; install it"]),
    ("+module.foo=1", ["module: ", "unexpected keyword argument 'foo'; it takes model, sample_prompt, sample_tokens"]),
    ("~module.model", ["missing a required argument: 'model'; it takes model,"]),
    ("+model.foo=1", ["module.model: ", "unexpected keyword argument 'foo'; it takes vocab_size, dim"]),
    ("model.dim=x", ["module.model.dim=x: ", "takes int"]),
    ("module.sample_prompt=3", ["module.sample_prompt=3: ", "takes str"]),
    ("model=none", ["module.model=null: ", "takes Transformer"]),
    ("+data.foo=1", ["data: ", "unexpected keyword argument 'foo'; it takes directory, sequence_length"]),
    ("~data.directory", ["data: ", "missing a required argument: 'directory'"]),
    ("\"model.dim='512'\"", ["takes int, and this is text: write it without quotes; the environment's is "
                         "'${oc.decode:${oc.env:NAME}}', quoted so"]),
    ("optimizer=sgd optimizer._target_=torch.optim.Adadelta ~optimizer.momentum \"optimizer.lr='1e-3'\"",
     ["optimizer.lr=1e-3: must be a number, and this is text: write it without quotes"]),
    ("data.num_workers=1.5", ["data.num_workers=1.5: ", "takes int"]),
    ("data.num_workers=-1", ["data.num_workers=-1: must be at least 0"]),
    ("data.sequence_length=0", ["data.sequence_length=0: must be at least 1"]),
    ("data.directory=", ["data.directory is empty: name the folder of the shards"]),
    ("recipe=image_classification data.num_workers=-1", ["data.num_workers=-1: must be at least 0"]),
    ("data.max_validation_sequences=0", ["data.max_validation_sequences=0: must be at least 1, or null for all"]),
    ("data.corpus=other", ["data.corpus=other: input=other: there is no such file or folder", "or give data.corpus="]),
    ("data.tokenizer=bytes", ["data.tokenizer='bytes'", "are of a text of yours, data.corpus=PATH; leave them out"]),
    ("optimizer._target_=torch.optim.AdamWW", ["torch.optim has no AdamWW (did you mean AdamW?)"]),
    ("+optimizer.foo=1", ["optimizer: torch.optim.AdamW: got an unexpected keyword argument 'foo'; it takes lr,"]),
    ("+optimizer.params=1", ["optimizer: torch.optim.AdamW: multiple values for argument 'params'; it takes lr,"]),
    ("optimizer=adamw_bf16 optimizer.betas=[0.9,0.999]", ["in bfloat16, which has 8 bits, could never fall",
                                                          "use at most 0.996, or optimizer=adamw_8bit"]),
    ("optimizer=muon optimizer.scale=big", ["scale=big is not possible for Muon; known are match_rms_adamw, original"]),
    ("optimizer=muon optimizer.momentum=1", ["momentum=1 is not possible for Muon; mend optimizer.momentum=1"]),
    ("optimizer.betas=[2,0.9]", ["Invalid beta parameter at index 0: 2; mend one of optimizer.lr=0.003"]),
    ("optimizer._target_=torch.nn.Linear", ["optimizer._target_=torch.nn.Linear is no Optimizer, and is not called"]),
    ("schedule._target_=shardwise.schedules.cosine", ["shardwise.schedules has no cosine"]),
    ("+schedule.foo=1", ["schedule: shardwise.schedules.warmup_cosine: got an unexpected keyword argument 'foo'; it "
                         "takes warmup_steps, final_factor"]),
    ("+schedule.total_steps=9", ["schedule.total_steps: ", "is given it when it is called; leave it out"]),
    ("~schedule.warmup_steps", ["no warm-up is given: schedule.warmup_steps=N, 0 for none, or schedule.warmup_ratio"]),
    ("schedule.warmup_ratio=1.5", ["warmup_ratio=1.5 must be between 0 and 1"]),
    ("schedule.warmup_steps=-5", ["warmup_steps=-5 must be at least 0; mend schedule.warmup_steps=-5"]),
    ("schedule.final_factor=-3", ["final_factor=-3 must be between 0 and 1; mend schedule.final_factor=-3"]),
    ("schedule.warmup_steps=1.5", ["schedule.warmup_steps=1.5: shardwise.schedules.warmup_cosine takes int"]),
    ("optimizer=none schedule=none", ["LanguageModel has no configure_optimizers, and optimizer is none",
                                      "give optimizer=adamw"]),
    (BARE, [f"{FOREIGN}.Bare has no configure_optimizers, and optimizer is none: give optimizer=adamw"]),
    (f"{OWN} optimizer=sgd", [f"{FOREIGN}.Own has configure_optimizers, and optimizer=torch.optim.SGD is given as well",
                              "optimizer=none schedule=none, or optimizer_override=true"]),
    # data
    (f"{SHARDS}/nowhere", ["nowhere/index.json must be a readable file: No such file or directory"]),
    (f"{SHARDS}/truncated", ["train-00000.bin has 50 bytes, index.json says 100 tokens * 1 = 100", "copy"]),
    (f"{SHARDS}/emptied", ["train-00000.bin has 0 bytes", "100 tokens"]),
    (f"{SHARDS}/lost", ["train-00000.bin must be a readable file: No such file"]),
    (f"{SHARDS}/corrupt", ["index.json", "not a token shard index"]),
    (f"{SHARDS}/good data.sequence_length=100", ["100 tokens", "sequence_length + 1 = 101"]),
    (f"{SHARDS}/good data.sequence_length=16 model.vocab_size=100",
     ["TMP/good holds a vocabulary of 256 tokens, and model.vocab_size=100: use at least model.vocab_size=256"]),
    ("model.vocab_size=100 data.directory=TMP/new", ["holds a vocabulary of 256 tokens, and model.vocab_size=100"]),
    (f"{SHARDS}/good data.sequence_length=32 model.max_seq_len=16",
     ["sequence_length=32 is longer than model.max_seq_len=16: use data.sequence_length=16 or model.max_seq_len=32"]),
    (f"{SHARDS}/good model.max_seq_len=0", ["model.max_seq_len=0: must be at least 1"]),
    ("data=text_stream data.source._target_=nowhere.Texts", ["data.source._target_=nowhere.Texts: there is no module"]),
    ("data=text_stream data.source._target_=streaming.StreamingDataset",
     ["data.source._target_=streaming.StreamingDataset: there is no module streaming", "pip install mosaicml-st"]),
    ("data=text_stream data.source._target_=tests.configs.foreign.Data data.tokenizer=nowhere",
     ["tokenizer=nowhere: nowhere cannot be read"]),
    ("data=text_stream data.source._target_=tests.configs.foreign.Data data.num_workers=-1",
     ["data.num_workers=-1: must be at least 0"]),
    ("recipe=image_classification data=image_folder data.directory=TMP/nowhere",
     ["data.directory=TMP/nowhere: there is no such folder"]),
    ("recipe=image_classification data=webdataset data.directory=TMP/good",
     ["TMP/good has 0 shards: data.directory needs train-*.tar and validation-*.tar, or test-*.tar"]),
    ("recipe=image_classification data.image_size=16", ["the digits are what they are; leave them at 10, 1 and 8"]),
    # weights to start from
    ("init_from=TMP/nowhere", ["init_from=TMP/nowhere: there is no such file or folder; give one with safetensors"]),
    ("init_from=TMP/nowhere resume=auto name=new", ["init_from=TMP/nowhere: there is no such file or folder"]),
    ("init_from=TMP/file", ["init_from=TMP/file is no .safetensors file; give one, or a folder of them"]),
    ("init_from=TMP/weights/model.bin", ["model.bin is a pickle, which may run any code", "torch.save_file first"]),
    ("init_from=TMP/weights", ["no *.safetensors in that folder: model.bin is a pickle, which may run any code"]),
    ("init_from=TMP/good", ["no *.safetensors in that folder; give one, or a folder of them"]),
    ("init_from=TMP/runs/taken", ["init_from=TMP/runs/taken holds no whole checkpoint: step-00000001.ckpt is damaged"]),
    ("init_from=TMP/runs/taken/checkpoints/step-00000001.ckpt", ["step-00000001.ckpt is damaged: manifest"]),
    ("init_from=TMP/cut/model.safetensors", ["model.safetensors has 99 bytes, and its header says 100; copy it again"]),
    ("init_from=TMP/cut/noise.safetensors", ["noise.safetensors is damaged, or no safetensors; copy it again"]),
    ("init_from=TMP/lacking", ["model-2.safetensors is in model.safetensors.index.json and not in the folder; copy"]),
    ("init_from=TMP/twice", ["a.safetensors and b.safetensors both have w; name one of them"]),
    (
        "loggers.flow._target_=lightning.pytorch.loggers.MLFlowLogger loggers.flow.log_model=true",
        ["loggers.flow.log_model=true: a checkpoint is a folder in this program's own format", "shardwise export"],
    ),
    # folders
    ("runs_dir=TMP/file", ["cannot write the run's folder TMP/file/", "Not a directory; make room there or grant"]),
    ("runs_dir=/proc/runs", ["cannot write the run's folder /proc/runs/", "or give another runs_dir="]),
]  # fmt: skip

GPUS = [
    ("devices=8", ["devices=8 is more than the 2 CUDA devices that this process sees; use devices=2 or fewer"]),
    ("devices=3 accelerator=cuda", ["devices=3 is more than the 2 CUDA devices", "or accelerator=cpu"]),
    (
        "cluster=dgx_h200",
        [
            "cluster=dgx_h200 has H200 GPUs, and this machine has NVIDIA H100 80GB HBM3",
            "; use cluster=dgx_h100 or cluster=local",
        ],
    ),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "runs/taken").mkdir(parents=True)
    (folder / "runs/taken/plan.json").write_text("{}")
    (folder / "runs/taken/metrics.csv").write_text("step,train/loss\n1,0.5\n")
    (folder / "file").touch()
    (folder / "file.ckpt").touch()
    (folder / "some.ckpt").mkdir()
    (folder / "some.ckpt/manifest.json").write_text('{"format": 1, "files": {}}')
    tokens = np.zeros(100, dtype=np.uint8)
    write_token_shards(folder / "good", {"train": [tokens], "validation": [tokens]}, vocab_size=256)
    for name in ("truncated", "emptied", "lost", "corrupt"):
        shutil.copytree(folder / "good", folder / name)
    (folder / "truncated/train-00000.bin").write_bytes(b"\0" * 50)
    (folder / "emptied/train-00000.bin").write_bytes(b"")
    (folder / "lost/train-00000.bin").unlink()
    (folder / "corrupt/index.json").write_text('{"version": 1,')
    (folder / "runs/taken/checkpoints/step-00000001.ckpt").mkdir(parents=True)
    (folder / "runs/taken/checkpoints/step-00000001.ckpt/manifest.json").write_text("{}")
    for name in ("weights", "cut", "lacking", "twice"):
        (folder / name).mkdir()
    (folder / "weights/model.bin").write_bytes(b"PK\3\4")
    header = b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(56)
    whole = len(header).to_bytes(8, "little") + header + bytes(36)
    (folder / "cut/model.safetensors").write_bytes(whole[:-1])
    (folder / "cut/noise.safetensors").write_bytes(b"noise" * 9)
    (folder / "lacking/model.safetensors.index.json").write_text('{"weight_map": {"w": "model-2.safetensors"}}')
    for name in ("a", "b"):
        (folder / f"twice/{name}.safetensors").write_bytes(whole)
    experiments = folder / "conf/experiment"
    experiments.mkdir(parents=True)
    (experiments / "broken.yaml").write_text("a: [1\n")
    (experiments / "package.yaml").write_text("max_steps: 3\n")
    for name, text in {
        "typo": "max_stepz: 3",
        "group": "defaults:\n  - override /strategy: zz",
        "option": "strategy:\n  foo: 3",
        "keys": "module:\n  labels: {0: cat}",
        "text": "name: 1e3",
    }.items():
        (experiments / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    return folder


def refuse_to_start(*args: Any, **kwargs: Any) -> NoReturn:
    pytest.fail("a run was started")


def message_of(
    line: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpus: int = 0
) -> str:
    gpu = "NVIDIA H100 80GB HBM3" if gpus else None
    monkeypatch.setattr("shardwise.start.run.launch", refuse_to_start)
    monkeypatch.setattr(
        shardwise.cli, "inspect_host", lambda: Host(gpus, run_id="made-up", run_id_is_new=True, gpu=gpu)
    )
    monkeypatch.delenv("RANK", raising=False)
    argv = [word.replace("TMP", str(files)) for word in shlex.split(line)]
    if "runs_dir=" not in line:
        argv.insert(0, f"runs_dir={files}/runs")
    before = sorted(files.rglob("*"))
    assert shardwise.cli.train(argv) == 2
    assert sorted(files.rglob("*")) == before
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1
    assert "Traceback" not in err and "object_type" not in err and "full_key" not in err
    return err.replace(str(files), "TMP")


@pytest.mark.parametrize(
    ("line", "said"), WORDS + TARGETS, ids=lambda value: value[:60] if isinstance(value, str) else ""
)
def test_one_line_says_it(
    line: str, said: list[str], files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = message_of(line, files, capsys, monkeypatch)
    for words in said:
        assert words in message


@pytest.mark.parametrize(("line", "said"), GPUS)
def test_what_the_gpus_of_this_machine_say_against(
    line: str, said: list[str], files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = message_of(line, files, capsys, monkeypatch, gpus=2)
    for words in said:
        assert words in message


def test_the_table_is_told_apart_from_what_is_right(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines that the cases above spoil are fine as they are: a start is reached."""
    started: list[str] = []
    monkeypatch.setattr("shardwise.start.run.start", lambda job, plan, single: started.append(plan.run_id) or 0)
    for line in (
        "data.corpus=python_stdlib",
        OWN,
        f"{BARE} optimizer=sgd",
        f"{OWN} optimizer=sgd optimizer_override=true",
        f"{CUSTOM} module._target_={FOREIGN}.make_bare +module.width=4 optimizer=adamw",
        f"{BARE} optimizer=sgd +module.name=null +module.scale=2 +module.anything=null",
        f"{CUSTOM} module._target_={FOREIGN}.Own.of_width module.width=4",  # whose optimizer is its own
        f"{CUSTOM} module._target_={FOREIGN}.Own.of_width module.width=4 optimizer=adamw",  # its rank will say
        f"recipe=custom module._target_={FOREIGN}.WithLoaders",
        f"{OWN} module.since._target_=datetime.timedelta module.since.days=3",
        f"{SHARDS}/good",
        "optimizer={lr: 0.5}",
        "model.rope_scaling=null",
    ):
        argv = [word.replace("TMP", str(files)) for word in (line.split() if "{" not in line else [line])]
        assert shardwise.cli.train([f"runs_dir={files}/runs", *argv]) == 0, (line, capsys.readouterr().err)
    assert len(started) == 13


def test_a_preflight_comes_first_and_once(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not under another launcher, whose ranks are there already: Slurm's batch script has done it."""
    order: list[Any] = []
    code = 0
    monkeypatch.setattr("shardwise.start.run.start", lambda job, plan, single: order.append("run") or 0)
    monkeypatch.setattr(shardwise.preflight.run, "run_alone", lambda words, config: order.append(words) or code)
    sweep = [f"runs_dir={files}/runs", "-m", "seed=1,2", "preflight=true", "data.corpus=python_stdlib"]
    assert shardwise.cli.train(sweep) == 0 and order == [sweep, "run", "run"]
    code = 7
    assert shardwise.cli.train([*sweep[:1], *sweep[3:]]) == 7 and order[3:] == [[*sweep[:1], *sweep[3:]]]
    assert shardwise.cli.train([*sweep[:1], "data.corpus=python_stdlib"]) == 0 and order[4:] == ["run"]
    monkeypatch.setenv("SHARDWISE_JOB_DIR", str(files))
    assert shardwise.cli.train([*sweep[:1], *sweep[3:]]) == 0 and order.pop() == "run" and (files / "done").is_file()
    monkeypatch.delenv("SHARDWISE_JOB_DIR")
    monkeypatch.setattr(shardwise.cli, "inspect_host", lambda: Host(0, "slurm", nodes=2, devices=1, run_id="made-up"))
    assert shardwise.cli.train([*sweep[:1], *sweep[3:]]) == 0 and order[5:] == ["run"]


def test_a_remedy_that_quotes_works(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in ("name=20260101_1", "resume=a=b", "resume=~x", '"resume=it\'s"', '"resume=~`$x"', r"resume=~\\\'"):
        message = message_of(line, files, capsys, monkeypatch)
        [quoted] = shlex.split(message.partition("quote it: ")[2])
        assert shardwise.cli.train([quoted, "dry_run=true"]) in (0, 2)
        assert "read" not in capsys.readouterr().err


def test_mistakes_are_told_without_torch(files: Path) -> None:
    lines = [line.replace("TMP", str(files)) for line, _ in WORDS[::9]]
    code = (
        "import json, shlex, sys\n"
        "from shardwise.cli import train\n"
        "codes = [train(shlex.split(line)) for line in json.loads(sys.argv[1])]\n"
        "print(json.dumps([codes, [m for m in ('torch', 'lightning') if m in sys.modules]]))"
    )
    env = {"PYTHONPATH": str(ROOT / "src"), "HOME": str(files), "CUDA_VISIBLE_DEVICES": ""}
    done = run_patiently([sys.executable, "-c", code, json.dumps(lines)], 60, env=env, cwd=files)
    assert done.returncode == 0, done.stderr
    codes, loaded = json.loads(done.stdout)
    assert len(codes) >= 12 and set(codes) == {2} and loaded == []
    assert done.stderr.count("\n") == done.stderr.count("error: ") == len(codes)
