"""Custom code by import path: its keyword arguments, a model's sizes, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.naming import naming
from torchtitan.base.errors import ConfigError
from torchtitan.callbacks import HOOKS, CallbackRunner, build_callbacks
from torchtitan.config.settings import to_toml
from torchtitan.job import load_config
from torchtitan.models.families import find_model
from torchtitan.optim.schedule import find_decay
from torchtitan.resume_rules import (
    Job,
    trajectory_differences,
)

MODULE = """
from dataclasses import dataclass, replace
from examples import parallel_block

@dataclass(frozen=True, kw_only=True)
class Sizes(parallel_block.Sizes):
    kind: str = "round"
    '''Kind of it.'''

TINY = Sizes(**vars(parallel_block.TINY))
SPEC = replace(parallel_block.SPEC, name="mine", flavors={"tiny": TINY})
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if name.startswith("my_"):
            del sys.modules[name]


def own(module: str, *options: str) -> list[str]:
    return [f"--model.name={module}:SPEC", "--model.flavor=tiny", *options]


@pytest.mark.promise("nobody-forks")
def test_a_module_of_the_current_folder_brings_a_model_and_its_sizes(folder: Path) -> None:
    (folder / "my_model.py").write_text(MODULE)
    options = ("--model.options.kind=flat", "--model.options.branch_scale=0")
    config = load_config(own("my_model", *options))
    spec, sizes = find_model(config.model)
    assert (spec.name, sizes.branch_scale, sizes.kind) == ("mine", 0, "flat")  # type: ignore[attr-defined]


def test_its_settings_are_stored_and_compared(folder: Path) -> None:
    (folder / "my_model.py").write_text(MODULE)
    options = ("--model.options.kind=flat", "--model.options.branch_scale=0.5")
    config = load_config(own("my_model", *options))
    (folder / "stored.toml").write_text(to_toml(config))
    again = Job.stored_in(folder / "stored.toml").config
    assert to_toml(again) == to_toml(config)
    assert again.model.options == {"kind": "flat", "branch_scale": 0.5}
    plain = Job(config=load_config(["--model.name=llama3", "--model.flavor=tiny"]))
    for one, other in ((Job(config=config), plain), (plain, Job(config=config))):
        differences = trajectory_differences(one, other)
        assert any(difference.startswith("model.options") for difference in differences)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("def f():\n    return 1 / 0\nf()", "return 1 / 0"),
        (MODULE.replace('{"tiny": TINY}', "{}"), "torchtitan.models.spec.ModelSpec"),
    ],
)
def test_what_a_module_does_wrong_is_said(module: str, said: str, folder: Path) -> None:
    (folder / "my_model.py").write_text(module)
    with pytest.raises(ConfigError) as error:
        find_model(load_config(own("my_model")).model)
    [mistake] = error.value.mistakes
    assert "name" in str(mistake)
    assert said in str(mistake)


MY_HOOKS = """
class Hooks:
    def __init__(self, size, names=("x",)):
        self.size, self.names = size, names
    def on_end(self, reason): pass

def decay(progress, power=1):
    return 1 - progress**power
"""


def test_a_table_holds_path_and_arguments_of_a_callback(folder: Path) -> None:
    (folder / "my_hooks.py").write_text(MY_HOOKS)
    table = '[[training.callbacks]]\npath = "my_hooks:Hooks"\nsize = 4\nnames = ["y"]\n'
    (folder / "job.toml").write_text(table)
    for config in (
        load_config([f"--job.config_file={folder / 'job.toml'}"]),
        load_config(['--training.callbacks={path = "my_hooks:Hooks", size = 4, names = ["y"]}']),
    ):
        [hooks] = build_callbacks(config.training.callbacks)
        assert (hooks.size, hooks.names) == (4, ["y"])  # type: ignore[attr-defined]
        assert Job.stored(to_toml(config)).config.training == config.training


def test_options_reach_functions_and_count_on_resume(folder: Path) -> None:
    (folder / "my_hooks.py").write_text(MY_HOOKS)
    option = "--lr_scheduler.decay_options.power"
    jobs = [
        Job(config=load_config(["--lr_scheduler.decay_type=my_hooks:decay", f"{option}={power}"]))
        for power in (1, 2)
    ]
    scheduler = jobs[1].config.lr_scheduler
    assert find_decay(scheduler.decay_type, scheduler.decay_options)(0.5) == 0.75
    [difference] = trajectory_differences(*jobs)
    assert difference.startswith("lr_scheduler.decay_options: stored {power = 1}")
    with pytest.raises(ConfigError, match=naming(option.removesuffix(".power"), "decay_type")):
        load_config([f"{option}=2"])


class Noting:
    """Draws, and notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for hook in HOOKS:
            setattr(self, hook, lambda *given, hook=hook: self.note(hook, *given))

    def note(self, *call: Any) -> None:
        torch.rand(3)
        self.calls.append(call)


@pytest.mark.promise("nobody-forks")
def test_each_hook_is_called_and_its_draws_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda into, one: into.__setitem__(0, one))
    noting = Noting()
    hooks = CallbackRunner([noting], device=torch.device("cpu"))
    before = torch.get_rng_state()
    hooks.start("run")
    hooks.step(1, None)
    assert hooks.validation(1, {"loss": 2.0}) == {}
    hooks.checkpoint(1, Path("step-1"))
    hooks.end(None)
    assert noting.calls == [
        ("on_start", "run"),
        ("on_step", 1, None),
        ("on_validation", 1, {"loss": 2.0}),
        ("on_checkpoint", 1, Path("step-1")),
        ("on_end", None),
    ]
    assert torch.equal(before, torch.get_rng_state())
    assert not hooks.stops
    assert not hooks.has_failed()
