"""Files: inheritance, what is wrong in them, and the way back to TOML."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import torchtitan
from tests.config.jobs import Jobs, loaded, mistakes_of
from tests.config.test_cases import CASES
from torchtitan.base.errors import ConfigError
from torchtitan.config.settings import (
    literal,
    to_toml,
    values_of,
)
from torchtitan.job import Config, load_config

# --- a job that starts from a folder of Hugging Face -------------------------------------------

FOLDER = '[checkpoint]\nenable = true\ninitial_load_in_hf = true\ninitial_load_path = "base"\n'
OTHER = '[model]\nname = "qwen3"\ntokenizer_path = "byte"\n'
SIZE = 'flavor = "small"\n'


@pytest.mark.parametrize(
    ("text", "options", "model"),
    [
        ("", [], ("hf", "hf", "base")),
        (f"{OTHER}{SIZE}", [], ("qwen3", "small", "byte")),
        (OTHER, [], ("qwen3", "hf", "byte")),
        (f"{OTHER}{SIZE}", ["--model.flavor=hf"], ("hf", "hf", "base")),
        (OTHER, ["--model.flavor=hf", "--model.tokenizer_path=x"], ("hf", "hf", "x")),
    ],
)
def test_the_model_is_the_folders_where_the_job_asks_for_it(
    jobs: Jobs, text: str, options: list[str], model: tuple[str, str, str]
) -> None:
    got = jobs.load(f"{FOLDER}{text}", *options).model
    assert (got.name, got.flavor, got.tokenizer_path) == model


def test_the_folders_model_is_asked_for_from_python_too(jobs: Jobs) -> None:
    job = jobs.write(f"{FOLDER}{OTHER}{SIZE}")
    for asked in ({"flavor": "hf"}, dict.fromkeys(("name", "flavor", "tokenizer_path"))):
        model = torchtitan.load_config(job, model=asked).model
        assert (model.name, model.flavor, model.tokenizer_path) == ("hf", "hf", "base")


# --- inheritance -------------------------------------------------------------------------------


@pytest.mark.promise("settings")
def test_tables_merge_and_values_replace(jobs: Jobs) -> None:
    jobs.write("[training]\nsteps = 1\nseq_len = 1\nlocal_batch_size = 1", name="a/grand.toml")
    jobs.write(
        'base = "../a/grand.toml"\n[training]\nseq_len = 2\nlocal_batch_size = 2\n'
        '[optimizer]\nno_decay_params = ["a", "b"]',
        name="b/parent.toml",
    )
    config = jobs.load(
        'base = "b/parent.toml"\n[training]\nlocal_batch_size = 3\n'
        '[optimizer]\nno_decay_params = ["c"]',
        "--training.gc_freq=4",
    )
    training = config.training
    assert (training.steps, training.seq_len, training.local_batch_size) == (1, 2, 3)
    assert training.gc_freq == 4
    assert config.optimizer.no_decay_params == ("c",)


OPTIONS = '[optimizer]\nname = "SGD"\n[optimizer.options]\na = 1\nb = 2\n'


@pytest.mark.promise("settings")
@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        ("[optimizer.options]\nb = 3", [], {"b": 3}),
        ("[optimizer]\noptions = {}", [], {}),
        ("[optimizer.options]\nb = 3", ["--optimizer.options.c", "4"], {"b": 3, "c": 4}),
        ("", ["--optimizer.options.b", "none"], {"a": 1}),
        ("", ["--optimizer.options", "{c = 4}"], {"c": 4}),
        ("", ["--optimizer.options", "none"], {}),
    ],
)
def test_a_table_of_options_replaces_the_one_below_and_keys_of_the_command_line_are_added(
    text: str, options: list[str], wanted: dict[str, object]
) -> None:
    job = loaded(text, *options, base=OPTIONS)
    assert job.config.optimizer.options == wanted
    assert not job.mistakes


@pytest.mark.promise("settings")
def test_the_command_line_wins(jobs: Jobs) -> None:
    assert jobs.load("[training]\nsteps = 'x'", "--training.steps", "8").training.steps == 8


def test_a_circle_is_refused(jobs: Jobs) -> None:
    jobs.write('base = "job.toml"', name="other.toml")
    for base, place in (("other.toml", "other.toml"), ("./job.toml", "job.toml")):
        [mistake] = jobs.mistakes(f'base = "{base}"')
        assert mistake.startswith(f"{place}: base = ")


# --- jobs that come with the library -----------------------------------------------------------


def test_a_job_is_a_name_or_a_path(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(__file__).parents[2] / "train_configs" / "llama3_8b.toml"
    monkeypatch.chdir(tmp_path)
    for words in (["llama3_8b"], [str(file)], [f"--job.config_file={file}"]):
        assert load_config([*words, "--training.steps=7"]).training.steps == 7
        assert load_config(words).model.flavor == "8B"
    jobs.write("[training]\nsteps = 5", name="llama3_8b")  # one's own file comes first
    assert load_config(["llama3_8b"]).training.steps == 5
    for words, named in ((["llama3_9b"], "llama3_8b"), (["llama3_70b", "x"], "'x'")):
        with pytest.raises(ConfigError) as error:
            load_config(words)
        assert named in str(error.value)


# --- files that cannot be read -----------------------------------------------------------------


def test_unreadable_files_are_refused(jobs: Jobs) -> None:
    (jobs.folder / "latin.toml").write_bytes(b"# caf\xe9\n")
    for name in ("latin.toml", "far/away.toml"):
        [mistake] = mistakes_of(lambda name=name: load_config(["--job.config_file", name]))
        assert mistake.startswith(f"command line: --job.config_file {name}: ")


# --- the way back ------------------------------------------------------------------------------

TEXTS = [
    "with 'single' and \"double\"",
    "back\\slash",
    "line\nbreak\ttab",
    "ü 漢 🙂",
    "# = [x]",
    "",
]
TRICKY = [
    *([f"--job.description={text}"] for text in TEXTS),
    ["--optimizer.lr=1e-12", "--training.max_norm=inf", f"--training.steps={10**12}"],
    ["--optimizer.groups", f"{{params = {literal(TEXTS[:-1])}, lr = 0.5}}"],
    [f"--training.callbacks=[{{path = 'json:dumps', a = {literal(TEXTS[0])}, b = [1, 2.5]}}]"],
    [
        "--training.loss=json:dumps",
        f"--training.loss_options={{a = {literal(TEXTS[1])}, b = true}}",
    ],
    ["--parallelism.module_fqns_per_model_part", "a,layers.0", "norm"],
]
ACCEPTED = [*TRICKY, *(shlex.split(case[2]) for case in CASES if case[0] == "ok")]


@pytest.mark.promise("settings")
@pytest.mark.parametrize("options", ACCEPTED, ids=lambda options: " ".join(options)[:60])
def test_resolved_toml_and_options_load_to_an_equal_config(jobs: Jobs, options: list[str]) -> None:
    config = load_config(options)
    again = jobs.load(to_toml(config))
    assert replace(again, job=replace(again.job, config_file=None)) == config
    assert to_toml(again) == to_toml(config)
    assert to_toml(jobs.load(to_toml(config, only_changed=True))) == to_toml(config)
    words = (
        f"--{'.'.join(path)}={value if isinstance(value, str) else literal(value)}"
        for path, value in values_of(config).items()
    )
    assert load_config([*words]) == config


def test_resolved_toml_names_every_key_but_those_not_set() -> None:
    text = to_toml(Config())
    for path, value in values_of(Config()).items():
        header = f"\n[{'.'.join(path)}]"
        assert f"\n{path[-1]} = " in text or value is None or header in text
    # what not setting them means
    resolved = "[lr_scheduler]\nwarmup_steps = 200\n\n[training]\nsteps = 10000\n"
    assert to_toml(Config(), only_changed=True) == resolved
