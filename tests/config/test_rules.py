"""Rules across keys: each broken one, its message, and what lies just inside."""

from __future__ import annotations

import logging

import pytest

from tests.config.jobs import Jobs

PIPELINE = "[parallelism]\npipeline_parallel_degree = 2\n"
NEEDED = "factor = 4.0\noriginal_max_position = 8192\n"
YARN = "beta_fast, beta_slow, attention_factor"
FILES = '[training]\ndataset = "files"\n'
EXAMPLES = '[training]\ndataset = "examples"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (
                f'[job]\nsave_config_file = "{path}"',
                f'[job] save_config_file = "{path}": must be a file inside dump_folder, got '
                f'"{path}"; write a name alone, as "job.toml"',
            )
            for path in ("/etc/passwd", "../job.toml", "a/../../job.toml", "..", ".", "a/..")
        ),
        *(
            (
                f'[checkpoint]\nfolder = "{path}"',
                f'[checkpoint] folder = "{path}": must be a folder inside dump_folder, got '
                f'"{path}"; write a name alone, as "checkpoint", and choose the place by '
                f"job.dump_folder",
            )
            for path in ("/shared", "../shared", "a/../..")
        ),
        (
            "[profiling]\nprofile_freq = 3\nenable_profiling = true",
            "[profiling] profile_freq = 3: must be at least profiler_warmup + profiler_active "
            "(3 + 1), got 3; try 4",
        ),
        (
            '[training]\ndataset = "files"',
            '[training] dataset = "files": needs dataset_path, the files to read',
        ),
        (
            '[training]\ndataset_path = "x"',
            '[training] dataset_path = "x": is read only with dataset = "files" or "examples", '
            'got "python_stdlib"; change or remove',
        ),
        (
            '[training]\ndataset = "examples"',
            '[training] dataset = "examples": needs dataset_path, the files to read',
        ),
        (
            '[training]\ndataset = "examples"\ndataset_path = "x"\ndataset_weights = [1.0]',
            '[training] dataset_weights = [1.0]: is for dataset = "files"; examples are one '
            "source, in which each comes once an epoch",
        ),
        *(
            (
                f"[training]\n{line}",
                f"[training] {line}: is read only with dataset = "
                '"examples" or "synthetic_examples", got "python_stdlib"; change or remove',
            )
            for line in ('chat_template = "x"', 'packing = "packed"', 'long_examples = "skip"')
        ),
        (
            EXAMPLES + 'dataset_path = "x"\npacking = "packed"',
            '[training] packing = "packed": needs document_attention = "within", which keeps the '
            "examples of a sample apart",
        ),
        (
            FILES + 'dataset_path = ["a", "b"]\ndataset_weights = [1.0]',
            "[training] dataset_weights = [1.0]: must hold one weight for each dataset_path, "
            "got 1 for 2",
        ),
        (
            "[training]\ndataset_weights = [1.0]",
            "[training] dataset_weights = [1.0]: must hold one weight for each dataset_path, "
            "got 1 for 0",
        ),
        (
            "[training]\nglobal_batch_size = 20\nlocal_batch_size = 8",
            "[training] global_batch_size = 20: must be -1 or a positive multiple of "
            "local_batch_size (8), got 20; try 16",
        ),
        (
            "[training]\nglobal_batch_size = 0\nlocal_batch_size = 8",
            "[training] global_batch_size = 0: must be -1 or a positive multiple of "
            "local_batch_size (8), got 0; try 8",
        ),
        (
            "[training]\nglobal_batch_size = -8\nlocal_batch_size = 8",
            "[training] global_batch_size = -8: must be -1 or a positive multiple of "
            "local_batch_size (8), got -8; try 8",
        ),
        (
            f"{PIPELINE}pipeline_parallel_microbatch_size = 3",
            "[parallelism] pipeline_parallel_microbatch_size = 3: must divide local_batch_size "
            "(8), got 3; try local_batch_size = 6, or set num_microbatches",
        ),
        (
            f"{PIPELINE}pipeline_parallel_num_microbatches = 3",
            "[parallelism] pipeline_parallel_num_microbatches = 3: must divide local_batch_size "
            "(8), got 3; try 1, 2, 4, 8",
        ),
        (
            f"{PIPELINE}pipeline_parallel_num_microbatches = 2\n"
            "pipeline_parallel_microbatch_size = 2",
            "[parallelism] pipeline_parallel_num_microbatches = 2: is another way to say "
            "microbatch_size, but both are given: 2 microbatches of local_batch_size 8, and "
            "microbatch_size 2; remove one of them",
        ),
        (
            f'{PIPELINE}module_fqns_per_model_part = [["norm"]]\n'
            "pipeline_parallel_layers_per_stage = 2",
            '[parallelism] module_fqns_per_model_part = [["norm"]]: lists the stages, but '
            "layers_per_stage = 2 asks for others; remove one",
        ),
        (
            "[training.dataloader]\npersistent_workers = true",
            "[training.dataloader] persistent_workers = true: needs worker processes, got "
            "num_workers = 0; raise num_workers or remove this",
        ),
        (
            "[training.dataloader]\nprefetch_factor = 2",
            "[training.dataloader] prefetch_factor = 2: needs worker processes, got "
            "num_workers = 0; raise num_workers or remove this",
        ),
        (
            '[model.rope_scaling]\ntype = "linear"',
            '[model.rope_scaling] type = "linear": needs factor; it reads factor',
        ),
        (
            '[model.rope_scaling]\ntype = "yarn"\nfactor = 4.0',
            '[model.rope_scaling] type = "yarn": needs original_max_position; it reads factor, '
            "original_max_position, beta_fast, beta_slow, attention_factor",
        ),
        (
            "[model.rope_scaling]\nfactor = 4.0",
            '[model.rope_scaling] factor = 4.0: is not read by type = "flavor", which reads '
            'nothing else; remove it, or write type = "linear" or "llama3" or "yarn"',
        ),
        (
            '[model.rope_scaling]\ntype = "linear"\nfactor = 4.0\noriginal_max_position = 8192',
            '[model.rope_scaling] original_max_position = 8192: is not read by type = "linear", '
            'which reads factor; remove it, or write type = "llama3" or "yarn"',
        ),
        *(
            (
                f'[model.rope_scaling]\ntype = "{kind}"\n{NEEDED}{line}',
                f'[model.rope_scaling] {line}: is not read by type = "{kind}", which reads '
                f'factor, original_max_position, {others}; remove it, or write type = "{right}"',
            )
            for kind, line, others, right in (
                ("llama3", "beta_slow = 2.0", "low_freq_factor, high_freq_factor", "yarn"),
                ("yarn", "low_freq_factor = 2.0", YARN, "llama3"),
            )
        ),
        (
            "[optimizer]\nmomentum = 0.9",
            '[optimizer] momentum = 0.9: is read by SGD alone, got name = "AdamW"; '
            "use beta1 or remove this",
        ),
        (
            "[lr_scheduler]\ntotal_steps = 99\n[training]\nsteps = 100",
            "[lr_scheduler] total_steps = 99: must be at least training.steps (100), got 99: "
            "the learning rate would be 0 from there on; raise it, or set min_lr_factor",
        ),
        (
            '[parallelism]\nfsdp_reshard_after_forward = "alway"',
            '[parallelism] fsdp_reshard_after_forward = "alway": must be "default", "always", '
            '"never" or a number of ranks, got "alway"; did you mean \'always\'?',
        ),
        (
            '[parallelism]\nfsdp_reshard_after_forward = "-2"',
            '[parallelism] fsdp_reshard_after_forward = "-2": must be "default", "always", '
            '"never" or a number of ranks, got "-2"',
        ),
        (
            "[parallelism]\ndata_parallel_shard_degree = 0",
            "[parallelism] data_parallel_shard_degree = 0: must be -1 (all ranks left over) or "
            "at least 1, got 0",
        ),
        (
            "[checkpoint]\nload_step = -2\nenable = true",
            "[checkpoint] load_step = -2: must be -1 (the newest) or a step, got -2",
        ),
        (
            "[checkpoint]\nload_step = 5",
            "[checkpoint] load_step = 5: needs checkpoint.enable = true",
        ),
        *(
            (
                f"[checkpoint]\n{line}",
                f"[checkpoint] {line}: needs checkpoint.enable = true",
            )
            for line in (
                'mode = "continue"',
                'initial_load_path = "x"',
            )
        ),
        (
            '[checkpoint]\nenable = true\nmode = "finetune"',
            '[checkpoint] mode = "finetune": needs initial_load_path, whose weights it starts from',
        ),
        (
            '[checkpoint]\nenable = true\nmode = "finetune"\ninitial_load_path = "x"\n'
            "initial_load_model_only = false",
            '[checkpoint] mode = "finetune": takes the weights alone, but initial_load_model_only '
            'is false; remove that, or write mode = "continue" to take the optimizer and the data '
            "position too",
        ),
        (
            '[checkpoint]\nenable = true\nmode = "continue"\ninitial_load_path = "x"',
            '[checkpoint] mode = "continue": takes optimizer and data position too, but '
            'initial_load_model_only is true; set it false, or write mode = "finetune" for the '
            "weights alone",
        ),
        *(
            (
                f'[checkpoint]\nexclude_from_loading = ["dataloader"]\nenable = true{more}',
                '[checkpoint] exclude_from_loading = ["dataloader"]: leaves something out, but '
                'mode = "recover" loads everything; write mode = "continue", or mode = "finetune" '
                "with an initial_load_path",
            )
            for more in ("", '\ninitial_load_path = "x"\ninitial_load_model_only = false')
        ),
        (
            '[checkpoint]\nexclude_from_loading = ["model"]\nenable = true\nmode = "finetune"\n'
            'initial_load_path = "x"',
            '[checkpoint] exclude_from_loading = ["model"]: leaves nothing to load with "model" in '
            "it; remove it, or initial_load_path",
        ),
        (
            "[checkpoint]\nsave_before_seconds = 60",
            "[checkpoint] save_before_seconds = 60: needs checkpoint.enable = true; there is "
            "nothing to save to without",
        ),
        (
            '[checkpoint]\nenable = true\ninitial_load_rope = "halves"',
            '[checkpoint] initial_load_rope = "halves": needs initial_load_path, whose rows it '
            "tells the order of",
        ),
        (
            '[checkpoint]\nenable = true\ninitial_load_rope = "halves"\ninitial_load_in_hf = true\n'
            'initial_load_path = "x"',
            '[checkpoint] initial_load_rope = "halves": is for weights by this library\'s names; '
            "the order of a folder of Hugging Face is known; remove this",
        ),
        (
            "[checkpoint]\nenable = true\ninitial_load_in_hf = true",
            "[checkpoint] initial_load_in_hf = true: needs initial_load_path, the folder to read "
            "(torchtitan 0.2 took hf_assets_path)",
        ),
        (
            '[checkpoint]\nenable = true\ninitial_load_in_hf = true\ninitial_load_path = "x"\n'
            "initial_load_model_only = false",
            "[checkpoint] initial_load_in_hf = true: finds weights alone there, but "
            "initial_load_model_only is false; remove that",
        ),
        (
            '[checkpoint]\nenable = true\nlast_save_model_only = true\nexport_dtype = "bfloat16"',
            '[checkpoint] export_dtype = "bfloat16": is the type of what last_save_in_hf writes, '
            'which is off, got "bfloat16"; the other checkpoints keep training.dtype; set '
            "last_save_in_hf, or remove this",
        ),
        (
            "[lr_scheduler]\nwarmup_steps = 10\nwarmup_ratio = 0.1",
            "[lr_scheduler] warmup_ratio = 0.1: is another way to say warmup_steps, which is 10; "
            "remove one",
        ),
        *(
            (
                f'[activation_checkpoint]\nselective_ac_option = "{option}"',
                f'[activation_checkpoint] selective_ac_option = "{option}": must be "op" or a '
                f'positive integer in quotes, as "2" for every second block, got "{option}"',
            )
            for option in ("0", "ops", "-1", "1.5", "two", "", "²", "٣")
        ),
        (
            '[activation_checkpoint]\nselective_ac_option = "op"\n[compile]\nenable = true',
            '[activation_checkpoint] selective_ac_option = "op": chooses operators one by one, and '
            'a compiled block is one operator; write "2" for every second block, or '
            "compile.enable = false",
        ),
        (
            '[activation_checkpoint]\nmode = "memory_budget"',
            '[activation_checkpoint] mode = "memory_budget": needs compile.enable = true, for it '
            "is the compiler that chooses what to recompute; without it write full or selective",
        ),
        (
            '[activation_checkpoint]\nmode = "memory_budget"\n[compile]\nenable = true\n'
            'backend = "aot_eager"',
            '[activation_checkpoint] mode = "memory_budget": needs compile.backend = "inductor", '
            'got "aot_eager", which recomputes nothing; or write full or selective',
        ),
        (
            '[activation_checkpoint]\nmode = "memory_budget"\n[compile]\nenable = true\n'
            "[parallelism]\ntensor_parallel_degree = 2",
            '[activation_checkpoint] mode = "memory_budget": is not known to the compiler under '
            "tensor parallelism; write full or selective",
        ),
        (
            "[training]\nseq_len = 100\n[parallelism]\ncontext_parallel_degree = 3",
            "[training] seq_len = 100: seq_len must be a multiple of 6 (context_parallel_degree 3 "
            "x 2 chunks a rank under headtail), got 100; try 96",
        ),
        (
            '[parallelism]\ncontext_parallel_degree = 3\ncontext_parallel_load_balancer = "none"',
            "[parallelism] context_parallel_degree = 3: seq_len must be a multiple of 3 "
            "(context_parallel_degree 3), got 2048; try 2046",
        ),
        (
            "[training]\nseq_len = 4\n[parallelism]\ncontext_parallel_degree = 2\n"
            "tensor_parallel_degree = 2",
            "[training] seq_len = 4: seq_len must be a multiple of 8 (context_parallel_degree 2 x "
            "2 chunks a rank under headtail x tensor_parallel_degree 2 under sequence "
            "parallelism), got 4; try 8",
        ),
        (
            "[training]\nseq_len = 24\n[parallelism]\ncontext_parallel_degree = 2\n"
            'context_parallel_load_balancer = "balanced"',
            "[training] seq_len = 24: seq_len must be a multiple of 16 (context_parallel_degree 2 "
            "x 8 chunks a rank under balanced), got 24; try 16",
        ),
        (
            "[parallelism]\ncontext_parallel_degree = 2\n"
            'context_parallel_load_balancer = "balanced"\n'
            'context_parallel_rotate_method = "ulysses"',
            '[parallelism] context_parallel_load_balancer = "balanced": is for "ring" and '
            '"allgather": under "ulysses" every rank attends over the whole sequence with its own '
            'heads, so all work alike; write "headtail" or "none"',
        ),
    ],
)
def test_a_broken_rule(jobs: Jobs, text: str, message: str) -> None:
    assert jobs.mistakes(text) == [f"job.toml: {message}"]


@pytest.mark.parametrize(
    "text",
    [
        '[job]\nsave_config_file = "a/../configs/job.toml"',
        FILES + 'dataset_path = ["a", "b"]\ndataset_weights = [1.0, 2.0]',
        FILES + 'dataset_path = ["a", "b"]',
        EXAMPLES + 'dataset_path = "a"\nlong_examples = "skip"\nchat_template = "x"',
        "[training]\nglobal_batch_size = 16\nlocal_batch_size = 8",
        "[training]\nglobal_batch_size = -1\nlocal_batch_size = 7",
        "[training.dataloader]\nprefetch_factor = 2\npersistent_workers = true\nnum_workers = 1",
        '[model.rope_scaling]\ntype = "none"',
        '[model.rope_scaling]\ntype = "linear"\nfactor = 1.0',
        f'[model.rope_scaling]\ntype = "llama3"\nhigh_freq_factor = 8.0\n{NEEDED}',
        f'[model.rope_scaling]\ntype = "yarn"\nattention_factor = 1.0\nbeta_fast = 9.0\n{NEEDED}',
        '[optimizer]\nmomentum = 0.9\nname = "SGD"',
        "[lr_scheduler]\ntotal_steps = 100\n[training]\nsteps = 100",
        "[lr_scheduler]\ntotal_steps = 99\nmin_lr_factor = 0.1\n[training]\nsteps = 100",
        "[lr_scheduler]\ntotal_steps = 99\ndecay_ratio = 0.0\n[training]\nsteps = 100",
        "[lr_scheduler]\nwarmup_steps = 1000\n[training]\nsteps = 100",
        "[lr_scheduler]\nwarmup_steps = 90\ndecay_ratio = 0.8\n[training]\nsteps = 100",
        "[parallelism]\ndata_parallel_shard_degree = 1",
        "[parallelism]\nfsdp_reshard_after_forward = 8",
        '[parallelism]\nfsdp_reshard_after_forward = "8"\ncontext_parallel_degree = 2',
        "[checkpoint]\nload_step = 0\nenable = true",
        "[debug]\ndeterministic_warn_only = true\ndeterministic = true",
        '[checkpoint]\nenable = true\nmode = "continue"\nexclude_from_loading = ["dataloader"]',
        '[checkpoint]\nenable = true\ninitial_load_path = "x"\nexclude_from_loading = "output.*"',
        '[checkpoint]\nenable = true\ninitial_load_path = "x"\ninitial_load_model_only = false',
        '[checkpoint]\nenable = true\nmode = "finetune"\ninitial_load_path = "x"',
        '[checkpoint]\nenable = true\ninitial_load_path = "x"\ninitial_load_in_hf = true\n'
        'mode = "finetune"',
        '[checkpoint]\nenable = true\nlast_save_in_hf = true\nexport_dtype = "float16"',
        '[activation_checkpoint]\nselective_ac_option = "1"',
        '[activation_checkpoint]\nmode = "memory_budget"\n[compile]\nenable = true',
        '[activation_checkpoint]\nmode = "memory_budget"\nmemory_budget = 0.4\n[compile]\n'
        "enable = true",
        '[activation_checkpoint]\nmode = "full"\nmemory_budget = 0.5',
        '[activation_checkpoint]\nselective_ac_option = "op"',
        '[activation_checkpoint]\nselective_ac_option = "op"\nmode = "full"\n[compile]\n'
        "enable = true",
        f"{PIPELINE}pipeline_parallel_microbatch_size = 4",
        f"{PIPELINE}pipeline_parallel_num_microbatches = 2",
        f"{PIPELINE}pipeline_parallel_num_microbatches = 2\npipeline_parallel_microbatch_size = 4",
        "[parallelism]\npipeline_parallel_microbatch_size = 3",
        "[training]\nseq_len = 12\n[parallelism]\ncontext_parallel_degree = 3",
        "[training]\nseq_len = 9\n[parallelism]\ncontext_parallel_degree = 3\n"
        'context_parallel_load_balancer = "none"',
        "[training]\nseq_len = 4\n[parallelism]\ncontext_parallel_degree = 2\n"
        "tensor_parallel_degree = 2\nenable_sequence_parallel = false",
        "[training]\nseq_len = 48\n[parallelism]\ncontext_parallel_degree = 3\n"
        'context_parallel_load_balancer = "balanced"\n'
        'context_parallel_rotate_method = "alltoall"',
        # one rank cuts nothing
        '[training]\nseq_len = 7\n[parallelism]\ncontext_parallel_load_balancer = "balanced"\n'
        'context_parallel_rotate_method = "ulysses"',
    ],
)
def test_just_inside_the_rules(jobs: Jobs, text: str) -> None:
    jobs.load(text)


def test_a_rule_points_at_what_was_written(jobs: Jobs) -> None:
    # shard_degree and total_steps are in order by themselves: the other key broke the rule
    [mistake] = jobs.mistakes("[lr_scheduler]\ntotal_steps = 50", "--training.steps", "60")
    assert mistake.startswith("job.toml: [lr_scheduler] total_steps = 50: must be at least")
    [mistake] = jobs.mistakes("[training]\nglobal_batch_size = 8", "--training.local_batch_size=3")
    assert mistake.startswith("job.toml: [training] global_batch_size = 8: ")
    assert "local_batch_size (3), got 8; try 6" in mistake


def test_a_rule_is_silent_while_one_of_its_keys_is_wrong(jobs: Jobs) -> None:
    [mistake] = jobs.mistakes('[training]\ndataset = "file"\ndataset_path = "x"')
    assert "did you mean 'files'?" in mistake
    [mistake] = jobs.mistakes('[training]\ndataset = "c4"\ndataset_path = "x"')
    assert "is not downloaded here" in mistake
    [mistake] = jobs.mistakes('[training]\ndatset = "files"\ndataset_path = "x"')
    assert "did you mean [training] dataset?" in mistake
    [mistake] = jobs.mistakes('[training]\ndataset_path = "x"', "--training.dataset")
    assert "needs a value" in mistake


def test_other_rules_still_speak_beside_a_wrong_value(jobs: Jobs) -> None:
    found = jobs.mistakes("[training]\nsteps = 'x'\nglobal_batch_size = 3\nlocal_batch_size = 2")
    assert [mistake.split(" = ")[0] for mistake in found] == [
        "job.toml: [training] steps",
        "job.toml: [training] global_batch_size",
    ]


@pytest.mark.parametrize(
    ("text", "place", "reached"),
    [
        ("[training]\nsteps = 60", "[training] steps = 60: ", "ends at 0.00024 "),
        (
            "[lr_scheduler]\nwarmup_steps = 100\n[training]\nsteps = 25\n[optimizer]\nlr = 0.01",
            "[lr_scheduler] warmup_steps = 100: ",
            "ends at 0.0025 ",
        ),
        (
            "[lr_scheduler]\nwarmup_ratio = 0.5\ntotal_steps = 100\n[training]\nsteps = 25",
            "[lr_scheduler] warmup_ratio = 0.5: ",
            "ends at 0.0004 ",
        ),
    ],
)
def test_a_warmup_longer_than_the_run_is_warned_of(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, text: str, place: str, reached: str
) -> None:
    with caplog.at_level(logging.WARNING):
        jobs.load(text)
    [notice] = caplog.messages
    assert notice.startswith(f"job.toml: {place}the warmup takes ")
    assert reached in notice
    assert "warmup_ratio" in notice


def test_a_warmup_that_the_run_can_hold_is_not(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.load("[training]\nsteps = 200")
    jobs.load("[training]\nsteps = 10\n[lr_scheduler]\nwarmup_ratio = 1.0")
    assert not caplog.messages


def test_the_last_place_chooses_how_the_warmup_is_said(jobs: Jobs) -> None:
    steps, ratio = "[lr_scheduler]\nwarmup_steps = 20", "[lr_scheduler]\nwarmup_ratio = 0.5"
    jobs.write(steps, name="steps.toml")
    schedule = jobs.load(f'base = "steps.toml"\n{ratio}').lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (None, 0.5)
    schedule = jobs.load(ratio, "--lr_scheduler.warmup_steps=7").lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (7, None)
    schedule = jobs.load(steps, "--lr_scheduler.warmup_ratio=none").lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (20, None)


@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ('[checkpoint]\nexport_dtype = "float16"', "last_save_in_hf"),
        ('[checkpoint]\nlast_save_model_only = true\nexport_dtype = "float16"', "last_save_in_hf"),
        ('[checkpoint]\nenable = true\nexport_dtype = "bfloat16"', "last_save_in_hf"),
        ("[checkpoint]\nlast_save_in_hf = true", "checkpoint.enable = true"),
        ("[checkpoint]\ninitial_load_in_hf = true", "checkpoint.enable = true"),
        ('[checkpoint]\nexclude_from_loading = ["optimizer"]', "checkpoint.enable = true"),
        ("[debug]\ndeterministic_warn_only = true", "debug.deterministic = true"),
        *(
            (f'[activation_checkpoint]\nmode = "{mode}"\nmemory_budget = 0.4', "memory_budget")
            for mode in ("none", "full", "selective")
        ),
        ('[quantize.linear.float8]\nrecipe_name = "rowwise"', 'converters = ["float8"]'),
        ("[quantize.linear.float8]\nemulate = true", 'converters = ["float8"]'),
    ],
)
def test_what_is_switched_off_loads_with_a_notice(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, text: str, switch: str
) -> None:
    jobs.load(text)
    [notice] = caplog.messages
    header, *_, line = text.split("\n")
    assert notice.startswith(f"job.toml: {header} {line}: has no effect: ")
    assert switch in notice


def test_no_profile_needs_no_room_for_one(jobs: Jobs) -> None:
    assert jobs.load("[profiling]\nprofile_freq = 1").profiling.profile_freq == 1
