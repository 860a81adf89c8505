"""Things of the user's own by import path: sections and sizes they bring, and what is refused."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.naming import naming
from torchtitan.base.custom import is_import_path, trust
from torchtitan.base.errors import ConfigError
from torchtitan.base.imports import load_object
from torchtitan.base.stored_json import StoredJSON
from torchtitan.build import describe_export
from torchtitan.callbacks import build_callbacks
from torchtitan.config.help import docstring_of
from torchtitan.config.schema import keys
from torchtitan.config.sources import to_toml
from torchtitan.job import Config, load_config, own_sections
from torchtitan.layout import find_layout
from torchtitan.models.families import find_model
from torchtitan.resume_rules import (
    Job,
    shaping_code,
    trajectory_differences,
    warn_of_other_code,
)
from torchtitan.tools.config import main as check

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
    config = load_config(own("my_model", "--model.kind=flat", "--model.branch_scale=0"))
    spec, sizes = find_model(config.model)
    assert (spec.name, sizes.branch_scale, sizes.kind) == ("mine", 0, "flat")  # type: ignore[attr-defined]
    facts = keys(type(config))
    assert docstring_of(facts["model", "kind"]).startswith("Kind of it.")
    assert docstring_of(facts["model", "branch_scale"]).startswith("Factor on what a block adds")
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
        (None, "my_model"),
        ("SPC = 1", "'SPC'"),
        ("SPEC = 1", "torchtitan.models.spec.ModelSpec"),
        ("import my_other", "'my_other'"),
        ("def f():\n    return 1 / 0\nf()", "return 1 / 0"),
        ("SPEC =", "SyntaxError"),
        (MODULE.replace('{"tiny": TINY}', "{}"), "torchtitan.models.spec.ModelSpec"),
        (MODULE + "TINY = TINYY", "'TINYY'"),
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
        (["--model.branch_scal=3"], "--model.branch_scale"),
        (["--model.branch_scale=x"], "--model.branch_scale x"),
        (["--model.branch_scale=-1"], "--model.branch_scale -1"),
    ],
)
def test_its_keys_are_as_strict_as_ours(options: list[str], said: str, folder: Path) -> None:
    (folder / "my_model.py").write_text(MODULE)
    with pytest.raises(ConfigError, match=naming(said)):
        load_config(own("my_model", *options))


LLAMA = """
from dataclasses import replace
from torchtitan.models import llama3

class Mine(llama3.Llama3):
    pass

SPEC = replace(llama3.SPEC, build=Mine)
"""


@pytest.mark.parametrize(
    ("code", "is_told"),
    [(LLAMA, True), (LLAMA.replace("build=Mine", "name='other'"), False), (MODULE, False)],
    ids=["own module", "built-in module", "no format"],
)
def test_an_export_tells_that_a_custom_module_is_not_checked(
    code: str, is_told: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "my_model.py").write_text(code)
    words = own("my_model", "--model.tokenizer_path=byte")
    describe_export(load_config(words), dtype=None)
    told = [message for message in caplog.messages if "NO_HF_FILES" in message]
    assert len(told) == is_told
    assert all("my_model:SPEC writes LlamaForCausalLM" in message for message in told)
    caplog.clear()
    export = ["--checkpoint.enable", "--checkpoint.last_save_in_hf"]
    assert check([*words, *export]) == (2 if code == MODULE else 0)
    assert any("NO_HF_FILES" in message for message in caplog.messages) == is_told


def test_a_resume_under_changed_code_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "my_model.py").write_text(MODULE)
    config = load_config(own("my_model"))
    stored = {"code": shaping_code(config), "config": to_toml(config), "layout": {}}
    assert list(stored["code"]) == ["my_model:SPEC"]
    for text, is_warned in ((MODULE, False), (MODULE + "\n# another\n", True)):
        (folder / "my_model.py").write_text(text)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_other_code(StoredJSON(folder / "manifest.json", stored), now=config)
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
    with pytest.raises(ConfigError, match=r"\['replicate'\]"):
        find_layout(load_config(own("my_plan")), world_size=1)


def test_only_that_form_is_an_import_path() -> None:
    assert is_import_path("a.b:C.d")
    for other in ("llama3", "a:", ":b", "C:\\x", "s3://b", "a b:c", "", 3, None):
        assert not is_import_path(other)
    trust(["collections:abc.Mapping"])
    assert load_object("collections:abc.Mapping", key="k").__name__ == "Mapping"


SECTIONED = '''
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Annotated, Literal
from annotated_types import Ge, MinLen

@dataclass{frozen}
class Mine:
    """Settings of mine."""
    size: int = 3
    """Size of it."""
    share: Annotated[float, Ge(0)] = 0.5
    kind: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ("x",)
    more: str | None = None
    made: tuple[int, ...] = field(default_factory=lambda: (1, 2))

    def violations(self):
        from torchtitan.base.errors import Violation
        if self.size == 7:
            yield Violation(("size", "kind"), "must not be 7; take another")

SECTIONS = {"mine": Mine}

class Hooks:
    def __init__(self, mine):
        self.mine = mine
    def on_end(self, reason): pass

def decay(progress):
    return 1 - progress
'''
HOOKED = "--training.callbacks=my_hooks:Hooks"


@pytest.mark.parametrize("frozen", ["", "(frozen=True)"])
def test_a_module_brings_sections_that_its_objects_read(frozen: str, folder: Path) -> None:
    (folder / "my_hooks.py").write_text(SECTIONED.replace("{frozen}", frozen))
    (folder / "job.toml").write_text('[mine]\nkind = "b"\nnames = ["y", "z"]\nmore = "m"\n')
    options = [HOOKED, "--mine.size=4", "--mine.made=7"]
    config = load_config([f"--job.config_file={folder / 'job.toml'}", *options])
    [hooks] = build_callbacks(config.training.callbacks, kwargs=own_sections(config))
    mine = hooks.mine  # type: ignore[attr-defined]
    assert (mine.size, mine.kind, mine.names, mine.more) == (4, "b", ("y", "z"), "m")
    assert (mine.share, mine.made) == (0.5, (7,))
    stored = Job.stored(to_toml(config)).config
    assert to_toml(stored) == to_toml(config)
    facts = keys(type(config))
    assert docstring_of(facts["mine", "size"]) == "Size of it."
    assert facts["mine", "kind"].choices == ("a", "b")
    assert load_config([]) == Config()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--mine.sise=4", "--mine.size"),
        ("--mine.size=4.5", "4.5"),
        ("--mine.share=-1", "-1"),
        ("--mine.kind=c", "c"),
        ("--mine.size=7", "7"),
        ("--yours.size=7", "[yours]"),
    ],
)
def test_own_sections_are_as_strict_as_ours(option: str, said: str, folder: Path) -> None:
    (folder / "my_hooks.py").write_text(SECTIONED.replace("{frozen}", ""))
    with pytest.raises(ConfigError, match=naming(said, option.partition("=")[0])):
        load_config([HOOKED, option])


def test_own_sections_are_in_the_help(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_hooks.py").write_text(SECTIONED.replace("{frozen}", ""))
    with pytest.raises(SystemExit):
        load_config([HOOKED, "--help"])
    shown = capsys.readouterr().out
    assert "Settings of mine." in shown
    assert "Size of it. (int; default: 3)" in " ".join(shown.split())


def test_sections_count_unless_only_watchers_bring_them(folder: Path) -> None:
    (folder / "my_hooks.py").write_text(SECTIONED.replace("{frozen}", ""))
    for shaping, counts in (([], False), (["--lr_scheduler.decay_type=my_hooks:decay"], True)):
        one, other = (
            Job(config=load_config([HOOKED, *shaping, f"--mine.size={size}"])) for size in (4, 5)
        )
        differences = trajectory_differences(one, other)
        assert [line.startswith("mine.size: stored 4") for line in differences] == [True] * counts
        assert shaping_code(one.config).keys() == {"my_hooks:decay"} & {"my_hooks:decay" * counts}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("SECTIONS = {'mine': 3}", "3"),
        ("SECTIONS = [3]", "SECTIONS"),
        ("SECTIONS = {'violations': Mine}", "[violations]"),
        ("SECTIONS = {'training': Mine}", "[training]"),
        ("@dataclass\nclass M:\n    n: int\nSECTIONS = {'m': M}", "n"),
        (
            "@dataclass\nclass M:\n    n: tuple[int, int] = (1, 2)\nSECTIONS = {'m': M}",
            "tuple[int, int]",
        ),
        (
            "@dataclass\nclass M:\n    n: Annotated[str, MinLen(1)] = 'a'\nSECTIONS = {'m': M}",
            "Gt, Ge, Lt, Le",
        ),
    ],
)
def test_what_is_no_section(code: str, said: str, folder: Path) -> None:
    (folder / "my_hooks.py").write_text(SECTIONED.replace("{frozen}", "") + code)
    with pytest.raises(ConfigError, match=naming("--training.callbacks", said)):
        load_config([HOOKED])


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        (["--training.loss=m:f", "--parallelism.tensor_parallel_degree=2"], "loss", "of the"),
        (
            ["--training.dataset=m:D", "--validation.holdout_fraction=0.1"],
            "holdout_fraction",
            "validation.dataset",
        ),
        (["--metrics.sinks=console"], "sinks", "console"),
        (["--training.dataset=m:D", "--training.dataset_path=x"], "dataset_path", "dataset"),
        (["--optimizer.name=m:O", "--optimizer.beta1=0.5"], "beta1", "name"),
    ],
)
def test_what_own_things_are_not_combined_with(
    options: list[str], key: str, said: str, folder: Path
) -> None:
    (folder / "m.py").write_text("f = D = O = print")
    with pytest.raises(ConfigError) as error:
        load_config(options)
    [mistake] = error.value.mistakes
    assert key in str(mistake)
    assert said in str(mistake)
    sys.modules.pop("m", None)


def test_stored_settings_miss_no_module_but_the_models(folder: Path) -> None:
    (folder / "my_hooks.py").write_text(SECTIONED.replace("{frozen}", ""))
    (folder / "my_model.py").write_text(MODULE)
    decay = "--lr_scheduler.decay_type=my_hooks:decay"
    config = load_config([*own("my_model"), HOOKED, decay, "--mine.size=4"])
    stored = to_toml(config)
    (folder / "my_hooks.py").unlink()
    del sys.modules["my_hooks"]
    again = Job.stored(stored)
    assert not hasattr(again.config, "mine")
    assert find_model(again.config.model)[0].name == "mine"
    (folder / "my_model.py").unlink()
    del sys.modules["my_model"]
    with pytest.raises(ConfigError, match=naming("[model] name", "'my_model:SPEC'")):
        Job.stored(stored)
