"""Files that users hold: every key of torchtitan 0.2 and 0.1 works or is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.config.jobs import Jobs, mistakes_of
from tests.config.keys import KEYS_0_1, KEYS_0_2
from torchtitan.base.errors import ConfigError
from torchtitan.config.compat import RENAMED
from torchtitan.config.fields import fields, values_of
from torchtitan.config.layers import Path, literal, section
from torchtitan.config.load import load_config
from torchtitan.config.unbuilt import SWITCHES, UNBUILT, UNBUILT_VALUES
from torchtitan.job import Config

ALL = [
    ((*section.split("."), key), default)
    for table in (KEYS_0_2, KEYS_0_1)
    for section, keys in table.items()
    for key, default in keys.items()
]
DEFAULTS = Config()

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
# Nothing ever depended on these.
WITHOUT_EFFECT = {"job.use_for_integration_test"}


def cases(keep: Callable[[Path], bool]) -> pytest.MarkDecorator:
    """Parametrize by each key that `keep` keeps, and its old default."""
    kept = [(path, default) for path, default in ALL if keep(path)]
    ids = [".".join(path) for path, _ in kept]
    return pytest.mark.parametrize(("path", "default"), kept, ids=ids)


def other_than(value: object) -> object:
    """Some value of the same type that is not the default."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 3
    if isinstance(value, list):
        return ["other"]
    return "other"


def settings_of(config: Config) -> dict[tuple[str, ...], object]:
    return values_of(replace(config, job=replace(config.job, config_file=None)))


@cases(lambda path: ".".join(path) not in OTHER_DEFAULTS)
def test_old_defaults_load_and_change_nothing(jobs: Jobs, path: Path, default: object) -> None:
    if default is None:
        config = load_config([f"--{'.'.join(path)}", "none"])
    else:
        config = jobs.load(f"{section(path[:-1])}\n{path[-1]} = {literal(default)}")
    assert settings_of(config) == settings_of(DEFAULTS)


@cases(lambda path: ".".join(path) not in WITHOUT_EFFECT)
def test_any_other_value_arrives_or_is_refused_by_name(
    jobs: Jobs, path: Path, default: object
) -> None:
    header, value = section(path[:-1]), other_than(default)
    target = RENAMED.get(path, path)
    try:
        values = settings_of(jobs.load(f"{header}\n{path[-1]} = {literal(value)}"))
        unread = target in UNBUILT and (UNBUILT[target].switch or target in SWITCHES)
        if unread or target == ("validation", "dataset"):
            assert values == settings_of(DEFAULTS)
            return
    except ConfigError as error:
        (mistake,) = error.mistakes
        refused_by_name = mistake.startswith(f"job.toml: {header} {path[-1]} = {literal(value)}: ")
    else:
        refused_by_name = False
        # text stands for a list, or a list of lists
        arrived = tuple(value) if isinstance(value, list) else value
        arrived = ((value,),) if fields()[target].nested else arrived
        if target == ("validation", "dataset_path"):
            arrived = (value,)
        assert values == settings_of(DEFAULTS) | {target: arrived}
    assert refused_by_name or target in fields()


def is_refused(path: Path) -> bool:
    target = RENAMED.get(path, path)
    return target in UNBUILT and not UNBUILT[target].switch and target not in SWITCHES


@cases(is_refused)
def test_refusals_of_what_is_not_built_say_what_to_do(path: Path, default: object) -> None:
    [mistake] = mistakes_of(lambda: load_config([f"--{'.'.join(path)}", "surely-not-this"]))
    assert mistake.startswith(f"command line: --{'.'.join(path)} surely-not-this: ")
    assert UNBUILT[RENAMED.get(path, path)].instead in mistake
    assert mistake.endswith("(remove the line)" if default is None else "is accepted)")


def test_every_old_key_is_either_built_or_in_the_table_and_nothing_else_is() -> None:
    known = {RENAMED.get(path, path) for path, _ in ALL}
    assert UNBUILT.keys() <= known <= UNBUILT.keys() | fields().keys()
    assert RENAMED.keys() <= {path for path, _ in ALL}
    assert UNBUILT_VALUES.keys() <= fields().keys()


def test_every_default_of_one_old_file_together(jobs: Jobs) -> None:
    lines = []
    for name, keys in KEYS_0_2.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {literal(value)}" for key, value in keys.items() if value is not None]
    text = "\n".join(lines).replace('dataset = "c4_test"', 'dataset = "synthetic"')
    config = jobs.load(text)
    assert config.training.dataset == "synthetic"
    assert config.checkpoint.last_save_model_only is True


@pytest.mark.parametrize("dataset", ["c4", "c4_test", "c4_validation"])
def test_c4_is_refused_with_what_to_do(jobs: Jobs, dataset: str) -> None:
    [mistake] = jobs.mistakes(f'[training]\ndataset = "{dataset}"')
    assert mistake.startswith(f'job.toml: [training] dataset = "{dataset}": is not downloaded here')
    assert 'dataset = "files" with dataset_path' in mistake


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[parallelism]\nexpert_parallel_degree = 8", "mixture-of-experts models"),
        ("[checkpoint]\ncreate_seed_checkpoint = true", "no seed checkpoint is needed"),
        ("[model]\nconverters = ['quantize.linear.mx']", "MX formats are not built yet"),
        (
            "[memory_estimation]\nenable = true",
            "metrics report the peak of a real step (only false is accepted)",
        ),
        ("[memory_estimation]\nenabled = true", "memory estimation is not built yet"),
        ("[parallelism]\nenable_compiled_autograd = true", "compiles that of each block"),
    ],
)
def test_unbuilt_features_are_refused(jobs: Jobs, text: str, rule: str) -> None:
    header, line = text.split("\n")
    [mistake] = jobs.mistakes(text)
    assert mistake.startswith(f"job.toml: {header} {line.replace(chr(39), chr(34))}: ")
    assert rule in mistake


def test_degrees_of_one_stay_settings(jobs: Jobs) -> None:
    assert jobs.load("[parallelism]\ntensor_parallel_degree = 1").parallelism == (
        DEFAULTS.parallelism
    )


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_mark_for_old_tests_is_ignored(jobs: Jobs, value: str) -> None:
    config = jobs.load(f"[job]\nuse_for_integration_test = {value}")
    assert settings_of(config) == settings_of(DEFAULTS)


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
def test_old_names_set_todays_keys_with_a_notice(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, old: str, value: object, new: str
) -> None:
    name, key = old.split(".")
    new_path = tuple(new.split("."))
    with caplog.at_level(logging.WARNING):
        config = jobs.load(f"[{name}]\n{key} = {literal(value)}")
    assert settings_of(config) == settings_of(DEFAULTS) | {new_path: value}
    today = f"[{new_path[0]}] {new_path[1]}"
    notice = f"job.toml: [{name}] {key} is torchtitan's name; here it is {today}"
    assert caplog.messages[0] == notice
    assert all("written for torchtitan 0.2, where" in other for other in caplog.messages[1:])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        config = load_config([f"--{old}={value if isinstance(value, str) else literal(value)}"])
    assert settings_of(config) == settings_of(DEFAULTS) | {new_path: value}
    notice = f"command line: --{old} is torchtitan's name; here it is --{new}"
    assert caplog.messages == [notice]


def test_todays_names_give_no_notice(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    jobs.load("[debug]\nseed = 1")
    assert not caplog.messages


def test_old_and_new_name_with_different_values_contradict(jobs: Jobs) -> None:
    [mistake] = jobs.mistakes("[training]\nseed = 1\n[debug]\nseed = 2")
    assert mistake == (
        "job.toml: [training] seed = 1: is the old name of [debug] seed, which is given as well, "
        "with another value (2); remove the old line"
    )


def test_old_and_new_name_with_one_value_agree(jobs: Jobs) -> None:
    assert jobs.load("[training]\nseed = 2\n[debug]\nseed = 2").debug.seed == 2


def test_an_old_name_takes_part_in_overriding(jobs: Jobs) -> None:
    jobs.write("[training]\nseed = 1", name="base.toml")
    assert jobs.load('base = "base.toml"\n[debug]\nseed = 2').debug.seed == 2
    assert jobs.load('base = "base.toml"', "--debug.seed", "3").debug.seed == 3
    assert jobs.load("[debug]\nseed = 4", "--training.seed", "5").debug.seed == 5


def is_behind_a_switch(path: Path) -> bool:
    target = RENAMED.get(path, path)
    return target in UNBUILT and UNBUILT[target].switch is not None


@cases(is_behind_a_switch)
def test_what_shapes_a_feature_that_is_off_loads_with_a_notice(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, path: Path, default: object
) -> None:
    jobs.load(f"{section(path[:-1])}\n{path[-1]} = {literal(other_than(default))}")
    known = UNBUILT[RENAMED.get(path, path)]
    assert any(f"has no effect, {known.switch} is off" in text for text in caplog.messages)


def test_one_notice_a_feature_that_is_off(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    jobs.load("[fault_tolerance]\nreplica_id = 7\ngroup_size = 3")
    notice = caplog.messages[0]
    assert sum("fault_tolerance" in text for text in caplog.messages) == 1
    assert notice.startswith(
        "job.toml: [fault_tolerance] replica_id = 7; job.toml: [fault_tolerance] group_size = 3: "
    )
    assert "have no effect, fault_tolerance.enable is off" in notice


@pytest.mark.parametrize("switch", ["", "enable = false\n"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [("c4_validation", "is not downloaded here"), ("my_own", "must be 'python_stdlib', 'synth")],
)
def test_data_that_are_not_here_load_where_nothing_reads_them(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, switch: str, name: str, reason: str
) -> None:
    line = f'dataset = "{name}"'
    assert jobs.load(f"[validation]\n{switch}{line}").validation == DEFAULTS.validation
    notice = caplog.messages[0]
    assert notice.startswith(f"job.toml: [validation] {line}: has no effect, validation.enable is")
    [mistake] = jobs.mistakes(f"[validation]\nenable = true\n{line}")
    assert mistake.startswith(f"job.toml: [validation] {line}: {reason}")


def test_the_switches_themselves_are_refused() -> None:
    """So that no key behind one can ever be meant and do nothing."""
    behind = {known.switch for known in UNBUILT.values() if known.switch}
    for switch in behind:
        path = tuple(switch.split("."))
        assert path in UNBUILT_VALUES or (path in UNBUILT and not UNBUILT[path].switch)


FLOAT8_GATHER = "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true"


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
            "[checkpoint]\ninitial_load_in_hf_quantized = true",
            '[checkpoint]\nenable = true\ninitial_load_path = "x"\ninitial_load_in_hf = true',
        ),
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
def test_what_is_not_built_is_refused_only_where_it_is_switched_on(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, text: str, switch: str
) -> None:
    key = text.split("\n")[-1].split(" =")[0]
    jobs.write(text, name="base.toml")
    assert jobs.load('base = "base.toml"').job.config_file == "job.toml"
    [notice] = [text for text in caplog.messages if "has no effect" in text]
    assert notice.startswith("base.toml: ")
    assert key in notice
    mistakes = jobs.mistakes(f'base = "base.toml"\n{switch}')
    assert any(key in mistake and "only " in mistake for mistake in mistakes)


OWN_KEYS = """
[training]
img_size = 256
[encoder]
t5_encoder = "google/t5-v1_1-xxl"
"""


@pytest.mark.parametrize("name", ["flux", "deepseek_v3", "llama4", "gpt_oss", "vlm"])
def test_a_file_of_another_model_says_so_and_nothing_else(jobs: Jobs, name: str) -> None:
    [mistake] = jobs.mistakes(f'[model]\nname = "{name}"\nflavor = "x"\n{OWN_KEYS}')
    assert mistake.startswith(f'job.toml: [model] name = "{name}": ')
    assert "nothing else of this job was checked" in mistake


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--checkpoint.no-enable", "write --checkpoint.enable false"),
        ("--checkpoint.no_enable", "write --checkpoint.enable false"),
        ("--training.local-batch-size=4", "did you mean --training.local_batch_size?"),
        ("--float8.moe_fqns=experts", "valid are enable_fsdp_float8_all_gather, "),
    ],
)
def test_options_as_torchtitan_takes_them(option: str, answer: str) -> None:
    [mistake] = mistakes_of(lambda: load_config([option]))
    assert answer in mistake


def test_one_word_stands_for_a_list_of_one() -> None:
    assert load_config(["--compile.enable", "--compile.components=model"]).compile.enable


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (
            'flavor = "debugmodel_flex_attn"',
            'flavor = "debugmodel" and training.document_attention',
        ),
        ('flavor = "8B_varlen"', 'flavor = "8B" and training.document_attention = "within"'),
        ('name = "qwen3"\nflavor = "30B-A3B"', "use a dense model"),
        ('name = "llama3_ft"', 'write name = "llama3"'),
        ('name = "simple_fsdp.llama3"', 'write name = "llama3"'),
    ],
)
def test_models_that_go_by_another_name_here(jobs: Jobs, line: str, remedy: str) -> None:
    [mistake] = jobs.mistakes(f"[model]\n{line}")
    assert mistake.startswith(f"job.toml: [model] {line.splitlines()[-1]}: ")
    assert remedy in mistake


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


def test_a_file_for_torchtitan_is_told_what_means_something_else(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.load(SILENT)
    said = [text for text in caplog.messages if "written for torchtitan 0.2, where" in text]
    assert all(text.startswith("job.toml: ") for text in said)
    for remedy, (header, line) in MEANINGS.items():
        assert sum(remedy in text for text in said) == 1
        caplog.clear()
        # the command line takes it back: the file is still one of torchtitan's
        jobs.load(SILENT, f"--{header}.{line.replace(' = ', '=')}")
        assert not any(f"where {text}" in said for text in caplog.messages)
        now = [text for text in caplog.messages if "written for torchtitan 0.2, where" in text]
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
    assert not any("written for torchtitan" in text for text in caplog.messages)


def test_an_unbuilt_feature_can_be_switched_off_again(jobs: Jobs) -> None:
    switch = "[memory_estimation]\nenable ="
    jobs.write(f"{switch} true", name="base.toml")
    assert jobs.load(f'base = "base.toml"\n{switch} false').job.config_file == "job.toml"
    assert jobs.load(f"{switch} true", "--memory_estimation.enable", "false")


def test_the_compiler_can_be_switched_on_by_either_name(jobs: Jobs) -> None:
    for text in ("[compile]\nenable = true", "[training]\ncompile = true"):
        assert jobs.load(text).compile.enable
    assert jobs.load('[compile]\nenable = true\ncomponents = ["model", "loss"]').compile.enable


def test_the_old_default_tokenizer_leaves_ours(jobs: Jobs) -> None:
    text = '[model]\nhf_assets_path = "./tests/assets/tokenizer"\ntokenizer_path = "byte"'
    assert jobs.load(text).model.tokenizer_path == "byte"
