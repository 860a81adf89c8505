"""Rules between keys: the key that each names and its remedy, and what lies just inside."""

from __future__ import annotations

import pytest

from tests.config.jobs import Jobs, loaded

PIPELINE = "[parallelism]\npipeline_parallel_degree = 2\n"
CONTEXT = "[parallelism]\ncontext_parallel_degree = 2\n"
NEEDED = "factor = 4.0\noriginal_max_position = 8192\n"
ROPE = "[model.rope_scaling]\ntype = "
SAVES = "[checkpoint]\nenable = true\n"
ELSEWHERE = f'{SAVES}initial_load_path = "x"\n'
HF = f"{SAVES}last_save_in_hf = true\n"
ON = "[validation]\nenable = true\n"
SYNTHETIC = '\n[training]\ndataset = "synthetic"\n'
FILES = '[training]\ndataset = "files"\ndataset_path = "x"\n'
COMPILED = "\n[compile]\nenable = true\n"
BUDGET = '[activation_checkpoint]\nmode = "memory_budget"\n'
FLOAT8 = "[model]\nconverters = ['float8']\n"

# a job, the key of its one mistake, and what to do
BROKEN = [
    # bounds of one key
    *(
        (f'[job]\nsave_config_file = "{path}"', "[job] save_config_file", "inside job.dump_folder")
        for path in ("/etc/passwd", "../job.toml", "a/../../job.toml", "..", ".", "a/..")
    ),
    *(
        (f'[checkpoint]\nfolder = "{path}"', "[checkpoint] folder", "inside job.dump_folder")
        for path in ("/shared", "../shared", "a/../..")
    ),
    *(
        (
            f'[activation_checkpoint]\nselective_ac_option = "{option}"',
            "[activation_checkpoint] selective_ac_option",
            "must be op or a positive integer in quotes",
        )
        for option in ("0", "ops", "-1", "1.5", "two", "", "²", "٣")
    ),
    *(
        (
            f'[parallelism]\nfsdp_reshard_after_forward = "{given}"',
            "[parallelism] fsdp_reshard_after_forward",
            remedy,
        )
        for given, remedy in (("alway", "did you mean 'always'?"), ("-2", "positive"), ("0", "or"))
    ),
    *(
        (f"[{section}]\n{key} = {value}", f"[{section}] {key}", "must be -1 or at least 1")
        for section, key in (
            ("parallelism", "data_parallel_shard_degree"),
            ("training", "global_batch_size"),
        )
        for value in (0, -2)
    ),
    (f"{SAVES}load_step = -2", "[checkpoint] load_step", "greater than or equal to -1"),
    ("[model]\nconverters = ['float9']", "[model] converters", "did you mean 'float8'?"),
    ("[lora]\nrank = -1", "[lora] rank", "greater than or equal to 0"),
    *(
        (f"[validation]\nholdout_fraction = {value}", "[validation] holdout_fraction", rule)
        for value, rule in (("0", "greater than 0"), ("1.0", "less than 1"), ("nan", "than"))
    ),
    *(
        (
            f'{ON}dataset = "synthetic"\nsteps = {value}',
            "[validation] steps",
            "must be -1 or at least 1",
        )
        for value in (0, -2)
    ),
    # what a field needs
    ('[training]\ndataset = "files"', "[training] dataset", "needs dataset_path"),
    ('[training]\ndataset = "examples"', "[training] dataset", "needs dataset_path"),
    (
        '[training]\ndataset_path = "x"',
        "[training] dataset_path",
        'dataset = "files" or "examples"',
    ),
    (
        '[training]\ndataset = "examples"\ndataset_path = "x"\ndataset_weights = [1.0]',
        "[training] dataset_weights",
        'needs dataset = "files"',
    ),
    (
        '[training.dataset_mixture]\n"a.txt" = 1.0',
        "[training] dataset_mixture",
        'dataset = "files"',
    ),
    (
        f'{FILES}[training.dataset_mixture]\n"*.txt" = 1.0',
        "[training] dataset_mixture",
        "replaces dataset_path",
    ),
    (
        '[training]\ndataset = "files"\n[training.dataset_mixture]\n"*.txt" = 0',
        "[training] dataset_mixture",
        'item "*.txt": must be greater than 0',
    ),
    ('[training]\ndataset_text_template = "{a}"', "[training] dataset_text_t", 'dataset = "files"'),
    *(
        (
            f'{FILES}dataset_text_template = "{template}"',
            "[training] dataset_text_template",
            remedy,
        )
        for template, remedy in (
            ("no key", "no key in braces"),
            ("{a} {", "must hold keys in braces"),
            ("{a:>9}", "braces must hold only a key"),
            ("{a!r}", "braces must hold only a key"),
            ("{}", "braces must hold only a key"),
            ('{a}"\ndataset_text_key = "b', "replaces dataset_text_key"),
        )
    ),
    *(
        (f"[training]\n{line}", f"[training] {line.split()[0]}", 'dataset = "examples" or ')
        for line in ('chat_template = "x"', 'long_examples = "skip"')
    ),
    (
        '[training]\ndataset = "examples"\ndataset_path = "x"\npacking = "packed"',
        "[training] packing",
        'needs attn_mask_type = "block_causal"',
    ),
    *(
        (f"[{section}.dataloader]\n{line}", f"[{section}.dataloader] {line.split()[0]}", ">= 1")
        for section in ("training", "validation")
        for line in ("persistent_workers = true", "prefetch_factor = 2")
    ),
    (f'{ROPE}"linear"', "[model.rope_scaling] type", "needs factor"),
    (f'{ROPE}"yarn"\nfactor = 4.0', "[model.rope_scaling] type", "needs original_max_position"),
    ("[model.rope_scaling]\nfactor = 4.0", "[model.rope_scaling] factor", '"llama3" or "yarn"'),
    (
        f'{ROPE}"linear"\n{NEEDED}',
        "[model.rope_scaling] original_max_position",
        'needs type = "llama3" or "yarn"',
    ),
    (f'{ROPE}"llama3"\n{NEEDED}beta_slow = 2.0', "[model.rope_scaling] beta_slow", '"yarn"'),
    (f'{ROPE}"yarn"\n{NEEDED}low_freq_factor = 2.0', "[model.rope_scaling] low_freq", '"llama3"'),
    ("[optimizer]\nmomentum = 0.9", "[optimizer] momentum", 'needs name = "SGD"'),
    ('[optimizer]\nname = "SGD"\nbeta1 = 0.8', "[optimizer] beta1", '"AdamW"'),
    ('[optimizer]\nname = "Adagrad"\nbeta2 = 0.9', "[optimizer] beta2", '"AdamW"'),
    ('[optimizer]\nname = "RMSprop"\neps = 1e-3', "[optimizer] eps", "optimizer.options.eps"),
    ("[lora]\nalpha = 8.0", "[lora] alpha", "needs rank >= 1"),
    ('[lora]\nmodules = "layers.*"', "[lora] modules", "needs rank >= 1"),
    (f'{HF}[lora]\nexport_format = "adapter"', "[lora] export_format", "needs rank >= 1"),
    (
        '[lora]\nrank = 2\nexport_format = "adapter"',
        "[lora] export_format",
        "needs checkpoint.last_save_in_hf",
    ),
    ('[checkpoint]\nmode = "continue"', "[checkpoint] mode", "needs enable = true"),
    ("[job]\ntime_limit_seconds = 60", "[job] time_limit_seconds", "checkpoint.enable = true"),
    (f'{SAVES}mode = "finetune"', "[checkpoint] mode", "needs initial_load_path"),
    (
        f'{ELSEWHERE}mode = "finetune"\ninitial_load_model_only = false',
        "[checkpoint] mode",
        'mode = "continue"',
    ),
    (f"{SAVES}grow_vocab = true", "[checkpoint] grow_vocab", "needs initial_load_path"),
    (f"{SAVES}load_step = 5", "[checkpoint] load_step", "needs initial_load_path"),
    (
        f'{SAVES}initial_load_rope = "halves"',
        "[checkpoint] initial_load_rope",
        "needs initial_load_path",
    ),
    (
        f'{ELSEWHERE}initial_load_rope = "halves"\ninitial_load_in_hf = true',
        "[checkpoint] initial_load_rope",
        "needs initial_load_in_hf = false",
    ),
    (
        f"{SAVES}initial_load_in_hf = true",
        "[checkpoint] initial_load_in_hf",
        "needs initial_load_path",
    ),
    (
        f"{ELSEWHERE}initial_load_in_hf = true\ninitial_load_model_only = false",
        "[checkpoint] initial_load_in_hf",
        "needs initial_load_model_only = true",
    ),
    (f"{SAVES}keep_best = 2", "[checkpoint] keep_best", "needs validation.enable = true"),
    (BUDGET, "[activation_checkpoint] mode", "needs compile.enable = true"),
    (
        f'{BUDGET}{COMPILED}backend = "aot_eager"',
        "[activation_checkpoint] mode",
        'needs compile.backend = "inductor"',
    ),
    (
        f"{BUDGET}{COMPILED}[parallelism]\ntensor_parallel_degree = 2",
        "[activation_checkpoint] mode",
        "needs parallelism.tensor_parallel_degree = 1",
    ),
    *(
        (f"{FLOAT8}{more}", "[model] converters", f"needs {key} = ")
        for more, key in (
            ('[training]\nmixed_precision_param = "float32"', "training.mixed_precision_param"),
            ('[training]\ndtype = "bfloat16"', "training.dtype"),
            ("[lora]\nrank = 2", "lora.rank"),
            (
                "[parallelism]\ntensor_parallel_degree = 2",
                "parallelism.tensor_parallel_degree",
            ),
            (PIPELINE, "parallelism.pipeline_parallel_degree"),
        )
    ),
    (
        "[lr_scheduler]\nwarmup_steps = 10\nwarmup_ratio = 0.1",
        "[lr_scheduler] warmup_ratio",
        "replaces warmup_steps, which is 10",
    ),
    # rules of one section
    (
        "[profiling]\nprofile_freq = 3\nenable_profiling = true",
        "[profiling] profile_freq",
        "got 3; try 4",
    ),
    (
        '[training]\ndataset = "files"\ndataset_path = ["a", "b"]\ndataset_weights = [1.0]',
        "[training] dataset_weights",
        "got 1 for 2",
    ),
    (
        "[training]\nglobal_batch_size = 20\nlocal_batch_size = 8",
        "[training] global_batch_size",
        "multiple of local_batch_size (8) x data-parallel ranks, got 20",
    ),
    (
        f'{PIPELINE}module_fqns_per_model_part = [["norm"]]\n'
        "pipeline_parallel_layers_per_stage = 2",
        "[parallelism] module_fqns_per_model_part",
        "layers_per_stage = 2",
    ),
    *(
        (
            f'{PIPELINE}pipeline_parallel_schedule = "{name}"',
            "[parallelism] pipeline_parallel_schedule",
            "pipeline_parallel_schedule_csv",
        )
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti")
    ),
    (
        f'{CONTEXT}context_parallel_load_balancer = "balanced"\n'
        'context_parallel_rotate_method = "ulysses"',
        "[parallelism] context_parallel_load_balancer",
        '"headtail" or "none"',
    ),
    (f'{ELSEWHERE}mode = "continue"', "[checkpoint] mode", 'write mode = "finetune"'),
    (
        f'{ELSEWHERE}initial_load_model_only = false\nexclude_from_loading = ["dataloader"]',
        "[checkpoint] exclude_from_loading",
        'write mode = "continue"',
    ),
    # held out without enable too
    (
        '[validation]\nholdout_fraction = 0.1\ndataset = "synthetic"',
        "[validation] holdout_fraction",
        "remove either",
    ),
    (
        f'{ON}holdout_fraction = 0.1\ndataset_path = "x"',
        "[validation] holdout_fraction",
        "remove either",
    ),
    # rules across sections
    (
        "[lr_scheduler]\ntotal_steps = 99\n[training]\nsteps = 100",
        "[lr_scheduler] total_steps",
        "training.steps (100), got 99",
    ),
    *(
        (f"{PIPELINE}pipeline_parallel_{more}", f"[parallelism] pipeline_parallel_{key}", remedy)
        for more, key, remedy in (
            ("microbatch_size = 3", "microbatch_size", "try local_batch_size = 6"),
            ("num_microbatches = 3", "num_microbatches", "try 1, 2, 4, 8"),
            (
                "num_microbatches = 2\npipeline_parallel_microbatch_size = 2",
                "num_microbatches",
                "remove one",
            ),
        )
    ),
    (
        "[training]\nseq_len = 100\n[parallelism]\ncontext_parallel_degree = 3",
        "[training] seq_len",
        "a multiple of 6 ",
    ),
    (
        '[parallelism]\ncontext_parallel_degree = 3\ncontext_parallel_load_balancer = "none"',
        "[parallelism] context_parallel_degree",
        "a multiple of 3 (3 context_parallel_degree), got 2048; try 2046",
    ),
    (
        f"[training]\nseq_len = 4\n{CONTEXT}tensor_parallel_degree = 2",
        "[training] seq_len",
        "a multiple of 8 ",
    ),
    (
        f'[training]\nseq_len = 24\n{CONTEXT}context_parallel_load_balancer = "balanced"',
        "[training] seq_len",
        "a multiple of 16 ",
    ),
    (
        "[training]\nseq_len = 9\n[parallelism]\ntensor_parallel_degree = 2",
        "[training] seq_len",
        "got 9; try 8",
    ),
    (f"{ON}seq_len = 6{SYNTHETIC}{CONTEXT}", "[validation] seq_len", "got 6; try 4"),
    (
        f"{ON}seq_len = 9{SYNTHETIC}[parallelism]\ntensor_parallel_degree = 2",
        "[validation] seq_len",
        "got 9; try 8",
    ),
    *(
        (
            f"{ON}local_batch_size = 3{SYNTHETIC}{PIPELINE}pipeline_parallel_{more}",
            "[validation] local_batch_size",
            "got 3; try 2",
        )
        for more in ("microbatch_size = 2", "num_microbatches = 4")
    ),
    (ON, "[validation] enable", "validation.holdout_fraction = 0.05"),
    (f'{ON}dataset = "files"', "[validation] dataset", "needs validation.dataset_path"),
    (
        f'{ON}\n[training]\ndataset = "examples"\ndataset_path = "x"',
        "[validation] enable",
        "needs validation.dataset_path",
    ),
    (f'{ON}dataset_path = "x"{SYNTHETIC}', "[validation] dataset_path", '"files" or "examples"'),
    (
        f"{FLOAT8}[training]\nlocal_batch_size = 1\nseq_len = 40",
        "[model] converters",
        "got 40 (local_batch_size x seq_len / context_parallel_degree); try seq_len = 32",
    ),
]


@pytest.mark.parametrize(("text", "key", "remedy"), BROKEN)
def test_a_broken_rule_names_its_key_and_the_remedy(text: str, key: str, remedy: str) -> None:
    [mistake] = loaded(text).mistakes
    assert mistake.startswith(f"job.toml: {key}")
    assert remedy in mistake


INSIDE = [
    '[job]\nsave_config_file = "a/../configs/job.toml"',
    '[training]\ndataset = "files"\ndataset_path = ["a", "b"]\ndataset_weights = [1.0, 2.0]',
    '[training]\ndataset = "files"\ndataset_path = ["a", "b"]',
    '[training]\ndataset = "files"\n[training.dataset_mixture]\n"a/**" = 1\nb = 2.5',
    '[training]\ndataset = "examples"\ndataset_path = "a"\nlong_examples = "skip"\n'
    'chat_template = "x"',
    "[training]\nglobal_batch_size = 16\nlocal_batch_size = 8",
    "[training]\nglobal_batch_size = -1\nlocal_batch_size = 7",
    "[training.dataloader]\nprefetch_factor = 2\npersistent_workers = true\nnum_workers = 1",
    '[model.rope_scaling]\ntype = "none"',
    '[model.rope_scaling]\ntype = "linear"\nfactor = 1.0',
    f'[model.rope_scaling]\ntype = "llama3"\nhigh_freq_factor = 8.0\n{NEEDED}',
    f'[model.rope_scaling]\ntype = "yarn"\nattention_factor = 1.0\nbeta_fast = 9.0\n{NEEDED}',
    '[optimizer]\nmomentum = 0.9\nname = "SGD"',
    '[optimizer]\nname = "SGD"\nbeta1 = 0.9\nbeta2 = 0.95\neps = 1e-8',
    '[optimizer]\nname = "Muon"\nbeta1 = 0.8\nbeta2 = 0.9\neps = 1e-6',
    '[optimizer]\nname = "RMSprop"\n[optimizer.options]\neps = 1e-3',
    "[lr_scheduler]\ntotal_steps = 100\n[training]\nsteps = 100",
    "[lr_scheduler]\ntotal_steps = 99\nmin_lr_factor = 0.1\n[training]\nsteps = 100",
    "[lr_scheduler]\ntotal_steps = 99\ndecay_ratio = 0.0\n[training]\nsteps = 100",
    "[lr_scheduler]\nwarmup_steps = 1000\n[training]\nsteps = 100",
    "[lr_scheduler]\nwarmup_steps = 90\ndecay_ratio = 0.8\n[training]\nsteps = 100",
    "[parallelism]\ndata_parallel_shard_degree = 1",
    "[parallelism]\nfsdp_reshard_after_forward = 8",
    '[parallelism]\nfsdp_reshard_after_forward = "8"\ncontext_parallel_degree = 2',
    "[debug]\ndeterministic_warn_only = true\ndeterministic = true",
    '[checkpoint]\nenable = true\nmode = "continue"\nexclude_from_loading = ["dataloader"]',
    '[checkpoint]\nenable = true\ninitial_load_path = "x"\nexclude_from_loading = "output.*"',
    '[checkpoint]\nenable = true\ninitial_load_path = "x"\ninitial_load_model_only = false',
    '[checkpoint]\nenable = true\nmode = "finetune"\ninitial_load_path = "x"',
    '[checkpoint]\nenable = true\ninitial_load_path = "x"\ninitial_load_in_hf = true\n'
    'mode = "finetune"',
    '[checkpoint]\nenable = true\nlast_save_in_hf = true\nexport_dtype = "float16"',
    '[checkpoint]\nenable = true\nlast_save_model_only = true\nexport_dtype = "float16"',
    '[checkpoint]\nenable = true\nexclude_from_loading = ["dataloader"]',
    '[activation_checkpoint]\nselective_ac_option = "1"',
    '[activation_checkpoint]\nmode = "memory_budget"\n[compile]\nenable = true',
    '[activation_checkpoint]\nmode = "memory_budget"\nmemory_budget = 0.4\n[compile]\n'
    "enable = true",
    '[activation_checkpoint]\nmode = "full"\nmemory_budget = 0.5',
    '[activation_checkpoint]\nselective_ac_option = "op"',
    '[activation_checkpoint]\nselective_ac_option = "op"\n[compile]\nenable = true',
    # without checkpoints of its own, a run may start from others
    '[checkpoint]\ninitial_load_path = "x"\ninitial_load_in_hf = true\ngrow_vocab = true',
    '[checkpoint]\ninitial_load_path = "x"\nload_step = 3\nmode = "finetune"',
    '[checkpoint]\ninitial_load_path = "x"\nexclude_from_loading = "output.*"',
    f'{PIPELINE}pipeline_parallel_schedule = "PipelineScheduleMulti"\n'
    'pipeline_parallel_schedule_csv = "own.csv"',
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
    # of validation
    f"{ON}{SYNTHETIC}",
    f'{ON}dataset = "synthetic"\nsteps = 1',
    f'{ON}dataset = "python_stdlib"{SYNTHETIC}',
    f"{ON}holdout_fraction = 0.05",
    f"{ON}holdout_fraction = 0.999{SYNTHETIC}",
    "[validation]\nholdout_fraction = 1e-9",
    # nothing is validated, so nothing has to fit
    '[validation]\ndataset = "files"\nseq_len = 9\n[parallelism]\ntensor_parallel_degree = 2',
    f'{ON}dataset_path = "x"\n[training]\ndataset = "files"\ndataset_path = "y"',
    f"{ON}seq_len = 8{SYNTHETIC}{CONTEXT}",
    f"{ON}seq_len = 9{SYNTHETIC}[parallelism]\ntensor_parallel_degree = 2\n"
    "enable_sequence_parallel = false",
    f"{ON}local_batch_size = 4{SYNTHETIC}{PIPELINE}pipeline_parallel_microbatch_size = 2",
    f"{ON}{SYNTHETIC}[checkpoint]\nenable = true\nkeep_best = 1",
    # of adapters and float8
    f'{HF}[lora]\nrank = 2\nalpha = 8.0\nexport_format = "adapter"',
    f"{FLOAT8}[training]\nlocal_batch_size = 2\nseq_len = 40",
    f"{FLOAT8}[training]\nlocal_batch_size = 1\nseq_len = 40\n"
    "[quantize.linear.float8]\nemulate = true",
    # as in torchtitan's files
    '[quantize.linear.float8]\nfilter_fqns = ["output"]',
    # no profile needs no room for one
    "[profiling]\nprofile_freq = 1",
]


@pytest.mark.parametrize("text", INSIDE)
def test_just_inside_the_rules(text: str) -> None:
    assert loaded(text).mistakes == []


def test_a_rule_points_at_what_was_written(jobs: Jobs) -> None:
    # shard_degree and total_steps are in order by themselves: the other key broke the rule
    [mistake] = jobs.mistakes("[lr_scheduler]\ntotal_steps = 50", "--training.steps", "60")
    assert mistake.startswith("job.toml: [lr_scheduler] total_steps = 50: ")
    [mistake] = jobs.mistakes("[training]\nglobal_batch_size = 8", "--training.local_batch_size=3")
    assert mistake.startswith("job.toml: [training] global_batch_size = 8: ")
    assert "local_batch_size (3)" in mistake
    assert "got 8" in mistake


def test_a_rule_is_silent_while_one_of_its_keys_is_wrong(jobs: Jobs) -> None:
    [mistake] = jobs.mistakes('[training]\ndataset = "file"\ndataset_path = "x"')
    assert "did you mean 'files'?" in mistake
    [mistake] = jobs.mistakes('[training]\ndataset = "c4"\ndataset_path = "x"')
    assert "is not downloaded" in mistake
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
        ("[training]\nsteps = 60", "[training] steps = 60: ", "ends at 0.00024"),
        (
            "[lr_scheduler]\nwarmup_steps = 100\n[training]\nsteps = 25\n[optimizer]\nlr = 0.01",
            "[lr_scheduler] warmup_steps = 100: ",
            "ends at 0.0025",
        ),
        (
            "[lr_scheduler]\nwarmup_ratio = 0.5\ntotal_steps = 100\n[training]\nsteps = 25",
            "[lr_scheduler] warmup_ratio = 0.5: ",
            "ends at 0.0004",
        ),
    ],
)
def test_a_warmup_longer_than_the_run_is_warned_of(text: str, place: str, reached: str) -> None:
    [notice] = loaded(text).notices
    assert notice.startswith(f"job.toml: {place}")
    assert reached in notice
    assert "warmup_ratio" in notice


def test_a_warmup_that_the_run_can_hold_is_not() -> None:
    for text in ("steps = 200", "steps = 10\n[lr_scheduler]\nwarmup_ratio = 1.0"):
        assert loaded(f"[training]\n{text}").notices == []


def test_the_last_place_chooses_how_the_warmup_is_said(jobs: Jobs) -> None:
    steps, ratio = "[lr_scheduler]\nwarmup_steps = 20", "[lr_scheduler]\nwarmup_ratio = 0.5"
    jobs.write(steps, name="steps.toml")
    schedule = jobs.load(f'base = "steps.toml"\n{ratio}').lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (None, 0.5)
    schedule = jobs.load(ratio, "--lr_scheduler.warmup_steps=7").lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (7, None)
    schedule = jobs.load(steps, "--lr_scheduler.warmup_ratio=none").lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (20, None)
    neither = ("--lr_scheduler.warmup_steps=0", "--lr_scheduler.warmup_ratio=0")
    for text in ("", steps, ratio):
        assert jobs.load(text, *neither).lr_scheduler.num_warmup_steps(100) == 0


@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ('[checkpoint]\nexport_dtype = "float16"', "last_save_in_hf"),
        ('[checkpoint]\nlast_save_model_only = true\nexport_dtype = "float16"', "enable = true"),
        ('[checkpoint]\nenable = true\nexport_dtype = "bfloat16"', "last_save_in_hf"),
        ("[checkpoint]\nlast_save_in_hf = true", "enable = true"),
        ("[checkpoint]\nkeep_best = 2", "enable = true"),
        ('[checkpoint]\nexclude_from_loading = ["optimizer"]', "enable = true"),
        ("[debug]\ndeterministic_warn_only = true", "deterministic = true"),
        *(
            (f'[activation_checkpoint]\nmode = "{mode}"\nmemory_budget = 0.4', "memory_budget")
            for mode in ("none", "full", "selective")
        ),
        ('[quantize.linear.float8]\nrecipe_name = "rowwise"', 'converters = ["float8"]'),
        ("[quantize.linear.float8]\nemulate = true", 'converters = ["float8"]'),
    ],
)
def test_what_is_switched_off_loads_with_a_notice(text: str, switch: str) -> None:
    job = loaded(text)
    assert job.mistakes == []
    [notice] = job.notices
    header, *_, line = text.split("\n")
    assert notice.startswith(f"job.toml: {header} {line}: has no effect: ")
    assert switch in notice


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (
            "[training]\nseq_len = 2047\n[parallelism]\ntensor_parallel_degree = 2\n"
            "enable_async_tensor_parallel = false",
            "[training] seq_len",
        ),
        (f'{SAVES}create_seed_checkpoint = false\nmode = "finetune"', "[checkpoint] mode"),
        (f'{SAVES}load_only = false\nmode = "finetune"', "[checkpoint] mode"),
    ],
)
def test_a_key_that_asks_for_nothing_silences_no_rule(text: str, key: str) -> None:
    [mistake] = loaded(text).mistakes
    assert f"job.toml: {key} = " in mistake


def test_a_setting_that_earlier_versions_had_is_not_taken_for_torchtitans() -> None:
    found = loaded("[checkpoint]\nload_only = false\n[validation]\nsteps = 0")
    assert (found.mistakes, found.notices, found.foreign_file) == ([], [], None)
