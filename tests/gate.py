"""The slow tests that `./scripts/run_tests.sh` leaves to continuous integration.

Names are those of files, functions and single cases. The gate runs every test that takes less than
about 1.5 seconds, and of the slow ones those in `KEPT`. Continuous integration runs all of them
(`-m "not long"`).
"""

from __future__ import annotations

SLOW: tuple[str, ...] = (
    "tests/base/test_device.py::test_memory_peak_sees_an_allocation",
    "tests/base/test_log.py::test_handlers_that_libraries_installed_are_silenced_unless_torch_logs_asks",
    "tests/checkpoint/test_first_house.py::test_two_ranks_start_from_the_weights_of_one",
    "tests/checkpoint/test_lock.py::test_a_folder_has_one_holder_until_that_one_is_killed",
    "tests/checkpoint/test_lock.py::test_a_second_run_is_refused_on_all_ranks_before_it_writes",
    "tests/checkpoint/test_manager.py",
    "tests/checkpoint/test_objects.py::test_a_server_of_s3",
    "tests/checkpoint/test_remote.py",
    "tests/checkpoint/test_stored.py::test_damage_is_refused_or_read_as_torch_reads_it",
    "tests/config/test_main.py::test_mistakes_in_settings_are_told_without_torch_and_the_command_exits_by_code",
    "tests/data/test_dataset.py::test_built_in_data",
    "tests/data/test_formats.py::test_memory_is_bounded",
    "tests/data/test_loader.py::test_a_loader_that_is_not_closed_does_not_keep_its_process",
    "tests/data/test_loader.py::test_workers_end_when_their_trainer_is_killed",
    "tests/data/test_prepare.py::test_processes_build_once_and_wait",
    "tests/data/test_prepare_files.py::test_processes_end_with_their_parent",
    "tests/data/test_tokenizer.py::test_long_text_is_not_cut_for_what_begins_each_text",
    "tests/data/test_urls.py::test_ranks_train_on_a_bucket_as_on_files",
    "tests/distributed/test_activation.py::test_no_bit_changes_and_only_so_much_is_repeated",
    "tests/distributed/test_balance.py",
    "tests/distributed/test_compile.py",
    "tests/distributed/test_context_layouts.py",
    "tests/distributed/test_document_layouts.py::test_as_if_each_document_were_alone",
    "tests/distributed/test_elastic.py",
    "tests/distributed/test_epochs.py",
    "tests/distributed/test_expert_traffic.py::test_rows_travel_as_often_as_said",
    "tests/distributed/test_experts.py",
    "tests/distributed/test_faults.py",
    "tests/distributed/test_generate.py::test_text_of_low_rank_factors_is_that_of_the_merged_export",
    "tests/distributed/test_hf.py",
    "tests/distributed/test_hf_sizes.py::test_a_run_goes_on_bit_for_bit_where_the_folder_is_gone",
    "tests/distributed/test_hf_sizes.py::test_no_step_changes_nothing",
    "tests/distributed/test_intentions.py::test_continue_takes_all_and_plans_the_rate_anew",
    "tests/distributed/test_intentions.py::test_the_batch_that_ranks_make_is_compared",
    "tests/distributed/test_intentions.py::test_the_last_checkpoint_is_full_and_a_finished_run_goes_on",
    "tests/distributed/test_intentions.py::test_what_was_left_out_once_is_not_left_out_of_what_was_trained_since",
    "tests/distributed/test_interchange.py",
    "tests/distributed/test_matrix.py::test_families_optimizers_and_examples",
    "tests/distributed/test_matrix.py::test_the_same_model",
    "tests/distributed/test_own_family.py::test_compiled_blocks_of_two_classes_train_to_the_same_losses",
    "tests/distributed/test_own_family.py::test_it_trains_to_the_same_losses",
    "tests/distributed/test_own_things.py",
    "tests/distributed/test_parts.py",
    "tests/distributed/test_pipeline.py",
    "tests/distributed/test_resharding.py",
    "tests/distributed/test_resume.py",
    "tests/distributed/test_tensor_layouts.py",
    "tests/distributed/test_validation.py",
    "tests/distributed/test_vocabulary.py",
    "tests/finetune/test_export.py::test_a_run_from_a_folder_to_a_folder",
    "tests/finetune/test_export.py::test_weights_of_a_checkpoint_without_factors",
    "tests/finetune/test_new_rows.py",
    "tests/generate/test_sampling.py::test_draws_follow_the_models_distribution",
    "tests/mesh/test_alike.py::test_a_job_ends_in_code_2",
    "tests/mesh/test_faults.py::test_a_rank_stopped_within_a_save_is_found_and_a_slow_one_is_not",
    "tests/mesh/test_faults.py::test_gloo_says_that_it_timed_out_as_expected",
    "tests/metrics/test_sinks.py::test_wandb_works_offline",
    "tests/metrics/test_stragglers.py::test_a_slowed_rank_is_named",
    "tests/metrics/test_terminal.py::test_bar_stays_below_whole_log_lines",
    "tests/metrics/test_terminal.py::test_lines_of_other_picked_ranks_do_not_run_into_the_bar",
    "tests/metrics/test_trace.py::test_a_profiled_run_trains_the_same",
    "tests/models/test_init.py::test_no_stretch_of_one_parameter_appears_in_another",
    "tests/optim/test_optimizer.py::test_torchs_optimizers_update_shards_as_whole_parameters",
    "tests/optim/test_spikes.py::test_a_resumed_run_goes_by_the_same_figures",
    "tests/optim/test_spikes.py::test_a_step_that_is_left_out_changes_nothing",
    "tests/parallel/test_compile.py",
    "tests/parallel/test_context.py::test_no_tensor_of_a_step_grows_with_the_square",
    "tests/parallel/test_tensor.py::test_costs_are_those_of_the_documentation",
    "tests/scripts/test_set_up.py::test_a_python_without_packages_is_left_alone",
    "tests/test_average.py",
    "tests/test_cluster.py::test_the_models_of_kubeflow",
    "tests/test_docs.py::test_commands_run",
    "tests/test_goldens.py::test_this_code_computes_what_was_recorded[others]",
    "tests/test_imports.py::test_a_plain_run_imports_what_it_uses",
    "tests/test_python.py::test_a_failure_is_raised_and_noted",
    "tests/test_python.py::test_a_model_of_ones_own_and_one_with_adapters",
    "tests/test_python.py::test_a_run_is_that_of_the_command_line",
    "tests/test_python.py::test_callbacks_follow_a_run",
    "tests/test_python.py::test_ctrl_c_before_the_first_step_leaves_nothing_behind",
    "tests/test_python.py::test_it_resumes_and_validates",
    "tests/test_python.py::test_the_page_is_run",
    "tests/test_signals.py",
    "tests/test_train.py::test_a_finished_run_says_that_there_is_nothing_to_train",
    "tests/test_train.py::test_a_loss_that_is_not_finite_ends_in_code_3",
    "tests/test_train.py::test_a_mistake_that_every_rank_meets_is_said_once",
    "tests/test_train.py::test_a_pipeline_shows_its_loss_on_every_rank_wherever_the_last_stage_is",
    "tests/test_train.py::test_one_process_without_a_launcher",
    "tests/test_train.py::test_own_code_does_not_end_a_run_as_if_it_were_done",
    "tests/test_train.py::test_ranks_without_a_launcher_end_with_one_code",
    "tests/test_train.py::test_run_train_uses_the_given_file_and_ranks",
    "tests/test_train.py::test_two_ranks_show_the_picked_one_and_log_both",
    "tests/test_trust.py::test_a_run_goes_on_without_the_code_that_it_named",
    "tests/test_two_runs.py::test_a_run_folder_that_somebody_has_edited_ends_in_code_2",
    "tests/test_two_runs.py::test_runs_follow_one_another_also_after_one_that_failed",
    "tests/tools/audit/test_explain.py::test_the_steps_of_each_document_are_those_that_have_it",
    "tests/tools/check/test_check.py::test_a_folder_that_is_not_shared",
    "tests/tools/check/test_check.py::test_a_slow_group_is_told_from_the_others",
    "tests/tools/evaluate/test_main.py::test_the_report_holds_figures_and_settings",
    "tests/tools/compare/test_compare_layouts.py::test_layouts_that_fail_are_reported_and_the_others_run",
    "tests/tools/plan/test_account.py::test_context_parallel_ranks_share_the_products_of_attention",
    "tests/tools/plan/test_account.py::test_products_of_experts",
    "tests/tools/plan/test_explain.py",
    "tests/tools/plan/test_layout.py::test_formulas_are_near_the_rehearsal",
    "tests/tools/plan/test_main.py::test_pictures",
    "tests/tools/plan/test_norms.py::test_norms_of_heads",
    "tests/tools/plan/test_passes.py::test_the_update",
    "tests/tools/plan/test_staged.py::test_the_command",
    "tests/tools/plan/test_step.py",
    "tests/tools/plan/test_traffic.py",
    "tests/tools/plan/test_tried.py",
    "tests/tools/plan/test_unroll.py",
    "tests/tools/plan/test_validation.py",
    "tests/tools/report/test_report.py::test_100_000_rows_stay_small",
    "tests/tools/test_convert.py::test_a_tokenizer_that_is_gone_can_be_named",
    "tests/tools/test_generate.py::test_an_earlier_step_and_a_copied_one_can_be_named",
    "tests/tools/test_generate.py::test_the_wavelengths_are_those_of_the_training",
    "tests/tools/test_prepare_and_tokenizer.py::test_a_prepared_store_is_the_same_data_as_its_files",
)
"""Tests of more than 1.5 seconds on one quiet core, which continuous integration runs."""
KEPT: tuple[str, ...] = (
    "tests/checkpoint/test_manager.py::test_cadence_and_retention",
    "tests/checkpoint/test_remote.py::test_a_run_resumes_from_the_store_alone[True-disabled]",
    "tests/distributed/test_document_layouts.py::test_as_if_each_document_were_alone[pp 2]",
    "tests/distributed/test_experts.py::test_recomputation_chooses_the_same_experts",
    "tests/distributed/test_hf.py::test_every_layout_begins_with_these_weights_and_each_rank_reads_its_own_alone[fsdp 3]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_families_optimizers_and_examples[cp 2 ulysses; experts, documents; ]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_families_optimizers_and_examples[ep 2 x tp 2, stream copied; experts, odd tokens; ]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_families_optimizers_and_examples[ep 2; experts; by operator]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_families_optimizers_and_examples[ep 4; experts; offloaded]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_families_optimizers_and_examples[one device; DeepSeek; recomputed, accumulating]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_families_optimizers_and_examples[one device; balanced, padding; recomputed, accumulating]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_families_optimizers_and_examples[pp 2 ZBV; experts in four layers; ]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_families_optimizers_and_examples[pp 2; Muon; ]",
    "tests/distributed/test_matrix.py::test_families_optimizers_and_examples[tp 2; experts; ]",
    "tests/distributed/test_matrix.py::test_the_same_model[one device; all; recomputed, accumulating, offloaded]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_the_same_model[fsdp 2; adapter; recomputed, offloaded]",
    "tests/distributed/test_matrix.py::test_the_same_model[fsdp 2; few; by operator, kept]",
    "tests/distributed/test_matrix.py::test_the_same_model[ddp 2; documents; half recomputed, accumulating, chunks]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_the_same_model[tp 2; documents; kept]",
    "tests/distributed/test_matrix.py::test_the_same_model[tp 2, logits gathered; tied; half recomputed, offloaded]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_the_same_model[fsdp 2 x tp 2; few; recomputed, offloaded, chunks]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_the_same_model[pp 2; few; half recomputed, accumulating]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_the_same_model[pp 2; tied; kept]",
    "tests/distributed/test_matrix.py::test_the_same_model[pp 2; all but a tied embedding; by operator, chunks]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_the_same_model[pp 2 ZBV; documents; offloaded]",
    "tests/distributed/test_matrix.py::test_the_same_model[pp 2 ZBV; few; accumulating]",
    "tests/distributed/test_matrix.py::test_the_same_model[pp 2 Interleaved x fsdp 2; adapter; half recomputed, kept, chunks]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_the_same_model[cp 2 allgather; adapter; chunks]",
    "tests/distributed/test_matrix.py::test_the_same_model[cp 2 allgather balanced; documents; recomputed]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_the_same_model[cp 2 ring; few; recomputed, accumulating]",  # noqa: E501
    "tests/distributed/test_matrix.py::test_the_same_model[cp 2 ulysses; documents; by operator]",
    "tests/distributed/test_matrix.py::test_the_same_model[cp 4 ulysses; all but a tied embedding; accumulating, kept]",  # noqa: E501
    "tests/distributed/test_pipeline.py::test_the_same_model[2 microbatches]",
    "tests/distributed/test_resharding.py::test_a_checkpoint_loads_into_other_layouts[tiny-one device-targets0]",  # noqa: E501
    "tests/distributed/test_resume.py::test_four_steps_equal_two_and_two[one process]",
    "tests/distributed/test_tensor_layouts.py::test_every_parameters_gradient[tp 2-llama3-sizes0]",
    "tests/distributed/test_validation.py::test_the_same_figure_in_any_layout[pp 2 1F1B x fsdp 2]",
    "tests/test_signals.py::test_one_process_saves_and_the_next_start_goes_on",
)
"""Cases of `SLOW` that the gate runs all the same."""
