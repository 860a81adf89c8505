"""Files that users hold: every key of torchtitan 0.2 and 0.1 works or is refused by name."""

from __future__ import annotations

import re

import pytest

from tests.config.jobs import THEIRS
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
    "validation.dataset",
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
EARLIER = {
    ("checkpoint", "upload_check"),
    ("elastic", "wait_seconds"),
    ("parallelism", "pipeline_parallel_num_microbatches"),
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
    """Say what becomes of a key at another value than its old default: arrived or refused."""
    value, target = other_than(default), THEIRS.new_names.get(path, path)
    loaded = written(path, value)
    name = f"job.toml: {spell(path, origin='')} = {literal(value)}: "
    if loaded.mistakes:
        assert [mistake.startswith(name) for mistake in loaded.mistakes] == [True]
        known = THEIRS.keys.get(target)
        if known is not None:
            assert known[1] in loaded.mistakes[0]
        return "refused"
    if value == DEFAULTS.get(target):
        return "arrived"
    # text stands for a list, or a list of lists
    arrived = tuple(value) if isinstance(value, list) else value
    if keys(Config)[target].kind is tuple and isinstance(arrived, str):
        arrived = (arrived,)
    arrived = (arrived,) if keys(Config)[target].is_nested else arrived
    assert changed(loaded) == {".".join(target): arrived}
    return "arrived"


def test_any_other_value_arrives_or_is_refused_by_name() -> None:
    wrong = {}
    outcomes: dict[str, int] = {"arrived": 0, "refused": 0}
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
    assert known <= THEIRS.keys.keys() | ours
    assert not THEIRS.keys.keys() & ours
    assert THEIRS.keys.keys() - known == EARLIER
    assert THEIRS.values.keys() <= ours
    assert {new.to for new in THEIRS.renamed.values()} <= ours | THEIRS.keys.keys()


ADVICE = {instead for _, instead in THEIRS.keys.values()}
ADVICE |= {one.instead for values in THEIRS.values.values() for one in values.values()}
DOTTED = re.compile(r"(?<![\w.\"])(?!torchtitan)[a-z]\w*(?:\.\w+)+(?![\w:])")


def test_every_setting_that_an_advice_names_exists() -> None:
    named = {name for advice in ADVICE for name in DOTTED.findall(advice)}
    assert len(named) > 20
    assert {tuple(name.split(".")) for name in named} <= keys(Config).keys()


def test_every_default_of_one_old_file_together() -> None:
    lines = []
    for name, table in KEYS_0_2.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {literal(value)}" for key, value in table.items() if value is not None]
    text = re.sub(r'dataset = "c4_\w+"', 'dataset = "synthetic"', "\n".join(lines))
    config = load(text).checked()
    assert config.training.dataset == "synthetic"
    assert config.checkpoint.last_save_model_only is True


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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('training.document_attention = "within"', 'training.attn_mask_type = "block_causal"'),
        ("validation.split = 0.1", "validation.holdout_fraction = 0.1"),
        ('lora.save = "merged"', 'lora.export_format = "merged"'),
    ],
)
def test_names_of_earlier_versions_are_translated(old: str, new: str) -> None:
    assert load(old).config == load(new).config


def test_todays_names_give_no_notice() -> None:
    assert load("[debug]\nseed = 1").notices == []


def test_old_and_new_name_with_different_values_contradict() -> None:
    [mistake] = load("[training]\nseed = 1\n[debug]\nseed = 2").mistakes
    assert mistake.startswith("job.toml: [training] seed = 1: ")
    assert "[debug] seed" in mistake
    assert "remove the old line" in mistake


def test_old_and_new_name_with_one_value_agree() -> None:
    assert changed(load("[training]\nseed = 2\n[debug]\nseed = 2")) == {"debug.seed": 2}


def test_an_old_name_takes_part_in_overriding() -> None:
    base = "[training]\nseed = 1"
    assert changed(load("[debug]\nseed = 2", base=base)) == {"debug.seed": 2}
    assert changed(load("", "--debug.seed", "3", base=base)) == {"debug.seed": 3}
    assert changed(load("[debug]\nseed = 4", "--training.seed", "5")) == {"debug.seed": 5}


def test_one_word_stands_for_a_list_of_one() -> None:
    assert changed(load("", "--compile.enable", "--compile.components=model")) == {
        "compile.enable": True
    }
    for both in (["model", "loss"], ["model,loss"], ["loss,model"], ["none"]):
        assert not load("", "--compile.components", *both, "--compile.enable").mistakes


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
        [notice] = loaded.notices
        assert notice.startswith(f'job.toml: [model] flavor = "{theirs}": ')
    # overridden as a whole, and contradicted
    assert changed(load(text, "--model.flavor=small")) == {"model.flavor": "small"}
    [mistake] = load(text, "--training.attn_mask_type=causal").mistakes
    assert mistake.startswith("command line: --training.attn_mask_type causal: ")
    assert f'flavor = "{theirs}"' in mistake


def test_the_old_default_tokenizer_leaves_ours() -> None:
    text = '[model]\nhf_assets_path = "./tests/assets/tokenizer"\ntokenizer_path = "byte"'
    assert changed(load(text)) == {"model.tokenizer_path": "byte"}
