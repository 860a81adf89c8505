"""Lists of tables, and a table of any keys: read, written, merged and compared."""

from __future__ import annotations

import pytest

from tests.config.jobs import Jobs
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
        ('[[optimizer.groups]]\nparams = "other"\nlr = 5', ["--optimizer.groups", INLINE]),
    ],
)
def test_a_list_of_tables(text: str, options: list[str], jobs: Jobs) -> None:
    assert jobs.load(text, *options).optimizer.groups == BUILT
    one = jobs.load("", "--optimizer.groups", '{params = "tok*", lr = 1e-3}')
    assert one.optimizer.groups == BUILT[:1]


def test_both_are_written_and_read_back(jobs: Jobs) -> None:
    config = jobs.load(GROUPS + OPTIONS)
    assert config.optimizer.options == {"amsgrad": True, "first": 1.5}
    assert jobs.load(to_toml(config)).optimizer == config.optimizer
    assert jobs.load(to_toml(Config())).optimizer == Config().optimizer


def test_a_run_is_another_one_with_other_groups_or_options(jobs: Jobs) -> None:
    then = Job.stored(to_toml(jobs.load(GROUPS)))
    assert trajectory_differences(then, Job(config=jobs.load(GROUPS))) == []
    [line] = trajectory_differences(then, Job(config=jobs.load(OPTIONS)))[1:]
    assert line.startswith('optimizer.groups: stored [{params = ["tok*"], lr = 0.001}, ')
    assert line.endswith("now []")
