"""What shardwise uses of other packages without being invited: private names, and functions that it replaces.

A file that moves takes its line in USED along. A new name gets an entry in NAMES: where it is, why there is no other
way, and, where it is called or overridden, its arguments. tests/unit/test_private_names.py holds all of it against the
code and against the installed versions.
"""

from typing import NamedTuple


class Name(NamedTuple):
    """A private name: the classes or modules that have it, why it is used, and what a function takes."""

    of: tuple[str, ...]
    why: str
    takes: str = ""
    with_cuda: bool = False  # it is there only where torch is built with CUDA


def name(of: str, why: str, takes: str = "", *, with_cuda: bool = False) -> Name:
    """`of`: dotted paths, with spaces between."""
    return Name(tuple(of.split()), why, takes, with_cuda)


# The versions that all of this was seen in: those that the requirements pin.
SEEN_IN = {
    "lightning": "2.6.6",
    "torch": "2.13.0",
    "torchmetrics": "1.9.0",
    "deepspeed": "0.19.8",
    "transformers": "5.23.0",
    "hydra-core": "1.3.8",
    "torchao": "0.18.0",
    "python": "3.11",
}

# File → private names of others in it.
USED = {
    "accelerator.py": "_dump_snapshot _record_memory_history _snapshot",
    "callbacks/optional.py": "_foreach_add_ _foreach_lerp_ _foreach_mul_ _foreach_sub",
    "callbacks/steps.py": "_dynamo",
    "checkpoint/dcp.py": "_MEM_FORMAT_ENCODING _StorageInfo _get_layout _utils",
    "checkpoint/train_state.py": "_buffers",
    "checkpoint/optimizers.py": "_optimizer_state_dict_post_hooks",
    "checkpoint/plain.py": "_backward_hooks",
    "checkpoint/state.py": "_buffers _non_persistent_buffers_set _orig_mod",
    "data/user_loader.py": "_get_iterator _iterator",
    "distributed/mesh.py": "_C _distributed_c10d _random _set_pg_timeout",
    "strategies/fsdp_views.py": "_local_tensor _python_dispatch _pytree _schema",
    "distributed/parameters.py": "_backward_hooks _local_tensor _post_accumulate_grad_hooks _spec",
    "launch/local.py": "_C _distributed_c10d",
    "launch/worker.py": "_config _exit _run_exitfuncs _shutdown",
    "lightning_internals/hooks.py": (
        "_DataFetcher _build_kwargs _call_callback_hooks _call_lightning_module_hook _call_strategy_hook "
        "_checkpoint_connector _current_fx_name _restore_modules_and_callbacks _select_data_fetcher"
    ),
    "lightning_internals/loops.py": (
        "_FitLoop _ManualOptimization _ProcessedTracker _TrainingEpochLoop _batches_that_stepped "
        "_call_lightning_module_hook _can_stop_early _combined_loader_states_to_load _data_fetcher _first_loop_iter "
        "_is_sequential _is_training_done _is_validation_done _load_combined_loader_states _logger_connector "
        "_module_mode _num_ready_batches_reached _on_after_step _on_before_step _restarting _resuming_from_checkpoint "
        "_should_accumulate _should_check_val_fx"
    ),
    "strategies/fsdp_symmetric_memory.py": (
        "_all_gather_process_group _foreach_copy_ _fsdp_collectives _fsdp_param_group _fully_shard _get_fsdp_state "
        "_sharded_local_tensor _sharded_param_data _symmetric_memory _unsafe_preserve_version_counter"
    ),
    "lightning_internals/patches.py": (
        "_broadcast_sigterm_tensor _checkpoint_connector _data_connector _getframe _log_hyperparams _logger_connector "
        "_prepare_dataloader _restore_modules_and_callbacks _results _signal_connector"
    ),
    "lightning_internals/results.py": (
        "_LoggerConnector _Metadata _ResultCollection _ResultMetric _Sync _callback_metrics _combined_loader "
        "_current_fx_name _defaults _first_loop_iter _forked_name _forward_cache _get_cache _logger_connector "
        "_results _update_count"
    ),
    "lightning_internals/padding.py": "_ResultMetric _copy_state_dict _defaults _reductions _results _update_count",
    "metrics/loggers.py": "_wandb_init",
    "nn/attention.py": "_fused_sdp_choice",
    "nn/attention_kernels.py": "_flash_attn_bwd _flash_attn_fwd",
    "nn/linear_cross_entropy.py": "_assert_async",
    "nn/peers.py": "_c10d_functional",
    "optim/adamw.py": "_foreach_add_",
    "optim/optimizers.py": (
        "_foreach_div_ _global_optimizer_post_hooks _global_optimizer_pre_hooks _optimizer_step_post_hooks "
        "_optimizer_step_pre_hooks"
    ),
    "optim/deepspeed_operators.py": "_get_build_directory",
    "parallel/activation_checkpointing.py": "_buffers _cdata _higher_order_ops _pytree _schema _version",
    "parallel/parallelize.py": "_dynamo _functional_call _functorch _micro_pipeline_tp _pytree _version",
    "parallel/context_hugging_face.py": "_attn_implementation _global_mapping",
    "parallel/context_parallel.py": "_c10d_functional",
    "parallel/hugging_face_models.py": "_attn_implementation _supports_attention_backend",
    "parallel/tensor_layers.py": "_backward_hooks _backward_pre_hooks _dynamo _forward_hooks _forward_pre_hooks",
    "parallel/float8.py": (
        "_aot_autograd _axiswise_dim _data _dynamo _foreach_norm _functorch _local_tensor _orig_dtype _parameters "
        "_scale"
    ),
    "parallel/pipeline/placeholders.py": "_python_dispatch _schema",
    "parallel/pipeline/stages.py": "_buffers _modules _parameters",
    "parallel/precision.py": "_NormBase _parameters _pytree",
    "parallel/tensor_parallel.py": "_parameters",
    "parallel/units.py": "_parameters",
    "preflight/judge.py": "_C _distributed_c10d",
    "preflight/measure.py": "_C _distributed_c10d",
    "preflight/place.py": "_C _distributed_c10d",
    "preflight/rank.py": "_C _distributed_c10d _exit",
    "preflight/run.py": "_exit",
    "process/watchdog.py": "_C _current_frames _distributed_c10d _dump_nccl_trace _dump_nccl_trace_json _exit",
    "protocols.py": "_no_split_modules",
    "step/verdict.py": "_amp_foreach_non_finite_check_and_unscale_ _foreach_copy_ _step_supports_amp_scaling",
    "step/precision_plugin.py": (
        "_after_closure _amp_foreach_non_finite_check_and_unscale_ _clip_gradients _foreach_clamp_max_ "
        "_foreach_clamp_min_ _foreach_norm _growth_tracker _opt_called _optimizer _per_optimizer_states "
        "_unscale_grads_"
    ),
    "strategies/base.py": "_forward_redirection",
    "strategies/ddp.py": "_check_reducer_finalized _compute_bucket_assignment_by_size _ddp_kwargs _setup_model",
    "strategies/fsdp.py": "_device_mesh _setup_distributed",
    "strategies/fsdp_sharding.py": "_fsdp_param_group _get_fsdp_state _lazy_init _unsharded_param",
    "strategies/fsdp_gathering.py": (
        "_all_gather_result _fsdp_param _fully_shard _get_fsdp_state _get_post_forward_mesh_info "
        "_unimplemented_deepcopy _unsharded_param"
    ),
    "strategies/fsdp_weights.py": (
        "_get_fsdp_state _load_state_dict_post_hooks _parameters _wait_all_gather_streams_on_event"
    ),
    "strategies/pipeline_run.py": "_buffers _version",
    "strategies/fsdp_step.py": "_get_total_norm _local_tensor _post_accumulate_grad_hooks",
    "strategies/whole_weights.py": (
        "_fsdp_common _fsdp_param_group _fsdp_param_groups _fully_shard _get_fsdp_state _is_root _is_view "
        "_pre_backward _root_post_backward_final_callback _state_ctx _training_state"
    ),
    "strategies/zero/internals.py": (
        "_PartitionedParameterCoordinator__params_to_release _broadcast_model _clean_inflight_param_registry "
        "_grad_acc_hooks"
    ),
    "strategies/zero/precision.py": "_after_closure _clip_gradients",
    "strategies/zero/state.py": (
        "_get_fp32_opt_state_partition _hp_mapping _partition_all_parameters "
        "_reassign_or_swap_out_partitioned_parameters"
    ),
    "strategies/zero/optimizer.py": (
        "_global_optimizer_post_hooks _global_optimizer_pre_hooks _optimizer_step_post_hooks _optimizer_step_pre_hooks"
    ),
    "strategies/zero/weights.py": "_foreach_norm",
    "strategies/zero/strategy.py": "_init_optimizers_and_lr_schedulers",
    "strategies/zero/unused_parameters.py": "_pytree",
    "shardwise_tools/bench_data.py": "_exit",
    "weights/initialize.py": "_buffers _parameters",
}

PYTORCH = "lightning.pytorch"
LOOPS = f"{PYTORCH}.loops"
CONNECTORS = f"{PYTORCH}.trainer.connectors"
LOGGING = f"{CONNECTORS}.logger_connector"
FSDP = "torch.distributed.fsdp._fully_shard"
ZERO = "deepspeed.runtime.zero"

EPOCH_LOOP = f"{LOOPS}.training_epoch_loop._TrainingEpochLoop"
FIT_LOOP = f"{LOOPS}.fit_loop._FitLoop"
TRAINER = f"{PYTORCH}.trainer.trainer.Trainer"
STAGE_3 = f"{ZERO}.stage3.DeepSpeedZeroOptimizer_Stage3"
STATE = f"{FSDP}._fsdp_state.FSDPState"
METRIC = "torchmetrics.metric.Metric"
MODULE = "torch.nn.modules.module.Module"
FLOAT8 = "torchao.float8.float8_training_tensor.Float8TrainingTensor"

NAMES = {
    # Lightning's loops: steps instead of batches, and what is left of an epoch
    "_FitLoop": name(f"{LOOPS}.fit_loop", "base of the loop that takes up what is left of an epoch"),
    "_TrainingEpochLoop": name(
        f"{LOOPS}.training_epoch_loop", "base of the loop that ends where an accumulation window ends"
    ),
    "_ManualOptimization": name(f"{LOOPS}.optimization.manual", "base of the loop that counts a batch as one step"),
    "_ProcessedTracker": name(f"{LOOPS}.progress", "a type, for a counter that a loop has"),
    "_DataFetcher": name(f"{LOOPS}.fetchers", "base of the fetcher that reads whole windows"),
    "_batches_that_stepped": name(EPOCH_LOOP, "the number that Lightning and its callbacks log under: the step's here"),
    "_can_stop_early": name(FIT_LOOP, "an early stop waits for min_steps, as in Lightning's own `done`"),
    "_combined_loader": name(
        f"{LOOPS}.prediction_loop._PredictionLoop", "which samples were predicted is known to the loaders"
    ),
    "_is_sequential": name(
        f"{LOOPS}.evaluation_loop._EvaluationLoop", "batches of several loaders at once cannot be dealt out to ranks"
    ),
    "_combined_loader_states_to_load": name(
        FIT_LOOP, "where the data goes on is not forgotten when set-up has read it early"
    ),
    "_load_combined_loader_states": name(
        FIT_LOOP, "where the data goes on is not forgotten when set-up has read it early", "(self)"
    ),
    "_data_fetcher": name(FIT_LOOP, "where the data goes on is not forgotten when set-up has read it early"),
    "_is_training_done": name(EPOCH_LOOP, "`done`, without a stop within a window"),
    "_is_validation_done": name(EPOCH_LOOP, "`done`, without a stop within a window"),
    "_module_mode": name(
        f"{LOOPS}.evaluation_loop._EvaluationLoop",
        "a checkpoint has the modes that layers train in, also in a validation",
    ),
    "_num_ready_batches_reached": name(EPOCH_LOOP, "whether the epoch has batches left", "(self)"),
    "_on_after_step": name(
        f"{LOOPS}.optimization.manual._ManualOptimization", "steps of single optimizers are not counted", "(self)"
    ),
    "_on_before_step": name(
        f"{LOOPS}.optimization.manual._ManualOptimization", "steps of single optimizers are not counted", "(self)"
    ),
    "_restarting": name(f"{LOOPS}.loop._Loop", "what was pending in a checkpoint is done by callbacks/saving.py"),
    "_resuming_from_checkpoint": name(f"{LOOPS}.loop._Loop", "the next epoch takes the iterator that is there"),
    "_results": name(f"{EPOCH_LOOP} {LOOPS}.evaluation_loop._EvaluationLoop {TRAINER}", "what the module logs"),
    "_should_accumulate": name(EPOCH_LOOP, "whether a batch is the last of its window", "(self)"),
    "_should_check_val_fx": name(EPOCH_LOOP, "validation waits for the end of the window", "(self, data_fetcher)"),
    "_build_kwargs": name(
        EPOCH_LOOP,
        "the signature of training_step is looked up once, not in every batch",
        "(self, kwargs, batch, batch_idx)",
    ),
    "_broadcast_sigterm_tensor": name(EPOCH_LOOP, "it asks rank 0 in every micro-batch, and the host waits", "(self)"),
    "_select_data_fetcher": name(
        f"{LOOPS}.utilities {LOOPS}.fit_loop", "where a Trainer chooses who fetches its batches", "(trainer, stage)"
    ),
    # Lightning's logging
    "_LoggerConnector": name(f"{LOGGING}.logger_connector", "base of the logging that counts optimizer steps"),
    "_logger_connector": name(TRAINER, "where a Trainer keeps it"),
    "_callback_metrics": name(
        f"{LOGGING}.logger_connector._LoggerConnector",
        "a run that goes on has what the one before has measured, for ReduceLROnPlateau",
    ),
    "_first_loop_iter": name(
        f"{LOGGING}.logger_connector._LoggerConnector",
        "a validation between two batches must not make the next batch the first",
    ),
    "_Metadata": name(f"{LOGGING}.result", "values that are half an epoch's mean are in the checkpoint"),
    "_ResultCollection": name(f"{LOGGING}.result", "base of the results that are reduced over a window"),
    "_ResultMetric": name(f"{LOGGING}.result", "values that are half an epoch's mean are in the checkpoint"),
    "_Sync": name(f"{LOGGING}.result", "values that are half an epoch's mean are in the checkpoint"),
    "_forked_name": name(
        f"{LOGGING}.result._ResultCollection", "the name that a value is logged under", "(self, result_metric, on_step)"
    ),
    "_get_cache": name(f"{LOGGING}.result._ResultCollection", "its value", "(result_metric, on_step)"),
    "_forward_cache": name(METRIC, "the value of the last micro-batch"),
    "_update_count": name(METRIC, "a padding batch leaves no trace in metrics"),
    "_reductions": name(METRIC, "whether a list without a padding batch's elements can be gathered"),
    "_copy_state_dict": name(METRIC, "a padding batch leaves no trace in metrics", "(self)"),
    "_defaults": name(
        METRIC, "a padding batch leaves no trace in metrics; and which of a metric's attributes are state"
    ),
    "_wandb_init": name(f"{PYTORCH}.loggers.wandb.WandbLogger", "an argument that wandb warns of is taken out"),
    # Lightning's hooks, its connectors and its module
    "_call_callback_hooks": name(
        f"{PYTORCH}.trainer.call",
        "idle hooks are left out; weights are whole around those that look at them",
        "(trainer, hook_name, *args, monitoring_callbacks=None, **kwargs)",
    ),
    "_call_lightning_module_hook": name(
        f"{PYTORCH}.trainer.call",
        "idle hooks are left out; weights are whole around those that look at them",
        "(trainer, hook_name, *args, pl_module=None, **kwargs)",
    ),
    "_call_strategy_hook": name(
        f"{PYTORCH}.trainer.call",
        "idle hooks are left out; weights are whole around those that look at them",
        "(trainer, hook_name, *args, **kwargs)",
    ),
    "_checkpoint_connector": name(TRAINER, "what hooks put into a checkpoint, and how it is taken up"),
    "_restore_modules_and_callbacks": name(
        f"{CONNECTORS}.checkpoint_connector._CheckpointConnector",
        "once, before on_fit_start; and an error says what the checkpoint came without",
        "(self, checkpoint_path=None, weights_only=None)",
    ),
    "_data_connector": name(TRAINER, "see `_prepare_dataloader`"),
    "_prepare_dataloader": name(
        f"{CONNECTORS}.data_connector._DataConnector",
        "it would replace the batch sampler of a predict loader",
        "(self, dataloader, shuffle, mode)",
    ),
    "_signal_connector": name(TRAINER, "Lightning's SIGTERM handler is a collective"),
    "_current_fx_name": name(
        f"{PYTORCH}.core.module.LightningModule", "set without nn.Module.__setattr__, which short steps feel"
    ),
    "_log_hyperparams": name(
        f"{PYTORCH}.core.mixins.hparams_mixin.HyperparametersMixin {PYTORCH}.core.module.LightningModule",
        "whether a constructor has called super().__init__()",
    ),
    "_init_optimizers_and_lr_schedulers": name(
        f"{PYTORCH}.core.optimizer", "DeepSpeed needs the optimizer before the engine is made", "(model)"
    ),
    "_optimizer": name(f"{PYTORCH}.core.optimizer.LightningOptimizer", "the module's own optimizer within Lightning's"),
    "_after_closure": name(
        f"{PYTORCH}.plugins.precision.precision.Precision",
        "a gradient that is missing is zero; hooks that reach for DeepSpeed's gradients are refused",
        "(self, model, optimizer)",
    ),
    "_clip_gradients": name(
        f"{PYTORCH}.plugins.precision.precision.Precision",
        "the norm is measured once, before clipping",
        "(self, model, optimizer, clip_val=None, gradient_clip_algorithm=None)",
    ),
    "_forward_redirection": name(
        f"{PYTORCH}.strategies.strategy.Strategy", "evaluation goes through the root's forward, too"
    ),
    "_ddp_kwargs": name(
        f"{PYTORCH}.strategies.ddp.DDPStrategy", "find_unused_parameters for a module that optimizes by hand"
    ),
    "_setup_model": name(f"{PYTORCH}.strategies.ddp.DDPStrategy", "DDP is made on the main stream", "(self, model)"),
    "_device_mesh": name(
        f"{PYTORCH}.strategies.model_parallel.ModelParallelStrategy",
        "the mesh is the Plan's: Lightning's has no replicate axis",
    ),
    "_setup_distributed": name(
        f"{PYTORCH}.strategies.model_parallel.ModelParallelStrategy", "the processes without Lightning's mesh", "(self)"
    ),
    # torch.distributed.fsdp: `fully_shard`
    "_fully_shard": name("torch.distributed.fsdp", "the package where FSDP2 lives"),
    "_fsdp_param": name(FSDP, "the file of FSDPParam"),
    "_fsdp_common": name(FSDP, "the file of TrainingState"),
    "_get_fsdp_state": name("torch.distributed.fsdp.FSDPModule", "hooks of FSDP2 are replaced for one module"),
    "_fsdp_param_group": name(STATE, "hooks of FSDP2 are replaced for one module; of torch 2.11"),
    "_fsdp_param_groups": name(
        STATE, "hooks of FSDP2 are replaced for one module; of torch 2.11; of torch 2.12 and later"
    ),
    "_get_post_forward_mesh_info": name(
        f"{FSDP}._fully_shard",
        "units share one mesh of reshard_after_forward=N, and its groups",
        "(reshard_after_forward, mesh_info)",
    ),
    "_unimplemented_deepcopy": name(
        f"{FSDP}._fully_shard", "a class that FSDP2 cannot change by itself", "(*args, **kwargs)"
    ),
    "_lazy_init": name(STATE, "before a module that optimizes by hand toggles an optimizer", "(self)"),
    "_pre_backward": name(STATE, "tensors inside objects and views need the hook as well", "(self, grad)"),
    "_root_post_backward_final_callback": name(STATE, "a backward pass within a step is not the step's last", "(self)"),
    "_state_ctx": name(STATE, "a backward pass within a step is not the step's last"),
    "_training_state": name(
        f"{STATE} {FSDP}._fsdp_param_group.FSDPParamGroup", "a backward pass within a step is not the step's last"
    ),
    "_unsharded_param": name(f"{FSDP}._fsdp_param.FSDPParam", "a weight that took no part has a zero gradient"),
    "_wait_all_gather_streams_on_event": name(
        f"{FSDP}._fsdp_param_group.FSDPParamGroup", "what a hook has written is gathered after it", "(self, event)"
    ),
    "_fsdp_collectives": name(FSDP, "the file of what gathers and reduces by itself"),
    "_all_gather_result": name(f"{FSDP}._fsdp_param_group.FSDPParamGroup", "whether a gather has begun already"),
    "_all_gather_process_group": name(f"{FSDP}._fsdp_param_group.FSDPParamGroup", "whose ranks copy from each other"),
    "_sharded_local_tensor": name(f"{FSDP}._fsdp_param.FSDPParam", "whether a weight is gathered in fp8"),
    "_sharded_param_data": name(f"{FSDP}._fsdp_param.FSDPParam", "what is cast into the memory that others see"),
    "_micro_pipeline_tp": name("torch._inductor.config", "exchanges beside the products that need them"),
    "_symmetric_memory": name("torch.distributed", "memory that other GPUs copy from; it has no public name yet"),
    "_unsafe_preserve_version_counter": name(
        "torch.autograd.grad_mode",
        "weights that are gathered again are those that autograd has saved",
        "(tensors)",
    ),
    # torch
    "_c10d_functional": name(
        "torch.distributed._functional_collectives", "collectives that torch.compile puts into its graph"
    ),
    "_C": name("torch", "TCPStore and HashStore without importing torch.distributed; NCCL's record"),
    "_distributed_c10d": name("torch._C", "TCPStore and HashStore without importing torch.distributed; NCCL's record"),
    "_dump_nccl_trace": name(
        "torch._C._distributed_c10d", "what every rank waits for when a run hangs; built with CUDA only", with_cuda=True
    ),
    "_dump_nccl_trace_json": name(
        "torch._C._distributed_c10d", "what every rank waits for when a run hangs; built with CUDA only", with_cuda=True
    ),
    "_set_pg_timeout": name(
        "torch.distributed.distributed_c10d", "groups of a mesh come with NCCL's default", "(timeout, group=None)"
    ),
    "_random": name(
        "torch.distributed.tensor", "the first random operation on a DTensor on GPUs broadcasts rank 0's random state"
    ),
    "_check_reducer_finalized": name(
        "torch.nn.parallel.DistributedDataParallel",
        "whether weights took no part, at once: others wait for them",
        "(self)",
    ),
    "_compute_bucket_assignment_by_size": name(
        "torch.distributed", "a run that goes on has DDP's buckets from the start"
    ),
    "_local_tensor": name(
        "torch.distributed.tensor.DTensor", "a shard's gradient without DTensor's dispatch, which the host feels"
    ),
    "_post_accumulate_grad_hooks": name("torch.Tensor", "hooks go along when a parameter is replaced by another"),
    "_spec": name("torch.distributed.tensor.DTensor", "no attribute that a module has set on a parameter"),
    "_utils": name("torch.distributed.tensor", "where a shard lies in the whole"),
    "_MEM_FORMAT_ENCODING": name("torch.distributed.checkpoint.metadata", "a class that the pickle of .metadata names"),
    "_StorageInfo": name("torch.distributed.checkpoint.filesystem", "a class that the pickle of .metadata names"),
    "_get_layout": name("torch.serialization", "a class that the pickle of .metadata names"),
    # torchao's products, and what torch's compiler keeps of them
    "_functorch": name("torch", "the compiler's memory budget, and where a node belongs into the backward graph"),
    "_aot_autograd": name("torch._functorch", "as _functorch"),
    "_data": name(FLOAT8, "the bytes of a tensor in fp8, to lay them out anew"),
    "_scale": name(FLOAT8, "a gathered weight's scale of this step; the tensor itself stays"),
    "_orig_dtype": name(FLOAT8, "a tensor in fp8 is made like another"),
    "_axiswise_dim": name(FLOAT8, "a tensor in fp8 is made like another"),
    "_dynamo": name("torch", "the limit of recompilations, how many graphs there are, and why one was compiled again"),
    "_schema": name("torch._ops.OpOverload", "which argument is the share of dropout, and which ones are written to"),
    "_higher_order_ops": name("torch", "the name of the logger that would advise against operations in place"),
    "_cdata": name("torch.UntypedStorage", "whether two tensors share memory"),
    "_record_memory_history": name("torch.cuda.memory", "documented by torch under this name"),
    "_snapshot": name("torch.cuda.memory", "documented by torch under this name"),
    "_dump_snapshot": name("torch.cuda.memory", "documented by torch under this name"),
    "_get_build_directory": name(
        "torch.utils.cpp_extension", "where DeepSpeed's operators are built, for a lock", "(name, verbose)"
    ),
    "_python_dispatch": name("torch.utils", "TorchDispatchMode, which torch documents by this path"),
    "_pytree": name("torch.utils", "tree_map, which torch itself imports from there"),
    "_NormBase": name("torch.nn.modules.batchnorm", "every layer that keeps running statistics"),
    "_load_state_dict_post_hooks": name(MODULE, "whole weights are loaded in a hook, and FSDP2 looks for shards"),
    "_parameters": name(MODULE, "parameters are replaced by copies, shards or whole ones for a while"),
    "_buffers": name(MODULE, "parameters are replaced by copies, shards or whole ones for a while buffers"),
    "_modules": name(MODULE, "a stage of a pipeline has stubs in the places of other stages' layers"),
    "_orig_mod": name("torch._dynamo.OptimizedModule", "torch.compile(layer) puts it into the names of weights"),
    "_non_persistent_buffers_set": name(MODULE, "which buffers a checkpoint leaves out"),
    "_backward_hooks": name("torch.Tensor " + MODULE, "a tensor with hooks is pickled without them; hooks on parts"),
    "_backward_pre_hooks": name(MODULE, "hooks that would see a part of a gradient are refused"),
    "_forward_hooks": name(MODULE, "hooks that would see a part of an output are refused"),
    "_forward_pre_hooks": name(MODULE, "hooks that would see a part of an input are refused"),
    "_version": name("torch.Tensor", "whether somebody has written into it"),
    "_is_root": name(STATE, "a pass with nothing to differentiate ends as others do, which the root does"),
    "_is_view": name("torch.Tensor", "a hook on a view is lost when somebody writes into it"),
    "_get_iterator": name("torch.utils.data.DataLoader", "whether a subclass iterates in its own way", "(self)"),
    "_iterator": name("torch.utils.data.DataLoader", "a copy of a loader has an iterator of its own"),
    "_opt_called": name(
        "torch.optim.lr_scheduler", "a first step that was skipped is no mistake in the order of calls"
    ),
    "_step_supports_amp_scaling": name(
        "torch.optim.adam torch.optim.sgd", "whether the optimizer reads found_inf on the device"
    ),
    "_get_total_norm": name(
        "torch.nn.utils.clip_grad",
        "clip_grad_norm_ takes its norm from there: wrong over a tensor axis",
    ),
    "_growth_tracker": name("torch.amp.GradScaler", "part of a GradScaler's state_dict"),
    "_per_optimizer_states": name(
        "torch.amp.GradScaler", "whether a step is skipped is known before the optimizer is called"
    ),
    "_unscale_grads_": name(
        "torch.amp.GradScaler",
        "on shards, and an overflow on one rank is one on all",
        "(self, optimizer, inv_scale, found_inf, allow_fp16)",
    ),
    "_amp_foreach_non_finite_check_and_unscale_": name("torch", "the kernel that GradScaler uses"),
    "_assert_async": name("torch", "a condition that a GPU checks without the host waiting for it"),
    "_foreach_add_": name("torch", "one kernel for many tensors; torch.optim and clip_grad_norm_ call it by this name"),
    "_foreach_clamp_max_": name(
        "torch", "one kernel for many tensors; torch.optim and clip_grad_norm_ call it by this name"
    ),
    "_foreach_clamp_min_": name(
        "torch", "one kernel for many tensors; torch.optim and clip_grad_norm_ call it by this name"
    ),
    "_foreach_copy_": name(
        "torch", "one kernel for many tensors; torch.optim and clip_grad_norm_ call it by this name"
    ),
    "_foreach_div_": name("torch", "one kernel for many tensors; torch.optim and clip_grad_norm_ call it by this name"),
    "_foreach_lerp_": name(
        "torch", "one kernel for many tensors; torch.optim and clip_grad_norm_ call it by this name"
    ),
    "_foreach_mul_": name("torch", "one kernel for many tensors; torch.optim and clip_grad_norm_ call it by this name"),
    "_flash_attn_bwd": name(
        "flash_attn.cute.interface", "the public function is no operator of torch, and a graph cannot hold it"
    ),
    "_flash_attn_fwd": name(
        "flash_attn.cute.interface", "the public function is no operator of torch, and a graph cannot hold it"
    ),
    "_functional_call": name(
        "torch.nn.utils.stateless", "a layer that is gathered or computed again has its own weights in spite of it"
    ),
    "_fused_sdp_choice": name(
        "torch", "which kernel scaled_dot_product_attention takes for such tensors; nothing else knows"
    ),
    "_global_optimizer_pre_hooks": name(
        "torch.optim.optimizer", "a hook may look at gradients before a step; torch tells nobody that there is one"
    ),
    "_global_optimizer_post_hooks": name(
        "torch.optim.optimizer", "a hook may write into weights behind a step; torch tells nobody that there is one"
    ),
    "_optimizer_step_post_hooks": name(
        "torch.optim.Optimizer", "a hook may write into weights behind a step; torch tells nobody that there is one"
    ),
    "_optimizer_step_pre_hooks": name(
        "torch.optim.Optimizer", "a hook may look at gradients before a step; torch tells nobody that there is one"
    ),
    "_optimizer_state_dict_post_hooks": name(
        "torch.optim.Optimizer", "a hook may add what an optimizer keeps; torch tells nobody that there is one"
    ),
    "_foreach_norm": name("torch", "one kernel for many tensors; torch.optim and clip_grad_norm_ call it by this name"),
    "_foreach_sub": name("torch", "one kernel for many tensors; torch.optim and clip_grad_norm_ call it by this name"),
    # DeepSpeed, transformers and Python
    "_broadcast_model": name(
        "deepspeed.runtime.engine.DeepSpeedEngine",
        "all ranks have the same weights already, and a parameter of shape () cannot be sent",
        "(self)",
    ),
    "_get_fp32_opt_state_partition": name(
        STAGE_3,
        "this rank's part of a master, which the public function gathers",
        "(self, param, release_swap_buffers, optim_state_key=None)",
    ),
    "_grad_acc_hooks": name(
        f"{ZERO}.stage_1_and_2.DeepSpeedZeroOptimizer",
        "hooks refer to an engine, so that it outlives its run; DeepSpeed's own `destroy` waits for the device",
    ),
    "_PartitionedParameterCoordinator__params_to_release": name(
        f"{ZERO}.partitioned_param_coordinator.PartitionedParameterCoordinator",
        "its cache, which is that of the class, keeps an engine for the whole process",
    ),
    "_partition_all_parameters": name(STAGE_3, "masters were written to: nothing of before stays gathered", "(self)"),
    "_clean_inflight_param_registry": name(
        f"{ZERO}.partitioned_param_coordinator.PartitionedParameterCoordinator",
        "weights that are gathered ahead are neither whole nor free",
        "(self)",
    ),
    "_reassign_or_swap_out_partitioned_parameters": name(
        STAGE_3, "masters were written to: 16-bit copies follow", "(self, sub_group_id)"
    ),
    "_hp_mapping": name("deepspeed.utils.mixed_precision_linkage", "where a parameter's master lies in the flat one"),
    "_no_split_modules": name("transformers.modeling_utils", "which layers a Hugging Face model names as its units"),
    "_attn_implementation": name(
        "transformers.configuration_utils", "the name under which a model asks for its attention and masks"
    ),
    "_global_mapping": name(
        "transformers.utils.generic.GeneralInterface", "a registered name is taken back; its __delitem__ does not"
    ),
    "_supports_attention_backend": name(
        "transformers.modeling_utils", "whether a model asks for its attention by name; nothing else tells"
    ),
    "_exit": name("os", "documented by Python"),
    "_current_frames": name("sys", "documented by Python: where every thread stands when a run hangs"),
    "_getframe": name("sys", "documented by Python: who has set should_stop"),
    "_shutdown": name("threading", "waits for threads, as at any exit", "()"),
    "_run_exitfuncs": name("atexit", "what multiprocessing calls at the end of a process"),
    "_config": name("multiprocessing.process.BaseProcess", "where multiprocessing keeps its temporary folder"),
}

# Functions whose name is not private, but which are replaced, or which nobody has promised to keep: why, and arguments.
CALLED = {
    f"{METRIC}.sync": (
        "metrics gather among ranks that see different samples",
        "(self, dist_sync_fn=None, process_group=None, should_sync=True, distributed_available=None)",
    ),
    f"{FSDP}._fsdp_param.FSDPParam.to_unsharded": ("what is frozen while a layer is gathered stays so", "(self)"),
    f"{FSDP}._fsdp_param.FSDPParam.to_sharded": ("what is frozen while a layer is gathered stays so", "(self)"),
    f"{FSDP}._fsdp_param.FSDPParam.to_sharded_post_forward": (
        "what is frozen while a layer is gathered stays so",
        "(self)",
    ),
    "torch.distributed.tensor._random.manual_seed": (
        "random numbers of DTensors without a broadcast",
        "(seed, device_mesh)",
    ),
    "transformers.masking_utils.find_packed_sequence_indices": (
        "as its masks find texts in a sequence",
        "(position_ids)",
    ),
    "transformers.masking_utils.packed_sequence_compatibility_function": (
        "its masks keep texts in a sequence apart with it, which are told of a part alone",
        "(mask_function, position_ids, packed_sequence_mask)",
    ),
    "lightning.fabric.plugins.environments.slurm.SLURMEnvironment.detect": (
        "the launcher knows who started the ranks",
        "()",
    ),
    f"{CONNECTORS}.checkpoint_connector._CheckpointConnector.restore_training_state": (
        "an error says what the checkpoint came without",
        "(self)",
    ),
    f"{CONNECTORS}.checkpoint_connector._CheckpointConnector.dump_checkpoint": (
        "what hooks put into a checkpoint",
        "(self, weights_only=None)",
    ),
    f"{CONNECTORS}.signal_connector._SignalConnector.register_signal_handlers": (
        "Lightning's SIGTERM handler is a collective",
        "(self)",
    ),
    f"{EPOCH_LOOP}.update_lr_schedulers": (
        "ReduceLROnPlateau, where a run was left between a save and it",
        "(self, interval, update_plateau_schedulers)",
    ),
    f"{LOGGING}.logger_connector._LoggerConnector.on_batch_start": (
        "counts micro-batches",
        "(self, batch, dataloader_idx=None)",
    ),
    f"{LOGGING}.logger_connector._LoggerConnector.update_eval_step_metrics": ("counts micro-batches", "(self, step)"),
    f"{LOGGING}.logger_connector._LoggerConnector.update_train_step_metrics": ("counts micro-batches", "(self)"),
    f"{LOGGING}.result._ResultCollection.update_metrics": (
        "the values of single micro-batches",
        "(self, key, value, batch_size)",
    ),
    f"{PYTORCH}.strategies.parallel.ParallelStrategy.block_backward_sync": (
        "FSDP2 and DeepSpeed have no no_sync()",
        "(self)",
    ),
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.pre_backward": (
        "weights that took no part",
        "(self, default_prefetch, *unused)",
    ),
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.post_backward": (
        "weights that took no part; backward passes within a step",
        "(self, *unused)",
    ),
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.unshard": (
        "the order of collectives is checked",
        "(self, async_op=False)",
    ),
    f"{FSDP}._fsdp_param_group.foreach_all_gather": (
        "copies in place of collectives",
        "(fsdp_params, group, async_op, all_gather_copy_in_stream, all_gather_stream, device, all_gather_comm)",
    ),
    f"{FSDP}._fsdp_param_group.foreach_all_gather_copy_out": (
        "copies in place of collectives",
        "(all_gather_result, fsdp_params, group)",
    ),
    f"{FSDP}._fsdp_param.FSDPParam.free_unsharded_param": ("memory is given back when the GPU is done", "(self)"),
    "torch.nn.Module.register_parameter": ("parameters without memory", "(self, name, param)"),
    "deepspeed.runtime.engine.DeepSpeedEngine.backward": (
        "the loss is divided already",
        "(self, loss, retain_graph=False, scale_wrt_gas=True)",
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine.set_gradient_accumulation_boundary": (
        "the window is Lightning's",
        "(self, is_boundary)",
    ),
    f"{ZERO}.parameter_offload.DeepSpeedZeRoOffload.post_sub_module_backward_function": (
        "a gradient taken within a step",
        "(self, sub_module)",
    ),
    f"{ZERO}.stage3.z3_leaf_parameter": ("gradients are reduced one by one", "(model)"),
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer.clear_hp_grads": ("whose gradient was not finite", "(self)"),
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer.update_lp_params": (
        "masters were written to: 16-bit copies follow",
        "(self)",
    ),
    f"{ZERO}.partitioned_param_coordinator.PartitionedParameterCoordinator.fetch_sub_module": (
        "ranks gather in one order",
        "(self, current_submodule, forward)",
    ),
    **{
        f"{ZERO}.{optimizer}.{method}": ("ranks reduce in one order", f"(self{takes})")
        for optimizer, method, takes in (
            ("stage_1_and_2.DeepSpeedZeroOptimizer", "reduce_ready_partitions_and_remove_grads", ", param, i"),
            ("stage_1_and_2.DeepSpeedZeroOptimizer", "independent_gradient_partition_epilogue", ""),
            ("stage3.DeepSpeedZeroOptimizer_Stage3", "reduce_ready_partitions_and_remove_grads", ", param"),
            ("stage3.DeepSpeedZeroOptimizer_Stage3", "independent_gradient_partition_epilogue", ""),
        )
    },
    f"{ZERO}.stage_1_and_2.DeepSpeedZeroOptimizer.average_tensor": (
        "a large gradient is kept until it is reduced",
        "(self, tensor, communication_data_type)",
    ),
    f"{ZERO}.stage_1_and_2.DeepSpeedZeroOptimizer.update_lp_params": (
        "masters were written to: 16-bit copies follow",
        "(self)",
    ),
    f"{ZERO}.stage_1_and_2.DeepSpeedZeroOptimizer.zero_grad": (
        "whose gradient was not finite",
        "(self, set_to_none=True)",
    ),
    f"{STAGE_3}.zero_grad": ("whose gradient was not finite", "(self, set_to_none=True)"),
    f"{ZERO}.stage_1_and_2.DeepSpeedZeroOptimizer.scaled_global_norm": (
        "a step in bf16 is judged by its norm",
        "(self, norm_type=2)",
    ),
    "deepspeed.ops.op_builder.builder.OpBuilder.jit_load": ("one rank builds at a time", "(self, verbose=True)"),
    "deepspeed.utils.set_z3_leaf_module": ("a unit is gathered as a whole", "(model, flag)"),
}

# Entry of docs/upstream.md → the names that are not needed any more once it is mended there.
NEEDED_UNTIL = {
    "Every micro-batch asks rank 0 whether there was a SIGTERM": "_broadcast_sigterm_tensor",
    "The SIGTERM handler waits for all ranks": "_signal_connector",
    "A stop within an accumulation window leaves half a step": (
        "_can_stop_early _is_training_done _is_validation_done _should_check_val_fx"
    ),
    "A logged value is the last micro-batch's, under a step that counts from 0": (
        "_LoggerConnector _ResultCollection _batches_that_stepped _forked_name _get_cache"
    ),
    "Steps of every optimizer are counted where a module optimizes by hand": (
        "_ManualOptimization _on_after_step _on_before_step"
    ),
    "`estimated_stepping_batches` loses the position of the data": "_combined_loader_states_to_load _data_fetcher",
    "The position of the data is not restored at the end of an epoch": "_load_combined_loader_states",
    "A checkpoint of an epoch's last batch leaves out the end of the epoch": "_ProcessedTracker",
    "ReduceLROnPlateau is not stepped at the end of a resumed epoch": "_restarting",
    "A stream is read one batch ahead of the step": "_DataFetcher _select_data_fetcher",
    "A mean over an epoch does not outlive a restart": "_Metadata _ResultMetric _Sync _callback_metrics",
    "Predict makes the batch sampler anew": "_data_connector _prepare_dataloader",
    "Hooks are restored before or after `on_fit_start`, by strategy": "_restore_modules_and_callbacks",
    "Every hook is called, whether or not anybody has it": (
        "_build_kwargs _call_callback_hooks _call_strategy_hook _current_fx_name"
    ),
    "ModelParallelStrategy needs `configure_model` and knows two axes": "_device_mesh _setup_distributed",
    "WandbLogger passes an argument that means nothing": "_wandb_init",
    "FSDP2: a parameter that takes no part on one rank stops all of them": "_fsdp_param_group _unsharded_param",
    "FSDP2: a gradient that is taken within a step ends the step": (
        "_fsdp_common _fsdp_param_groups _root_post_backward_final_callback _state_ctx _training_state"
    ),
    "Groups of a mesh have another time limit than the default group": "_set_pg_timeout",
    "DDP cannot start with the buckets that it ends with": "_compute_bucket_assignment_by_size",
    "A loss scaler does not say whether it skipped a step": "_opt_called _per_optimizer_states",
    "The lock of a compiler that was killed is never released": "_get_build_directory",
    "ZeRO-3: no parameters without a dimension": "_broadcast_model",
}

# Attributes of our own that are put on an object of others: the class, which must have none of that name.
PUT_ON_OTHERS = {
    "_callbacks_with": f"{PYTORCH}.Trainer",
    "_draws": f"{PYTORCH}.Trainer",
    "_idle_hooks": f"{PYTORCH}.Trainer",
    "_known_hooks": f"{PYTORCH}.Trainer",
    "_planned_step": f"{PYTORCH}.LightningModule",
}

# Texts that look like a private name and are none.
NO_NAMES = {
    "_max": "how names of values end",
    "_max_rank": "how names of values end",
    "_min": "how names of values end",
    "_min_rank": "how names of values end",
    "_per_second": "how names of values end",
    "_this_process": "how names of values end",
    "_reasons": "within a name of nvidia-smi's",
    "_local": "where Python 3.13 has the classes of pathlib, which a pickle of .metadata names",
}
