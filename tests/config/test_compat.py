"""Files that users hold: every key of torchtitan 0.2 and 0.1 works or is refused by name."""

from __future__ import annotations

import pytest

from tests.config.jobs import Checked, Jobs
from tests.config.jobs import loaded as load
from tests.config.keys import KEYS_0_1, KEYS_0_2
from torchtitan.config.help import type_text
from torchtitan.config.old_names import OLD_NAMES, OTHER_DEFAULTS
from torchtitan.config.settings import Path, header, keys, literal, spell, values_of
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
DIFFERENT = {
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
    "mx.use_fp8_dim1_cast_triton_kernel",
    "job.use_for_integration_test",
    "checkpoint.initial_load_in_hf_quantized",
    "parallelism.pipeline_parallel_expert_parallel_overlap",
}


def changed(loaded: Checked) -> dict[str, object]:
    """Return the settings that are not at their defaults."""
    assert not loaded.mistakes
    values = values_of(loaded.config)
    return {".".join(path): value for path, value in values.items() if value != DEFAULTS[path]}


def written(path: Path, value: object) -> Checked:
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
    cases = [(path, default) for path, default in ALL if ".".join(path) not in DIFFERENT]
    assert len(cases) > 150
    wrong = {}
    for path, default in cases:
        loaded = written(path, default)
        if loaded.mistakes or changed(loaded):
            wrong[path] = loaded.mistakes
    assert wrong == {}


def outcome(path: Path, default: object) -> str:
    """Say what becomes of a key at another value than its old default: arrived, off, refused."""
    value, new = other_than(default), OLD_NAMES.renamed.get(".".join(path))
    target = tuple(new.split(".")) if new else path
    loaded = written(path, value)
    name = f"job.toml: {spell(path, origin='')} = {literal(value)}: "
    if loaded.mistakes:
        assert [mistake.startswith(name) for mistake in loaded.mistakes] == [True]
        return "refused"
    if value == DEFAULTS.get(target):
        return "arrived"
    if not changed(loaded):
        # what would shape a feature that is off
        refused = OLD_NAMES.find(target, value)
        assert refused is not None
        places = (name, name.replace(spell(path), spell(target)))
        assert any(one.startswith(places) and refused.when[0] in one for one in loaded.notices)
        return "off"
    # text stands for a list, or a list of lists
    arrived = tuple(value) if isinstance(value, list) else value
    if keys(Config)[target].kind is tuple and isinstance(arrived, str):
        arrived = (arrived,)
    arrived = (arrived,) if is_nested(target) else arrived
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


def is_nested(path: Path) -> bool:
    return "list of lists" in type_text(keys(Config)[path])


def test_every_old_key_is_built_renamed_or_refused_and_nothing_else_is() -> None:
    ours = {".".join(path) for path in keys(Config)}
    known = {OLD_NAMES.renamed.get(".".join(path), ".".join(path)) for path, _ in ALL}
    assert all(name in ours or OLD_NAMES.find(tuple(name.split(".")), None) for name in known)
    assert not OLD_NAMES.refused.keys() & ours
    assert OLD_NAMES.renamed.keys() <= {".".join(path) for path, _ in ALL}
    switches = {one.when[0] for one in OLD_NAMES.refused.values() if one.when}
    assert switches <= ours | OLD_NAMES.refused.keys()
    assert OTHER_DEFAULTS.keys() <= ours
    assert {switch for switch, _ in OTHER_DEFAULTS.values()} - {None} <= ours


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
        ("[parallelism]\nexpert_tensor_parallel_degree = 8", "expert_parallel_degree"),
        ("[checkpoint]\ncreate_seed_checkpoint = true", "no seed checkpoint"),
        ('[model]\nconverters = ["quantize.linear.mx"]', "float8"),
        ("[memory_estimation]\nenable = true", "torchtitan plan memory"),
        ("[memory_estimation]\nenabled = true", "torchtitan plan memory"),
        ("[parallelism]\nenable_compiled_autograd = true", "compiles the backward of each block"),
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


def test_their_data_load_where_nothing_reads_them() -> None:
    line = 'dataset = "c4_validation"'
    loaded = load(f"[validation]\n{line}")
    assert changed(loaded) == {}
    assert loaded.notices[0].startswith(f"job.toml: [validation] {line}: has no effect")
    [mistake] = load(f"[validation]\nenable = true\n{line}").mistakes
    assert mistake.startswith(f"job.toml: [validation] {line}: ")


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
    assert any(key in mistake for mistake in mistakes)


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
