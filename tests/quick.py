"""Which tests run when: in `make test` units and one honest run of each strategy and axis, in CI more, then all others.

A plain `pytest`, or one that names folders, runs the quick tier; one that names a file or a test runs all of it, and
`--tier=all` runs everything. tests/unit/test_tiers.py holds that every strategy and every file of tests is in here.
A new list is made from recorded durations: `pytest --junitxml=FILE` writes the CPU seconds of each test.
"""

from __future__ import annotations

UNITS = ("tests/unit", "tests/configs")  # all of them are quick, but for
HEAVY = (  # which take seconds each: CI runs them
    "tests/configs/test_bad_input.py::test_one_line_says_it",
    "tests/configs/test_bad_input.py::test_mistakes_are_told_without_torch",
    "tests/configs/test_conf.py::test_cfg_job_is_yaml_that_loads_back",
    "tests/configs/test_conf.py::test_this_machines_peak_is_that_of_the_cluster_with_its_gpu",
    "tests/configs/test_conf.py::test_an_option_composes_plans_and_binds",
    "tests/unit/test_accelerators.py::test_what_it_cannot_do_is_refused_in_a_sentence",
    "tests/unit/test_activation_checkpointing.py",
    "tests/unit/test_bench_data.py::test_the_data_of_two_ranks_are_read",
    "tests/unit/test_callbacks.py::test_every_callback_of_lightnings_works_or_is_refused_by_name",
    "tests/unit/test_docs.py::test_a_command_of_the_docs_can_be_composed",
    "tests/unit/test_docs.py::test_the_examples_of_own_data_train",
    "tests/unit/test_doctor.py::test_the_cpu_is_measured_and_labelled",
    "tests/unit/test_document_stream.py::test_a_position_is_gone_on_from_to_the_bit",
    "tests/unit/test_float8.py::test_compiled_code_keeps_no_copy_of_a_weight_for_the_backward_pass",
    "tests/unit/test_generate.py",
    "tests/unit/test_images.py::test_it_learns_and_evaluation_counts_every_sample_once",
    "tests/unit/test_imports.py::test_a_plain_run_registers_no_optimizer_layer_metric_or_data_set",
    "tests/unit/test_imports.py::test_no_class_of_ours_has_the_name_of_one_beside_it",
    "tests/unit/test_loaders.py::test_a_loader_goes_on_where_its_state_says",
    "tests/unit/test_loaders.py::test_a_samplers_order_is_dealt_out_over_any_ranks_and_found_again",
    "tests/unit/test_loaders.py::test_a_stream_draws_otherwise_on_every_rank_and_worker",
    "tests/unit/test_loaders.py::test_a_stream_goes_on_where_it_was",
    "tests/unit/test_loaders.py::test_whatever_reads_the_samples_draws_otherwise_on_every_rank",
    "tests/unit/test_order.py::test_every_factorisation_sees_the_same_global_batches",
    "tests/unit/test_parallelize.py",
    "tests/unit/test_plan_loss.py::test_auto_is_the_best_that_can_run",
    "tests/unit/test_prepare.py",
    "tests/unit/test_prepare_bad_input.py",
    "tests/unit/test_private_names.py",
    "tests/unit/test_profiling.py::test_nsys_is_put_before_a_rank",
    "tests/unit/test_race.py",
    "tests/unit/test_trace.py::test_a_recorded_trace_adds_up_and_is_drawn",
    "tests/unit/test_verdicts.py::test_the_run_can_take_each_override_that_a_verdict_names",
)
FOLDER = "tests/distributed"  # of the files below

# Strategy or feature → tests of the quick tier, never a whole file. Without [a case] all cases are meant.
RUNS: dict[str, list[str]] = {
    **{
        strategy: [
            "test_parity.py::test_each_strategy_once_equals_the_plain_loop",
            "test_exact_resume.py::test_a_resumed_run_never_stopped[2]",
        ]
        for strategy in ("ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3")
    },
    "pipeline": [
        "test_pipeline.py::test_two_stages_equal_one_process",
        "test_pipeline.py::test_what_a_pipeline_cannot_run_is_refused[Twice]",
    ],
    "context parallelism": [
        "test_context_parallel.py::test_parts_of_sequences_equal_the_plain_loop_by_heads_and_by_keys"
    ],
    "tensor parallelism": ["test_tensor_parallel.py::test_a_divided_model_equals_the_plain_loop[2]"],
    "two devices, one word": ["test_launch.py::test_two_devices_need_one_word"],
    "fp8": ["test_float8.py::test_replicas_of_shards_equal_it_too"],
    "saving": ["test_saving.py::test_what_is_damaged_is_named_and_passed_over"],
    "guard": ["test_guard.py::test_a_step_that_is_not_finite_changes_nothing[fsdp, adamw fused-gradient]"],
    "metrics": ["test_held_metrics.py::test_each_sample_is_counted_once"],
    "own module": ["test_door.py::test_a_class_method_of_lightnings_other_name_with_loaders_of_its_own"],
}

# What CI runs besides
CI: dict[str, list[str]] = {
    "pipeline": [
        "test_pipeline.py::test_a_run_goes_on_with_another_layout[pipeline-one]",
        "test_pipeline_logs.py::test_what_a_stage_does_not_have_is_refused[Validates]",
    ],
    "torchrun": [
        "test_launch.py::test_torchrun_standalone",
    ],
    "experiments of conf/": [
        "test_experiments.py::test_an_experiment_runs",
    ],
    "loss without all logits": [
        "test_loss.py::test_chunks_train_as_the_plain_loop_does[fsdp-fp64-True]",
    ],
    "packed documents": [
        "test_documents.py::test_documents_are_kept_apart_under_every_strategy",
    ],
    "mixture of corpora": [
        "test_mixture.py::test_a_mixture_goes_on_elsewhere_in_its_order",
    ],
    "what is said": [
        "test_plain_words.py::test_a_mistake_in_mid_training_says_how_to_go_on",
        "test_plain_words.py::test_a_run_that_goes_on_says_of_each_value_of_its_optimizer_whether_it_holds",
    ],
    "images": [
        "test_digits.py::test_digits_are_learned_alike_under_every_strategy",
    ],
    "a new strategy": [
        "test_toy_strategy.py::test_a_file_and_a_row_are_a_strategy_that_trains_like_ddp",
    ],
    "own module": [
        "test_anybodys_module.py::test_every_strategy_equals_the_plain_loop[ConvNet]",
        "test_anybodys_module.py::test_validation_is_the_same_on_one_rank_and_two[ConvNet]",
    ],
    "manual optimization": [
        "test_by_hand.py::test_what_a_module_does_by_hand_equals_the_plain_loop",
    ],
    "scalar parameters": [
        "test_scalars.py::test_every_strategy_trains_them_with_the_same_numbers",
    ],
    "Lightning's hooks": [
        "test_like_lightning.py::test_hooks_come_in_lightnings_order_and_as_often[1]",
    ],
    "numbers of gradients": [
        "test_gradient_hooks.py::test_what_is_read_is_of_whole_tensors[Reads]",
    ],
    "callbacks, early stop": [
        "test_callbacks.py::test_an_early_stop_is_told_and_its_count_survives_a_resume[fsdp]",
    ],
    "attention kernels": [
        "test_attention.py::test_the_kernel_changes_no_number_and_stands_in_the_summary",
    ],
    "context parallelism": [
        "test_context_logs.py::test_a_logged_value_is_that_of_whole_sequences[by keys]",
    ],
    "activation checkpointing": [
        "test_same_run.py::test_switches_change_no_number[activation_checkpointing=full-fsdp]",
        "test_checkpointing.py::test_what_is_computed_again_has_the_same_bits[selective-fsdp]",
    ],
    "compile": [
        "test_same_run.py::test_switches_change_no_number[compile=layer-ddp]",
    ],
    "parallel axes together": [
        "test_parallel_axes.py::test_two_axes_equal_the_plain_loop",
    ],
    "tensor parallelism": [
        "test_divided_runs.py::test_what_is_exported_is_whole_and_another_run_begins_with_it",
        "test_divided_precision.py::test_words_change_no_number[bf16]",
    ],
    "random numbers of ranks that share a batch": [
        "test_draws.py::test_peers_mask_the_same_tokens_and_drop_other_numbers[quick]",
    ],
    "another layout's checkpoint": [
        "test_layouts.py::test_the_run_goes_on_with_another_layout[quick]",
    ],
    "plans of Hugging Face models": [
        "test_hugging_face.py::test_two_ranks_equal_the_plain_loop",
    ],
    "families of Hugging Face models": [
        "test_hugging_face_families.py::test_or_one_message[tensor]",
        "test_hugging_face_families.py::test_the_docs_name_these_families",
    ],
    "sequences of Hugging Face models": [
        "test_hugging_face_context.py::test_two_ranks_equal_the_plain_loop",
    ],
    "compact optimizers, Muon": [
        "test_optimizers.py::test_every_strategy_equals_the_plain_version",
    ],
    "another strategy's checkpoint": [
        "test_across.py::test_the_run_goes_on[zero3-2-to-ddp-1-sgd]",
    ],
    "saving": [
        "test_saving.py",
        "test_crash_points.py::test_from_what_a_crash_leaves_a_run_comes_to_the_same_end",
    ],
    "content of the module's own": [
        "test_own_content.py::test_what_is_put_into_a_checkpoint_is_there_again",
    ],
    "weights of another run, export": [
        "test_initial_weights.py::test_exported_under_one_strategy_and_begun_with_under_another",
    ],
    "average": [
        "test_average.py::test_validation_sees_the_average_of_the_masters_and_training_does_not[fsdp]",
        "test_average.py::test_a_resumed_run_has_the_average_of_an_uninterrupted_one[fsdp]",
    ],
    "average of the module's own": [
        "test_own_average.py::test_an_average_of_the_modules_own_goes_on_as_it_was",
    ],
    "optimizers of a user's": [
        "test_optimizer_state.py::test_a_run_goes_on_with_all_that_an_optimizer_keeps",
    ],
    "samplers": [
        "test_sampler_order.py::test_a_sampler_gives_every_rank_the_same_order",
    ],
    "guard": [
        "test_guard.py::test_too_many_in_a_row_stop_the_run",
    ],
    "guard in a pipeline": [
        "test_pipeline_guard.py::test_a_skipped_step_is_skipped_by_every_stage[gradient-3-pipeline]",
    ],
    "checkpoints of a pipeline": [
        "test_pipeline_checkpoints.py::test_a_resumed_run_never_stopped",
    ],
    "spikes of the loss": [
        "test_guard.py::test_a_leap_is_told_or_passed_over",
    ],
    "fp16's loss scale": [
        "test_loss_scale.py::test_strategies_agree",
    ],
    "fp64": [
        "test_fp64.py::test_weights_and_buffers_are_those_of_lightning[2]",
    ],
    "fp8": [
        "test_divided_float8.py::test_a_rank_computes_torchaos_product_of_its_part",
    ],
    "schedules": [
        "test_schedules.py::test_the_best_and_the_last_are_the_same_files",
    ],
    "learning-rate finder": [
        "test_learning_rate.py::test_its_rates_and_losses_are_lightnings_under_every_strategy",
    ],
    "quick check": [
        "test_quick_check.py::test_a_quick_check_runs_every_stage_and_keeps_nothing",
    ],
    "random numbers for weights": [
        "test_drawn_alike.py::test_copies_of_weights_stay_the_same[fsdp]",
    ],
    "streams": [
        "test_streams.py::test_a_resumed_run_reads_on_where_it_was[state]",
    ],
    "streams of text": [
        "test_document_stream.py::test_a_resumed_run_reads_on_in_the_text",
    ],
    "metrics": [
        "test_rows.py::test_a_step_has_one_row_with_the_modules_values_of_the_whole_window",
        "test_meter.py::test_tokens_are_those_of_all_ranks[fsdp]",
    ],
    "telemetry, Prometheus": [
        "test_telemetry.py::test_a_row_has_mean_and_extremes_with_their_ranks",
    ],
    "verdicts": [
        "test_verdicts.py::test_a_fault_has_its_verdict_and_no_other[slow loader of one rank]",
        "test_verdicts.py::test_a_healthy_run_has_none[healthy]",
        "test_verdicts.py::test_a_verdict_is_in_tensorboard_and_in_wandb_without_a_network",
    ],
    "hooks that look at weights": [
        "test_looking_hooks.py::test_a_hook_sees_the_weights_as_they_are[fsdp]",
    ],
    "hooks that freeze": [
        "test_freezing.py::test_weights_that_are_frozen_for_a_moment_are_trained[before]",
    ],
    "signals": [
        "test_leaving.py::test_a_single_signal_saves_and_leaves[2]",
        "test_leaving.py::test_a_rank_that_does_not_arrive_is_named",
        "test_leaving.py::test_restarts_end_when_they_get_nowhere",
        "test_leaving.py::test_the_second_ctrl_c_does_not_wait_and_sigquit_shows_where_everybody_is",
    ],
    "out of memory": [
        "test_out_of_memory.py::test_a_single_rank_within_the_launchers_process[training-training, in step 2]",
    ],
    "the engines' knobs": [
        "test_engine_knobs.py::test_a_run_goes_on_with_other_sub_groups",
    ],
    "profile": [
        "test_profile.py::test_a_profile_changes_no_bit_and_names_every_phase",
    ],
    "preflight": [
        "test_preflight.py::test_nodes_that_are_well",
        "test_preflight.py::test_alone_it_starts_its_own_processes",
    ],
    "processes": [
        "test_launch.py::test_nothing_outlives_the_launcher",
        "test_launch.py::test_the_ranks_of_a_restart_have_stood_by",
        "test_launch.py::test_each_job_of_a_sweep_says_once_what_went_wrong",
        "test_launch.py::test_of_two_runs_that_want_one_name_the_first_has_it",
    ],
    "resume": [
        "test_resume.py::test_a_killed_run_goes_on_from_its_last_whole_checkpoint",
        "test_resume.py::test_a_checkpoint_of_another_model_is_refused_in_one_message",
        "test_resume.py::test_checkpoints_hold_no_code",
    ],
    "Slurm": [
        "tests/slurm/test_slurm.py::test_a_job_comes_back_and_is_the_run_that_nobody_touched",
        "tests/slurm/test_slurm.py::test_the_readmes_line_and_what_reaches_the_plan",
        "tests/slurm/test_slurm.py::test_what_cannot_work_never_queues",
        "tests/slurm/test_slurm.py::test_overrides_arrive_unchanged_and_are_never_run",
        "tests/slurm/test_slurm.py::test_a_users_mistake_is_not_requeued",
        "tests/slurm/test_slurm.py::test_srun_alone_starts_ranks",
    ],
    "foreign packages": [
        "tests/foreign_packages/test_foreign_packages.py::test_its_losses_are_those_of_the_stock_trainer[torch-geometric]",
        "tests/foreign_packages/test_foreign_packages.py::test_it_goes_on_from_a_checkpoint_as_if_never_stopped[torch-geometric]",
    ],
}

# Files that CI runs no test of, and why
LEFT_OUT = {
    "tests/distributed/test_parts_of_shards.py": "a minute and a half; test_gradient_hooks is in",
    "tests/distributed/test_kept_references.py": "half a minute; test_own_average is in",
    "tests/distributed/test_weights_in_steps.py": "two minutes; test_looking_hooks is in",
    "tests/distributed/test_notes.py": "half a minute of runs for one case each; test_anybodys_module is in",
    "tests/distributed/test_copies.py": "half a minute; test_parity is in",
    "tests/distributed/test_overlap.py": "half a minute of compiling; test_tensor_parallel is in",
    "tests/distributed/test_samples.py": "half a minute; tests/unit/test_generate.py is in",
    "tests/distributed/test_backward.py": "half a minute; test_by_hand is in",
    "tests/distributed/test_host_memory.py": "half a minute of large models; test_initial_weights is in",
    "tests/distributed/test_divided_stages.py": "half a minute; others validate within fit",
    "tests/distributed/test_divided_meter.py": "half a minute; test_meter is in",
    "tests/distributed/test_padding.py": "half a minute; tests/unit/test_padding.py is in",
    "tests/distributed/test_own_ways_of_layers.py": "half a minute; tests/unit/test_divided_layer_checks.py is in",
    "tests/distributed/test_pipeline_hang.py": "half a minute of standing still; test_leaving is in",
    "tests/distributed/test_loss_scale_axes.py": "half a minute; test_loss_scale is in",
    "tests/distributed/test_chaos.py": "two minutes a case; a signal and a failed save are in",
}

LONG_UNITS = {
    "tests/unit/test_upstream.py::test_the_symptom_is_still_there": "minutes of programs, for the day of a new version",
    "tests/unit/test_activation_checkpointing.py::test_a_compiled_layer_computes_again_only_what_a_gradient_needs":
        "two minutes of compiling",
}  # fmt: skip


def tier_of(test: str) -> str:
    """quick, rest (what CI runs besides) or long."""
    if test.startswith(tuple(f"{folder}/" for folder in UNITS)):
        if any(names(one, test) for one in LONG_UNITS):
            return "long"
        return "rest" if any(names(one, test) for one in HEAVY) else "quick"
    if any(names(one, test) for one in listed(RUNS)):
        return "quick"
    return "rest" if any(names(one, test) for one in listed(CI)) else "long"


def listed(*tables: dict[str, list[str]]) -> list[str]:
    """The tests of these tables, of all where none is given."""
    found = [test for table in tables or (RUNS, CI) for tests in table.values() for test in tests]
    return [test if "/" in test else f"{FOLDER}/{test}" for test in found]


def names(one: str, test: str) -> bool:
    """Whether a line of a list means this test: itself, or the file or function that it belongs to."""
    return test == one or test.startswith((f"{one}::", f"{one}["))
