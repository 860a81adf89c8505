"""Things of the user's own by import path: sections and sizes they bring, and what is refused."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.assemble.model import find_model
from torchtitan.assemble.resume import warn_of_other_code
from torchtitan.base.errors import ConfigError
from torchtitan.base.own import is_import_path, load_object
from torchtitan.checkpoint.files import Content
from torchtitan.config.fields import fields
from torchtitan.config.toml_files import to_toml
from torchtitan.job import Config, load_config
from torchtitan.own import hash_own
from torchtitan.trajectory import Job

MODULE = """
from dataclasses import dataclass, replace
from examples import parallel_block

@dataclass(frozen=True)
class Mine:
    '''A section of mine.'''

    answer: int = 42
    '''The answer.'''
    names: tuple[str, ...] = ()

SECTIONS = {"mine": Mine}
SPEC = replace(parallel_block.SPEC, name="mine")
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


def test_a_module_of_the_current_folder_brings_model_sizes_and_section(folder: Path) -> None:
    (folder / "my_model.py").write_text(MODULE)
    config = load_config(own("my_model", "--mine.answer=43", "--model.branch_scale=0.5"))
    assert config.mine.answer == 43  # type: ignore[attr-defined]
    spec, sizes = find_model(config.model)
    assert (spec.name, sizes.branch_scale) == ("mine", 0.5)  # type: ignore[attr-defined]
    facts = fields(type(config))
    assert facts["mine", "answer"].help == "The answer."
    assert facts["model", "branch_scale"].help.startswith("Factor on what a block adds")
    assert load_config([]) == Config()  # nothing of it stays


def test_its_settings_are_stored_and_compared(folder: Path) -> None:
    (folder / "my_model.py").write_text(MODULE)
    config = load_config(own("my_model", "--mine.names", "a", "b", "--model.branch_scale=0.5"))
    (folder / "stored.toml").write_text(to_toml(config))
    again = Job.stored_in(folder / "stored.toml").config
    assert to_toml(again) == to_toml(config)
    assert again.mine.names == ("a", "b")  # type: ignore[attr-defined]


def test_the_help_has_its_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_model.py").write_text(MODULE)
    with pytest.raises(SystemExit):
        load_config([*own("my_model"), "--help"])
    shown = capsys.readouterr().out
    assert "--mine.answer" in shown
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
        (MODULE.replace('"mine": Mine', '"mine": 3'), "a section must be a dataclass, got 3"),
        (MODULE.replace("int = 42", "int"), "needs a default, and answer has none"),
        (
            MODULE.replace("tuple[str, ...] = ()", "dict[str, int] | None = None"),
            "must bring SECTIONS",
        ),
        (MODULE.replace('"mine": Mine', '"model": Mine'), "there is a section model already"),
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
        (["--mine.answr=3"], "[mine] has no key 'answr'; did you mean --mine.answer?"),
        (["--mine.answer=x"], "must be an integer"),
        (["--model.branch_scale=-1"], "must be greater than 0"),
        (["--mein.answer=3"], "there is no section [mein]"),
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
    stored = {"code": hash_own(config), "config": to_toml(config), "layout": {}}
    assert list(stored["code"]) == ["my_model:SPEC"]
    for text, is_warned in ((MODULE, False), (MODULE + "\n# another\n", True)):
        (folder / "my_model.py").write_text(text)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_other_code(Content(folder / "manifest.json", stored), now=config)
        assert ("my_model:SPEC" in caplog.text) == is_warned


def test_only_that_form_is_an_import_path() -> None:
    assert is_import_path("a.b:C.d")
    for other in ("llama3", "a:", ":b", "C:\\x", "s3://b", "a b:c", "", 3, None):
        assert not is_import_path(other)
    assert load_object("collections:abc.Mapping", key="k").__name__ == "Mapping"
