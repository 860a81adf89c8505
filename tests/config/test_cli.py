"""Options: how words become values, and what --help says."""

from __future__ import annotations

import re

import pytest

from tests.config.jobs import Jobs, mistakes_of
from torchtitan.config.help import describe, docstring_of
from torchtitan.config.settings import keys, sections, to_toml, values_of
from torchtitan.job import Config, load_config


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--training.steps=20"], 20),
        (["--training.steps", "1", "--training.steps", "20"], 20),
        (["--optimizer.lr", "1e-3"], 1e-3),
        (["--training.max_norm", "inf"], float("inf")),
        (["--metrics.enable_tensorboard"], True),
        (["--metrics.enable_tensorboard=false"], False),
        (["--model.flavor", "20"], "20"),
        (["--model.flavor", '"quoted"'], "quoted"),
        (["--job.description", "two words"], "two words"),
        (["--job.description", "a=b"], "a=b"),
        (["--job.description", "5\nsteps = 6"], "5\nsteps = 6"),
        (["--optimizer.no_decay_params", "7"], ("7",)),
        (["--optimizer.no_decay_params", "[]"], ()),
        (["--lr_scheduler.total_steps", "none"], None),
    ],
)
def test_words_become_values(words: list[str], value: object) -> None:
    path = tuple(words[0].split("=")[0][2:].split("."))
    got = values_of(load_config(words))[path]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.promise("settings")
@pytest.mark.parametrize("words", [["a, b", "c"], ["a", "b", "c"], ["a,b,c"], ['["a", "b", "c"]']])
def test_lists_of_names(words: list[str]) -> None:
    job = load_config(["--optimizer.frozen_params", *words])
    assert job.optimizer.frozen_params == ("a", "b", "c")


def test_lists_of_lists_of_names(jobs: Jobs) -> None:
    wanted = (("tok_embeddings", "layers.0"), ("layers.1", "norm", "output"))
    key = "--parallelism.module_fqns_per_model_part"
    lists = '[["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]'
    words = ["tok_embeddings,layers.0", "layers.1,norm,output"]
    for given in ([key, *words], [key, lists], [f"{key}={lists}"]):
        assert load_config(given).parallelism.module_fqns_per_model_part == wanted
    config = jobs.load(f"[parallelism]\nmodule_fqns_per_model_part = {lists}")
    assert config.parallelism.module_fqns_per_model_part == wanted
    assert jobs.load(to_toml(config)) == jobs.load(to_toml(config), key, *words)
    for alone in (["norm"], ['["norm"]'], ['[["norm"]]']):
        assert load_config([key, *alone]).parallelism.module_fqns_per_model_part == (("norm",),)


@pytest.mark.promise("settings")
@pytest.mark.parametrize(
    ("words", "mistakes"),
    [
        (["--training.steps", "5\nseq_len = 6"], ["--training.steps 5\\nseq_len = 6"]),
        (["--model.name", "a\udc80"], ["--model.name a\\udc80"]),
        (
            ["--training.steps", "x", "--training.seq_len", "y", "z.toml", "--a.b", "c"],
            ["'z.toml'", "--training.steps x", "--training.seq_len y", "--a.b c"],
        ),
    ],
)
def test_wrong_words(words: list[str], mistakes: list[str]) -> None:
    messages = mistakes_of(lambda: load_config(words))
    assert len(messages) == len(mistakes)
    for mistake in mistakes:
        assert any(text.startswith(f"command line: {mistake}") for text in messages), messages


def test_help_describes_every_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit_info:
        load_config(["--training.steps", "ten", "--help"])
    assert exit_info.value.code == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output  # not a terminal
    flat = re.sub(r"\s+", " ", output)
    for path, cls in sections(Config).items():
        assert f"[{'.'.join(path)}]: {cls.__doc__}" in flat
    for path, facts in keys(Config).items():
        assert docstring_of(facts), path
        assert f"--{'.'.join(path)} {describe(facts)}" in flat, path
    assert "--training.seq_len Tokens per sample. (int, > 0 and <= 1e+09; default: 2048)" in flat
    assert "--memory_estimation.enable" not in flat
