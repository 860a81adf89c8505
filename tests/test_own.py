"""Things of the user's own by import path: sections and sizes they bring, and what is refused."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.assemble.find import find_layout
from torchtitan.assemble.model import find_model
from torchtitan.assemble.resume import warn_of_other_code
from torchtitan.base.errors import ConfigError
from torchtitan.base.own import is_import_path, load_object
from torchtitan.checkpoint.files import Content
from torchtitan.config.fields import fields
from torchtitan.config.toml_files import to_toml
from torchtitan.job import Config, load_config
from torchtitan.own import hash_own
from torchtitan.trajectory import Job, trajectory_differences

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


def test_a_module_of_the_current_folder_brings_a_model_and_its_sizes(folder: Path) -> None:
    (folder / "my_model.py").write_text(MODULE)
    config = load_config(own("my_model", "--model.kind=flat", "--model.branch_scale=0"))
    spec, sizes = find_model(config.model)
    assert (spec.name, sizes.branch_scale, sizes.kind) == ("mine", 0, "flat")  # type: ignore[attr-defined]
    facts = fields(type(config))
    assert facts["model", "kind"].help.startswith("Kind of it.")
    assert facts["model", "branch_scale"].help.startswith("Factor on what a block adds")
    assert load_config([]) == Config()  # nothing of it stays


def test_its_settings_are_stored_and_compared(folder: Path) -> None:
    (folder / "my_model.py").write_text(MODULE)
    config = load_config(own("my_model", "--model.kind=flat", "--model.branch_scale=0.5"))
    (folder / "stored.toml").write_text(to_toml(config))
    again = Job.stored_in(folder / "stored.toml").config
    assert to_toml(again) == to_toml(config)
    assert again.model.kind == "flat"  # type: ignore[attr-defined]
    plain = Job(config=load_config(["--model.name=llama3", "--model.flavor=tiny"]))
    for one, other in ((Job(config=config), plain), (plain, Job(config=config))):
        differences = trajectory_differences(one, other)
        assert any(difference.startswith("model.kind") for difference in differences)


def test_the_help_has_its_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_model.py").write_text(MODULE)
    with pytest.raises(SystemExit):
        load_config([*own("my_model"), "--help"])
    shown = capsys.readouterr().out
    assert "--model.kind" in shown
    assert "--model.branch_scale" in shown


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, "there is no my_model; start where my_model lies"),
        ("SPC = 1", "my_model has no SPEC; did you mean 'SPC'?"),
        ("SPEC = 1", "must name a torchtitan.models.spec.ModelSpec"),
        ("import my_other", "No module named 'my_other'"),
        ("def f():\n    return 1 / 0\nf()", "line 2, in f\n    return 1 / 0"),
        ("SPEC =", "SyntaxError"),
        (MODULE.replace('{"tiny": TINY}', "{}"), "must name a torchtitan.models.spec.ModelSpec"),
        (MODULE + "TINY = TINYY", "name 'TINYY' is not defined"),
    ],
)
def test_what_a_module_does_wrong_is_said(module: str | None, said: str, folder: Path) -> None:
    if module is not None:
        (folder / "my_model.py").write_text(module)
    with pytest.raises(ConfigError) as error:
        find_model(load_config(own("my_model")).model)
    [mistake] = error.value.mistakes
    assert "name" in str(mistake)
    assert said in str(mistake)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model.branch_scal=3"], "did you mean --model.branch_scale?"),
        (["--model.branch_scale=x"], "must be a number"),
        (["--model.branch_scale=-1"], "must be greater than or equal to 0"),
    ],
)
def test_its_keys_are_as_strict_as_ours(options: list[str], said: str, folder: Path) -> None:
    (folder / "my_model.py").write_text(MODULE)
    with pytest.raises(ConfigError) as error:
        load_config(own("my_model", *options))
    assert said in str(error.value)


def test_a_resume_under_changed_code_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "my_model.py").write_text(MODULE)
    config = load_config(own("my_model"))
    stored = {"code": hash_own(config.model), "config": to_toml(config), "layout": {}}
    assert list(stored["code"]) == ["my_model:SPEC"]
    for text, is_warned in ((MODULE, False), (MODULE + "\n# another\n", True)):
        (folder / "my_model.py").write_text(text)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_other_code(Content(folder / "manifest.json", stored), now=config)
        assert ("my_model:SPEC" in caplog.text) == is_warned


def test_help_and_other_mistakes_are_shown_where_a_model_is_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        load_config([*own("my_model"), "--help"])
    assert "--training.steps" in capsys.readouterr().out
    with pytest.raises(ConfigError) as error:
        load_config([*own("my_model"), "--training.stps=3"])
    assert len(error.value.mistakes) == 2


def test_what_a_model_raises_while_it_is_built_is_told_in_its_own_lines(folder: Path) -> None:
    (folder / "my_model.py").write_text(
        MODULE + "def build(config):\n    return config.missing_one\n"
        "SPEC = replace(SPEC, build=build)\n"
    )
    with pytest.raises(ConfigError, match=r"return config\.missing_one"):
        find_layout(load_config(own("my_model")), world_size=1)
    plan = "SPEC = replace(SPEC, tensor_plan={'layers.*.norm': 'replicate'})\n"
    (folder / "my_plan.py").write_text(MODULE + plan)
    with pytest.raises(ConfigError, match="got replicate"):
        find_layout(load_config(own("my_plan")), world_size=1)


def test_only_that_form_is_an_import_path() -> None:
    assert is_import_path("a.b:C.d")
    for other in ("llama3", "a:", ":b", "C:\\x", "s3://b", "a b:c", "", 3, None):
        assert not is_import_path(other)
    assert load_object("collections:abc.Mapping", key="k").__name__ == "Mapping"
