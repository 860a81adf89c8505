"""Lists of tables, and a table of any keys: read, written, merged, compared and refused."""

from __future__ import annotations

import pytest

from tests.config.jobs import Jobs, loaded
from torchtitan.config.settings import to_toml
from torchtitan.job import Config
from torchtitan.optim.settings import GroupConfig
from torchtitan.resume_rules import Job, trajectory_differences

GROUPS = """
[[optimizer.groups]]
params = "tok*"
lr = 1e-3
[[optimizer.groups]]
params = ["a", "b"]
weight_decay = 0
"""
BUILT = (
    GroupConfig(params=("tok*",), lr=1e-3),
    GroupConfig(params=("a", "b"), weight_decay=0.0),
)
INLINE = '[{params = "tok*", lr = 1e-3}, {params = ["a", "b"], weight_decay = 0}]'
OPTIONS = "[optimizer.options]\namsgrad = true\nfirst = 1.5\n"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (GROUPS, []),
        (f"[optimizer]\ngroups = {INLINE}", []),
        ("", ["--optimizer.groups", INLINE]),
        ("", [f"--optimizer.groups={INLINE}"]),
        ('[[optimizer.groups]]\nparams = "other"\nlr = 5', ["--optimizer.groups", INLINE]),
    ],
)
def test_a_list_of_tables(text: str, options: list[str], jobs: Jobs) -> None:
    assert jobs.load(text, *options).optimizer.groups == BUILT


def test_one_table_stands_for_a_list_of_one(jobs: Jobs) -> None:
    config = jobs.load("", "--optimizer.groups", '{params = "tok*", lr = 1e-3}')
    assert config.optimizer.groups == BUILT[:1]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (OPTIONS, []),
        ("[optimizer]\noptions = {amsgrad = true, first = 1.5}", []),
        ("[optimizer.options]\namsgrad = false\nfirst = 1.5", ["--optimizer.options.amsgrad"]),
        (OPTIONS + "other = 3", ["--optimizer.options.other", "none"]),
    ],
)
def test_a_table_of_any_keys_is_merged_key_by_key(
    text: str, options: list[str], jobs: Jobs
) -> None:
    config = jobs.load(text, *options)
    assert config.optimizer.options == {"amsgrad": True, "first": 1.5}


def test_both_are_written_and_read_back(jobs: Jobs) -> None:
    config = jobs.load(GROUPS + OPTIONS)
    assert jobs.load(to_toml(config)).optimizer == config.optimizer
    assert jobs.load(to_toml(Config())).optimizer == Config().optimizer


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("5", "must be a table"),
        ("[5]", "must be a table"),
        ('[{params = "a", lr = 1}, {lr = 1}]', "item 2: needs the key params"),
        ('[{params = "a", lrr = 1}]', "item 1: has no key 'lrr'; did you mean 'lr'?"),
        ('[{parms = "a", lr = 1}]', "item 1: has no key 'parms'; did you mean 'params'?"),
        ('[{params = "a", xyzzy = 1}]', "valid keys are params, lr, weight_decay"),
        ('[{params = "a", lr = true}]', "item 1: lr must be a number"),
        ('[{params = "a", lr = "1"}]', "item 1: lr must be a number"),
        ('[{params = "a", lr = -1}]', "item 1: lr must be > 0"),
        ('[{params = ["a", 3], lr = 1}]', "item 1: params item 2: must be a string"),
        ('[{params = "a"}]', "table 1 changes nothing; give it lr or weight_decay"),
        ("[{params = [], lr = 1}]", "table 1 needs a pattern in params"),
    ],
)
def test_wrong_tables(value: str, rule: str) -> None:
    [mistake] = loaded(f"[optimizer]\ngroups = {value}").mistakes
    assert mistake.startswith("job.toml: [optimizer] groups = ")
    assert rule in mistake


def test_a_wrong_table_of_any_keys() -> None:
    assert len(loaded("[optimizer]\noptions = 5").mistakes) == 1


def test_a_run_is_another_one_with_other_groups_or_options(jobs: Jobs) -> None:
    then = Job.stored(to_toml(jobs.load(GROUPS)))
    assert trajectory_differences(then, Job(config=jobs.load(GROUPS))) == []
    [said] = trajectory_differences(then, Job(config=jobs.load(OPTIONS)))[1:]
    assert said.startswith('optimizer.groups: stored [{params = ["tok*"], lr = 0.001}, ')
    assert said.endswith("now []")
