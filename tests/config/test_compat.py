"""Files that users hold: every key of torchtitan 0.2 and 0.1 works or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path as File

import pytest

from tests.config.jobs import Checked, loaded
from torchtitan.config.old_names import OLD_NAMES
from torchtitan.config.settings import Path, keys, literal, spell, values_of
from torchtitan.job import Config

KEYS = json.loads(File(__file__).with_name("keys_of_torchtitan.json").read_text("utf-8"))
"""By version: every key with the default it had there, kept apart from the package's own tables, so
that a key forgotten there is noticed here; those of 0.1 that 0.2 no longer has. None: not set."""
ALL: list[tuple[Path, object]] = [
    ((*section.split("."), key), default)
    for table in KEYS.values()
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
FILE = "job.toml: "


def changed(job: Checked) -> dict[str, object]:
    """Return the settings that are not at their defaults."""
    assert not job.mistakes
    values = values_of(job.config)
    return {".".join(path): value for path, value in values.items() if value != DEFAULTS[path]}


def written(path: Path, value: object) -> Checked:
    """Load a file with one key; None, which no file can say, from the command line."""
    if value is None:
        return loaded("", f"--{'.'.join(path)}", "none")
    return loaded(f"[{'.'.join(path[:-1])}]\n{path[-1]} = {literal(value)}")


def other_than(value: object) -> object:
    """Return a value of the same type that is not the default."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 3
    return ["other"] if isinstance(value, list) else "other"


@pytest.mark.promise("old-names")
def test_old_defaults_load_and_change_nothing() -> None:
    cases = [(path, default) for path, default in ALL if ".".join(path) not in DIFFERENT]
    assert len(cases) > 150
    wrong = {}
    for path, default in cases:
        job = written(path, default)
        if job.mistakes or changed(job):
            wrong[path] = job.mistakes
    assert wrong == {}


def outcome(path: Path, default: object) -> str:
    """Return what becomes of a key at another value than its old default."""
    value, new = other_than(default), OLD_NAMES.renamed.get(".".join(path))
    target = tuple(new.split(".")) if new else path
    job = written(path, value)
    name = f"{FILE}{spell(path)} = {literal(value)}: "
    if job.mistakes:
        assert [mistake.startswith(name) for mistake in job.mistakes] == [True]
        return "refused"
    if value == DEFAULTS.get(target):
        return "arrived"
    if not changed(job):
        assert value is False or any(notice.startswith(name) for notice in job.notices)
        return "without effect"
    # text stands for a list, or a list of lists
    arrived = tuple(value) if isinstance(value, list) else value
    for _ in range(keys(Config)[target].list_depth - isinstance(value, list)):
        arrived = (arrived,)
    assert changed(job) == {".".join(target): arrived}
    return "arrived"


@pytest.mark.promise("old-names")
def test_any_other_value_arrives_or_is_refused_by_name_or_says_that_it_has_no_effect() -> None:
    wrong = {}
    outcomes: dict[str, int] = {"arrived": 0, "refused": 0, "without effect": 0}
    for path, default in ALL:
        try:
            outcomes[outcome(path, default)] += 1
        except (AssertionError, KeyError) as error:
            wrong[".".join(path)] = error
    assert wrong == {}
    assert min(outcomes.values()) > 25


def test_every_old_key_is_built_renamed_or_refused_and_nothing_else_is() -> None:
    ours = {".".join(path) for path in keys(Config)}
    tables = OLD_NAMES.refused.keys() | OLD_NAMES.unused.keys()
    assert not tables & ours
    assert OLD_NAMES.renamed.keys() <= {".".join(path) for path, _ in ALL}
    assert {*OLD_NAMES.renamed.values()} <= ours | tables
    assert OLD_NAMES.defaults.keys() <= ours


@pytest.mark.promise("old-names")
def test_every_default_of_one_old_file_together() -> None:
    lines = []
    for name, table in KEYS["0.2"].items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {literal(value)}" for key, value in table.items() if value is not None]
    text = "\n".join(lines).replace('dataset = "c4_test"', 'dataset = "synthetic"')
    job = loaded(text)
    assert not job.mistakes
    assert job.config.training.dataset == "synthetic"
    assert job.config.checkpoint.last_save_model_only is True


@pytest.mark.promise("old-names")
@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ('[training]\ndataset = "c4"', 'dataset = "files" with dataset_path'),
        ("[parallelism]\nexpert_tensor_parallel_degree = 8", "expert_parallel_degree"),
        ("[checkpoint]\ncreate_seed_checkpoint = true", "no seed checkpoint"),
        ('[model]\nconverters = ["quantize.linear.mx"]', "float8"),
        ("[memory_estimation]\nenable = true", "torchtitan plan memory"),
        ("[fault_tolerance]\nenable = true", "checkpoint.interval"),
    ],
)
def test_what_is_not_built_is_refused_with_what_to_do(text: str, remedy: str) -> None:
    header, line = text.split("\n")
    [mistake] = loaded(text).mistakes
    assert mistake.startswith(f"{FILE}{header} {line}: ")
    assert remedy in mistake


@pytest.mark.promise("old-names")
@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ("job.print_args", True, "job.print_config"),
        ("model.hf_assets_path", "./assets/llama", "model.tokenizer_path"),
        ("lr_scheduler.lr_min", 0.25, "lr_scheduler.min_lr_factor"),
        ("training.seed", 7, "debug.seed"),
        ("training.compile", True, "compile.enable"),
        ("checkpoint.last_save_model_weights_only", True, "checkpoint.last_save_model_only"),
    ],
)
def test_old_names_set_todays_keys_with_a_notice(old: str, value: object, new: str) -> None:
    job = written(tuple(old.split(".")), value)
    assert changed(job) == {new: value}
    assert all(part in job.notices[0] for part in (f"{FILE}[", new.split(".")[1]))
    job = loaded("", f"--{old}={value if isinstance(value, str) else literal(value)}")
    assert changed(job) == {new: value}
    assert all(part in job.notices[0] for part in (f"command line: --{old} ", f"--{new}"))
    assert (
        loaded("", f"--{new}={value if isinstance(value, str) else literal(value)}").notices == []
    )


def test_an_old_name_takes_part_in_overriding() -> None:
    base = "[training]\nseed = 1"
    assert changed(loaded("[debug]\nseed = 2", base=base)) == {"debug.seed": 2}
    assert changed(loaded("", "--debug.seed", "3", base=base)) == {"debug.seed": 3}
    assert changed(loaded("[debug]\nseed = 4", "--training.seed", "5")) == {"debug.seed": 5}
    switch = "[memory_estimation]\nenable ="
    assert not loaded(f"{switch} false", base=f"{switch} true").mistakes


@pytest.mark.promise("old-names")
@pytest.mark.parametrize(
    "text",
    [
        "[parallelism]\ntensor_parallel_degree = 2\nenable_async_tensor_parallel = true",
        '[model]\nconverters = ["float8"]\n[quantize.linear.float8]\n'
        "enable_fsdp_float8_all_gather = true",
        '[activation_checkpoint]\nmode = "full"\ndebug = true',
        '[model]\nhf_assets_path = "./tests/assets/tokenizer"',
    ],
)
def test_what_changes_no_result_gets_a_notice(text: str) -> None:
    line = text.split("\n")[-1]
    job = loaded(text)
    assert not job.mistakes
    assert sum(line in notice and "has no effect" in notice for notice in job.notices) == 1


MEANINGS = {
    "no_decay_params = []": ("optimizer", "no_decay_params = []"),
    "bpe_2048": ("model", 'tokenizer_path = "byte"'),
    "c4_test": ("training", 'dataset = "synthetic"'),
    "mixed_precision_param": ("training", 'mixed_precision_param = "bfloat16"'),
    "[debug] seed": ("debug", "seed = 7"),
    "last_save_model_only": ("checkpoint", "last_save_model_only = false"),
}
SILENT = "[optimizer]\nearly_step_in_backward = false\n[training]\nsteps = 300\n"
SILENT += "[checkpoint]\nenable = true"


@pytest.mark.promise("old-names")
def test_a_file_for_torchtitan_is_told_what_means_something_else() -> None:
    notices = loaded(SILENT).notices
    assert len(notices) == len(MEANINGS)
    for remedy, (section, line) in MEANINGS.items():
        assert sum(remedy in text for text in notices) == 1
        # the command line takes it back: the file is still one of torchtitan's
        now = loaded(SILENT, f"--{section}.{line.replace(' = ', '=')}").notices
        assert not any(remedy in text for text in now)
        assert len(now) == len(notices) - 1
    own = SILENT.replace("early_step_in_backward = false", "")
    assert loaded(own).notices == []
    assert len(loaded("", "--training.seed", "1").notices) == 1
