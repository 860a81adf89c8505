"""Files that users hold: every key of torchtitan 0.2 and 0.1 works or is refused by name."""

from __future__ import annotations

import pytest

from tests.config.jobs import THEIRS, Jobs
from tests.config.jobs import loaded as load
from tests.config.keys import KEYS_0_1, KEYS_0_2
from torchtitan.config.load import Loaded
from torchtitan.config.schema import Path, keys, literal, values_of
from torchtitan.config.sources import header, spell
from torchtitan.job import Config

ALL: list[tuple[Path, object]] = [
    ((*section.split("."), key), default)
    for table in (KEYS_0_2, KEYS_0_1)
    for section, keys in table.items()
    for key, default in keys.items()
]
DEFAULTS = values_of(Config())

# Old defaults that mean something else here: refused, built with another default of our own, or
# "not set" where we have a default (which a file says by silence, and no option can).
OTHER_DEFAULTS = {
    "training.dataset",
    "checkpoint.last_save_model_only",
    "model.tokenizer_path",
    "debug.seed",
    "training.seed",
    "validation.local_batch_size",
    "validation.seq_len",
    "training.mixed_precision_param",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
}
# Every value asks for what is done anyway.
WITHOUT_EFFECT = {
    "job.use_for_integration_test",
    "checkpoint.initial_load_in_hf_quantized",
    "parallelism.pipeline_parallel_expert_parallel_overlap",
}


def changed(loaded: Loaded[Config]) -> dict[str, object]:
    """Return the settings that are not at their defaults."""
    assert not loaded.mistakes
    values = values_of(loaded.config)
    return {".".join(path): value for path, value in values.items() if value != DEFAULTS[path]}


def written(path: Path, value: object) -> Loaded[Config]:
    """Load a file with one key; None, which no file can say, from the command line."""
    if value is None:
        return load("", f"--{'.'.join(path)}", "none")
    return load(f"{header(path[:-1])}\n{path[-1]} = {literal(value)}")


def other_than(value: object) -> object:
    """Some value of the same type that is not the default."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 3
    if isinstance(value, list):
        return ["other"]
    return "other"


@pytest.mark.promise("old-names")
def test_old_defaults_load_and_change_nothing() -> None:
    cases = [(path, default) for path, default in ALL if ".".join(path) not in OTHER_DEFAULTS]
    assert len(cases) > 150
    wrong = {}
    for path, default in cases:
        loaded = written(path, default)
        if loaded.mistakes or changed(loaded):
            wrong[path] = loaded.mistakes
    assert wrong == {}


def outcome(path: Path, default: object) -> str:
    """Say what becomes of a key at another value than its old default: arrived, off, refused."""
    value, target = other_than(default), THEIRS.new_names.get(path, path)
    loaded = written(path, value)
    name = f"job.toml: {spell(path, origin='')} = {literal(value)}: "
    if loaded.mistakes:
        assert [mistake.startswith(name) for mistake in loaded.mistakes] == [True]
        known = THEIRS.keys.get(target)
        if known is not None:
            assert known.instead in loaded.mistakes[0]
        return "refused"
    if value == DEFAULTS.get(target):
        return "arrived"
    if not changed(loaded):
        # what would shape a feature that is off
        switch = ".".join(THEIRS.switches[target][0])
        assert any(name in one and switch in one for one in loaded.notices)
        return "off"
    # text stands for a list, or a list of lists
    arrived = tuple(value) if isinstance(value, list) else value
    if keys(Config)[target].kind is tuple and isinstance(arrived, str):
        arrived = (arrived,)
    arrived = (arrived,) if keys(Config)[target].is_nested else arrived
    assert changed(loaded) == {".".join(target): arrived}
    return "arrived"


@pytest.mark.promise("old-names")
def test_any_other_value_arrives_or_is_refused_by_name_or_says_that_it_has_no_effect() -> None:
    wrong = {}
    outcomes: dict[str, int] = {"arrived": 0, "refused": 0, "off": 0}
    for path, default in ALL:
        if ".".join(path) in WITHOUT_EFFECT:
            continue
        try:
            outcomes[outcome(path, default)] += 1
        except (AssertionError, KeyError) as error:
            wrong[".".join(path)] = error
    assert wrong == {}
    assert min(outcomes.values()) > 25


def test_every_old_key_is_either_built_or_in_the_table_and_nothing_else_is() -> None:
    known = {THEIRS.new_names.get(path, path) for path, _ in ALL}
    ours = keys(Config).keys()
    their_keys = {path for path, one in THEIRS.keys.items() if not one.is_earlier}
    assert their_keys <= known <= THEIRS.keys.keys() | ours
    assert not THEIRS.keys.keys() & ours
    theirs = {old for old, new in THEIRS.renamed.items() if new.program is not None}
    assert theirs <= {path for path, _ in ALL}
    assert THEIRS.values.keys() | THEIRS.whole_job.keys() <= ours
    assert THEIRS.switches.keys() <= THEIRS.keys.keys() | THEIRS.values.keys()
    assert {switch for switch, _ in THEIRS.switches.values()} <= known


@pytest.mark.promise("old-names")
def test_every_default_of_one_old_file_together() -> None:
    lines = []
    for name, table in KEYS_0_2.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {literal(value)}" for key, value in table.items() if value is not None]
    text = "\n".join(lines).replace('dataset = "c4_test"', 'dataset = "synthetic"')
    config = load(text).checked()
    assert config.training.dataset == "synthetic"
    assert config.checkpoint.last_save_model_only is True


@pytest.mark.promise("old-names")
@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        *(
            (f'[training]\ndataset = "{name}"', 'dataset = "files" with dataset_path')
            for name in ("c4", "c4_test", "c4_validation")
        ),
        ("[parallelism]\nexpert_tensor_parallel_degree = 8", "only 1 is accepted"),
        ("[checkpoint]\ncreate_seed_checkpoint = true", "only false is accepted"),
        ('[model]\nconverters = ["quantize.linear.mx"]', "train in bfloat16"),
        ("[memory_estimation]\nenable = true", "torchtitan plan memory"),
        ("[memory_estimation]\nenabled = true", "only false is accepted"),
        ("[parallelism]\nenable_compiled_autograd = true", "compiles the backward of each block"),
        ('[model]\nflavor = "debugmodel_moe"', "qwen3_moe and deepseek_v3 are built"),
        ('[model]\nname = "llama3_ft"', 'write name = "llama3"'),
        ('[model]\nname = "simple_fsdp.llama3"', 'write name = "llama3"'),
        ('[model]\nname = "simple_fsdp.deepseek_v3"', 'write name = "deepseek_v3"'),
    ],
)
def test_what_is_not_built_is_refused_with_what_to_do(text: str, remedy: str) -> None:
    header, line = text.split("\n")
    [mistake] = load(text).mistakes
    assert mistake.startswith(f"job.toml: {header} {line}: ")
    assert remedy in mistake


@pytest.mark.promise("old-names")
@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ("job.print_args", True, "job.print_config"),
        ("model.hf_assets_path", "./assets/llama", "model.tokenizer_path"),
        ("lr_scheduler.lr_min", 0.25, "lr_scheduler.min_lr_factor"),
        ("training.seed", 7, "debug.seed"),
        ("training.deterministic", True, "debug.deterministic"),
        ("checkpoint.enable_checkpoint", True, "checkpoint.enable"),
        ("checkpoint.last_save_model_weights_only", True, "checkpoint.last_save_model_only"),
    ],
)
def test_old_names_set_todays_keys_with_a_notice(old: str, value: object, new: str) -> None:
    loaded = written(tuple(old.split(".")), value)
    assert changed(loaded) == {new: value}
    assert all(part in loaded.notices[0] for part in ("job.toml: [", new.split(".")[1]))
    loaded = load("", f"--{old}={value if isinstance(value, str) else literal(value)}")
    assert changed(loaded) == {new: value}
    assert all(part in loaded.notices[0] for part in (f"command line: --{old} ", f"--{new}"))


def test_todays_names_give_no_notice() -> None:
    assert load("[debug]\nseed = 1").notices == []


def test_old_and_new_name_with_different_values_contradict() -> None:
    [mistake] = load("[training]\nseed = 1\n[debug]\nseed = 2").mistakes
    assert mistake.startswith("job.toml: [training] seed = 1: ")
    assert "[debug] seed" in mistake


def test_old_and_new_name_with_one_value_agree() -> None:
    assert changed(load("[training]\nseed = 2\n[debug]\nseed = 2")) == {"debug.seed": 2}


def test_an_old_name_takes_part_in_overriding() -> None:
    base = "[training]\nseed = 1"
    assert changed(load("[debug]\nseed = 2", base=base)) == {"debug.seed": 2}
    assert changed(load("", "--debug.seed", "3", base=base)) == {"debug.seed": 3}
    assert changed(load("[debug]\nseed = 4", "--training.seed", "5")) == {"debug.seed": 5}


def test_one_notice_a_feature_that_is_off() -> None:
    [notice] = load("[fault_tolerance]\nreplica_id = 7\ngroup_size = 3").notices
    for key in ("replica_id = 7", "group_size = 3", "fault_tolerance.enable is off"):
        assert key in notice


@pytest.mark.parametrize("switch", ["", "enable = false\n"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("c4_validation", "is not downloaded"),
        ("my_own", "must be one of python_stdlib"),
    ],
)
def test_data_that_are_not_here_load_where_nothing_reads_them(
    switch: str, name: str, reason: str
) -> None:
    line = f'dataset = "{name}"'
    loaded = load(f"[validation]\n{switch}{line}")
    assert changed(loaded) == {}
    assert loaded.notices[0].startswith(f"job.toml: [validation] {line}: has no effect")
    [mistake] = load(f"[validation]\nenable = true\n{line}").mistakes
    assert mistake.startswith(f"job.toml: [validation] {line}: {reason}")


FLOAT8_GATHER = "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true"


@pytest.mark.promise("old-names")
@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ('[compile]\ncomponents = ["loss"]', "[compile]\nenable = true"),
        (
            "[parallelism]\nenable_async_tensor_parallel = true",
            "[parallelism]\ntensor_parallel_degree = 2",
        ),
        (
            '[parallelism]\npipeline_parallel_split_points = ["layers.2"]',
            "[parallelism]\npipeline_parallel_degree = 2",
        ),
        (FLOAT8_GATHER, '[model]\nconverters = ["quantize.linear.float8"]'),
        (
            '[activation_checkpoint]\nmode = "none"\ndebug = true',
            '[activation_checkpoint]\nmode = "full"',
        ),
        (
            "[checkpoint]\nenable_ft_dataloader_checkpoints = false",
            "[fault_tolerance]\nenable = true",
        ),
    ],
)
def test_what_is_not_built_is_refused_only_where_it_is_switched_on(text: str, switch: str) -> None:
    key = text.split("\n")[-1].split(" =")[0]
    loaded = load(base=text)
    [notice] = [text for text in loaded.notices if key in text]
    assert not loaded.mistakes
    assert notice.startswith("base.toml: ")
    mistakes = load(switch, base=text).mistakes
    assert any(key in mistake and "only " in mistake for mistake in mistakes)


OWN_KEYS = """
[training]
img_size = 256
[encoder]
t5_encoder = "google/t5-v1_1-xxl"
"""


@pytest.mark.parametrize("name", ["flux", "llama4", "gpt_oss", "vlm"])
def test_a_file_of_another_model_says_so_and_nothing_else(name: str) -> None:
    [mistake] = load(f'[model]\nname = "{name}"\nflavor = "x"\n{OWN_KEYS}').mistakes
    assert mistake.startswith(f'job.toml: [model] name = "{name}": ')


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--checkpoint.no-enable", "write --checkpoint.enable false"),
        ("--checkpoint.no_enable", "write --checkpoint.enable false"),
        ("--training.local-batch-size=4", "did you mean --training.local_batch_size?"),
        ("--float8.xyzzy=1", "valid are enable_fsdp_float8_all_gather, "),
    ],
)
def test_options_as_torchtitan_takes_them(option: str, answer: str) -> None:
    [mistake] = load("", option).mistakes
    assert answer in mistake


def test_one_word_stands_for_a_list_of_one() -> None:
    assert changed(load("", "--compile.enable", "--compile.components=model")) == {
        "compile.enable": True
    }
    for both in (["model", "loss"], ["model,loss"], ["loss,model"], ["none"]):
        assert not load("", "--compile.components", *both, "--compile.enable").mistakes


MEANINGS = {
    "no_decay_params = []": ("optimizer", "no_decay_params = []"),
    "bpe_2048": ("model", 'tokenizer_path = "byte"'),
    "c4_test": ("training", 'dataset = "synthetic"'),
    "mixed_precision_param": ("training", 'mixed_precision_param = "bfloat16"'),
    "[debug] seed": ("debug", "seed = 7"),
    "last_save_model_only": ("checkpoint", "last_save_model_only = false"),
    "warmup_steps = 60": ("lr_scheduler", "warmup_steps = 60"),
}
SILENT = """
[optimizer]
early_step_in_backward = false
[training]
steps = 60
[checkpoint]
enable = true
"""


@pytest.mark.promise("old-names")
def test_a_file_for_torchtitan_is_told_what_means_something_else(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.load(SILENT)
    said = [text for text in caplog.messages if "torchtitan 0.2" in text]
    assert all(text.startswith("job.toml: ") for text in said)
    for remedy, (section, line) in MEANINGS.items():
        assert sum(remedy in text for text in said) == 1
        caplog.clear()
        # the command line takes it back: the file is still one of torchtitan's
        jobs.load(SILENT, f"--{section}.{line.replace(' = ', '=')}")
        now = [text for text in caplog.messages if "torchtitan 0.2" in text]
        assert not any(remedy in text for text in now)
        assert len(now) == len(said) - 1
    assert len(said) == len(MEANINGS)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (SILENT.replace("early_step_in_backward = false", ""), ()),
        ("", ("--training.seed", "1")),
    ],
)
def test_a_file_of_our_own_is_not(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, text: str, options: tuple[str, ...]
) -> None:
    jobs.load(text, *options)
    assert not any("torchtitan 0." in text for text in caplog.messages)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("debugmodel_flex_attn", "debugmodel"),
        ("debugmodel_varlen_attn", "debugmodel"),
        ("8B_flex", "8B"),
        ("8B_varlen", "8B"),
    ],
)
def test_flavors_that_attend_within_documents_are_a_flavor_and_a_mask(
    theirs: str, ours: str
) -> None:
    text = f'[model]\nflavor = "{theirs}"'
    for options in ([], ["--training.attn_mask_type=block_causal"]):
        loaded = load(text, *options)
        assert not loaded.mistakes
        assert (loaded.config.model.flavor, loaded.config.training.attn_mask_type) == (
            ours,
            "block_causal",
        )
        assert loaded.foreign_file == "job.toml"
        [notice] = loaded.notices
        assert notice.startswith(f'job.toml: [model] flavor = "{theirs}": ')
    # overridden as a whole, and contradicted
    assert changed(load(text, "--model.flavor=small")) == {"model.flavor": "small"}
    [mistake] = load(text, "--training.attn_mask_type=causal").mistakes
    assert mistake.startswith("command line: --training.attn_mask_type causal: ")
    assert f'flavor = "{theirs}"' in mistake


def test_an_unbuilt_feature_can_be_switched_off_again() -> None:
    switch = "[memory_estimation]\nenable ="
    assert not load(f"{switch} false", base=f"{switch} true").mistakes
    assert not load(f"{switch} true", "--memory_estimation.enable", "false").mistakes


def test_the_compiler_can_be_switched_on_by_either_name() -> None:
    for text in ("[compile]\nenable = true", "[training]\ncompile = true"):
        assert changed(load(text)) == {"compile.enable": True}
    text = '[compile]\nenable = true\ncomponents = ["model", "loss"]'
    assert changed(load(text)) == {"compile.enable": True}


def test_the_old_default_tokenizer_leaves_ours() -> None:
    text = '[model]\nhf_assets_path = "./tests/assets/tokenizer"\ntokenizer_path = "byte"'
    assert changed(load(text)) == {"model.tokenizer_path": "byte"}
