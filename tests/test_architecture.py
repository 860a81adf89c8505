"""Layers of the package, private names of torch and ceilings of lines, read from syntax trees.

Each rule is a function from files to complaints. `test_house` wants none of the repository's own
files; `test_rules_can_fail` plants a violation of each rule and wants it found.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A file imports from lower floors and from its own package alone.
FLOORS: Mapping[str, int] = {
    "base": 0,
    "config": 0,
    "settings": 0,
    "mesh": 1,
    "models": 1,
    "parallel": 2,
    "optim": 2,
    "data": 2,
    "metrics": 2,
    "checkpoint": 3,
    "validate": 3,
    "callbacks": 3,
    "finetune": 3,
    "trainer": 4,
    "hf": 4,
    "generate": 4,
    "job": 4,
    "resume_rules": 5,
    "layout": 6,
    "launch": 7,
    "build": 8,
    "train": 9,
    "api": 10,
    "tools": 11,  # nothing imports it but the command
    "__main__": 12,
}
# what a package may import beyond its own, where that is not "all lower floors"
NARROW: Mapping[str, frozenset[str]] = {
    "config": frozenset({"base.errors", "base.custom", "base.urls"}),
    "models": frozenset({"base"}),
    "settings": frozenset({"config", "base.custom", "base.errors", "base.urls", "models.sizes"}),
}
# a room's section is plain data, which every other room may read
SETTINGS = "settings"
# a file that stands higher than its package: what `import torchtitan` offers
HIGHER = {"torchtitan/__init__.py": "api"}
NAMES_CONFIG = ("api", "build", "job", "layout", "resume_rules", "tools", "train")
# what `import torchtitan.train` runs; lower them whenever less is imported, and never raise them
MAX_MODULES, MAX_LINES = 69, 10_970
# lines of the package, of the package without tools, and of tests: lower them whenever they fall
MAX_PACKAGE, MAX_WITHOUT_TOOLS, MAX_TESTS = 35_630, 28_610, 28_790


@dataclass(frozen=True)
class File:
    """A parsed source file; `path` is relative to the repository."""

    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, filename=self.path)

    @property
    def in_package(self) -> bool:
        return self.path.startswith("torchtitan/")

    @property
    def module(self) -> str:
        """torchtitan/models/rope.py -> torchtitan.models.rope"""
        parts = Path(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The part of the package it belongs to: models, or trainer for torchtitan/trainer.py."""
        if self.path in HIGHER:
            return HIGHER[self.path]
        if self.in_package and self.path.endswith(f"/{SETTINGS}.py"):
            return SETTINGS
        return f"{self.module}.".split(".")[1] if self.in_package else ""


def _imports(file: File) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of all that a file imports, names from modules included."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                inside = file.module.split(".")
                if not file.path.endswith("__init__.py"):
                    inside = inside[:-1]
                inside = inside[: len(inside) - node.level + 1]
                module = ".".join([*inside, module] if module else inside)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def floors(files: list[File]) -> Iterator[str]:
    for file in files:
        if not file.room:
            continue
        if file.room not in FLOORS:
            yield f"{file.path}: no floor for {file.room!r}; give it one in {Path(__file__).name}"
            continue
        for line, name in _imports(file):
            target = name.removeprefix("torchtitan.").split(".")[0]
            if not _within(name, "torchtitan") or target == file.room:
                continue
            if target == "torchtitan" or target.startswith("__"):  # the root: its version
                continue
            if name.split(".")[2:3] == [SETTINGS] and file.room != "config":
                continue
            if FLOORS.get(target, 99) >= FLOORS[file.room] and file.room not in NARROW:
                yield f"{file.path}:{line}: {file.room} imports {name}, which is no lower floor"
            allowed = NARROW.get(file.room)
            if allowed and not any(_within(name, f"torchtitan.{room}") for room in allowed):
                yield f"{file.path}:{line}: {file.room} may import only {sorted(allowed)}: {name}"


def models_import_torch_and_base_only(files: list[File]) -> Iterator[str]:
    known = {*sys.stdlib_module_names, "torch", "torchtitan"}
    for file in files:
        own = file.path.rpartition("/")[2].removesuffix(".py")  # transformers, in its one file
        for line, name in _imports(file):
            if file.room == "models" and name.split(".")[0] not in {*known, own}:
                yield f"{file.path}:{line}: models import torch and base alone: {name}"


def config_is_named_by_few(files: list[File]) -> Iterator[str]:
    for file in files:
        if file.room in NAMES_CONFIG:
            continue
        for node in ast.walk(file.tree):
            named = (
                (isinstance(node, ast.Name) and node.id == "Config")
                or (isinstance(node, ast.Attribute) and node.attr == "Config")
                or (isinstance(node, ast.alias) and node.name == "Config")
            )
            if named:
                line = getattr(node, "lineno", 0)
                yield f"{file.path}:{line}: names Config; take the section or the values instead"


def no_library_file_imports_scripts(files: list[File]) -> Iterator[str]:
    for file in files:
        for line, name in _imports(file):
            if file.in_package and (_within(name, "scripts") or _within(name, "tests")):
                yield f"{file.path}:{line}: the library imports {name}"


def _private_torch_modules(file: File) -> Iterator[str]:
    """Yield torch's private names in use, cut behind the first private part: torch._inductor; of
    torch._C, where all that is written in C++ lies, behind the next."""
    names = [name for _, name in _imports(file)]
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute):
            names.append(ast.unparse(node))
    for name in names:
        parts = name.split(".")
        for depth, part in enumerate(parts):
            if parts[0] == "torch" and part.startswith("_") and not part.startswith("__"):
                end = depth + 2 if part == "_C" else depth + 1
                if part != "_C" or len(parts) >= end:
                    yield ".".join(parts[:end])
                break


def moving_torch_apis_live_in_one_file_each(files: list[File]) -> Iterator[str]:
    users: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for private in _private_torch_modules(file):
            users[private].add(file.path)
        for _, name in _imports(file):
            if _within(name, "torch.distributed.pipelining"):
                users["torch.distributed.pipelining"].add(file.path)
    for name, paths in users.items():
        if len(paths) > 1:
            yield f"{', '.join(sorted(paths))}: {name} may be used in one file alone"


def _imported(file: File) -> Iterator[str]:
    """Yield the dotted names that are imported when a file is: not inside its functions."""
    nodes: list[ast.AST] = [file.tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        elif isinstance(node, ast.Import | ast.ImportFrom):
            alone = ast.Module([node], [])
            yield from (name for _, name in _imports(File(file.path, ast.unparse(alone))))
        else:
            nodes += ast.iter_child_nodes(node)


def closure(files: list[File], start: str) -> list[File]:
    """Return the files that run when the module `start` is imported, packages included."""
    by_module = {file.module: file for file in files}
    found: dict[str, File] = {}
    left = [start]
    while left:
        name = left.pop()
        if "." in name:
            left.append(name.rpartition(".")[0])
        if name in by_module and name not in found:
            found[name] = by_module[name]
            left += _imported(by_module[name])
    return list(found.values())


Rule = Callable[[list[File]], Iterator[str]]
RULES: list[Rule] = [
    floors,
    models_import_torch_and_base_only,
    config_is_named_by_few,
    no_library_file_imports_scripts,
    moving_torch_apis_live_in_one_file_each,
]


@cache
def _own_files() -> list[File]:
    paths = sorted([*ROOT.glob("torchtitan/**/*.py"), *ROOT.glob("scripts/**/*.py")])
    return [File(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in paths]


@pytest.mark.parametrize("rule", RULES)
def test_house(rule: Rule) -> None:
    files = _own_files()
    assert any(file.path == "torchtitan/base/log.py" for file in files)
    complaints = list(rule(files))
    assert not complaints, "\n" + "\n".join(complaints)


def test_what_a_run_imports_only_shrinks() -> None:
    files = closure(_own_files(), "torchtitan.train")
    assert {"torchtitan/trainer.py", "torchtitan/__init__.py"} <= {file.path for file in files}
    assert not any(file.room == "tools" for file in files)
    assert len(files) <= MAX_MODULES
    assert sum(len(file.source.splitlines()) for file in files) <= MAX_LINES


def test_the_library_only_gets_lighter() -> None:
    lines = {file.path: len(file.source.splitlines()) for file in _own_files()}
    package = {path: count for path, count in lines.items() if path.startswith("torchtitan/")}
    tools = sum(count for path, count in package.items() if path.startswith("torchtitan/tools/"))
    assert sum(package.values()) <= MAX_PACKAGE
    assert sum(package.values()) - tools <= MAX_WITHOUT_TOOLS
    tests = (path.read_text("utf-8") for path in ROOT.glob("tests/**/*.py"))
    assert sum(len(source.splitlines()) for source in tests) <= MAX_TESTS


PIPELINING = "from torch.distributed.pipelining import PipelineStage"
PLANTED: list[tuple[Rule, dict[str, str]]] = [
    (floors, {"torchtitan/base/x.py": "from torchtitan.models.rope import rope"}),
    (floors, {"torchtitan/config/x.py": "from torchtitan.mesh.settings import CommConfig"}),
    (floors, {"torchtitan/mesh/x.py": "from ..models import rope"}),
    (floors, {"torchtitan/models/x.py": "from torchtitan.mesh.dims import Dims"}),
    (floors, {"torchtitan/optim/x.py": "def f():\n    import torchtitan.parallel.fsdp"}),
    (floors, {"torchtitan/trainer.py": "from torchtitan.build import build_run"}),
    (floors, {"torchtitan/cellar/x.py": "import torch"}),
    (floors, {"torchtitan/optim/settings.py": "from torchtitan.base import log"}),
    (models_import_torch_and_base_only, {"torchtitan/models/x.py": "import numpy as np"}),
    (config_is_named_by_few, {"torchtitan/trainer.py": "from torchtitan.config import Config"}),
    (no_library_file_imports_scripts, {"torchtitan/train.py": "from scripts.goldens import f"}),
    (
        moving_torch_apis_live_in_one_file_each,
        {"torchtitan/parallel/x.py": PIPELINING, "torchtitan/models/y.py": PIPELINING},
    ),
    (
        moving_torch_apis_live_in_one_file_each,
        {
            "torchtitan/parallel/x.py": "from torch.distributed.fsdp import _fully_shard",
            "scripts/x.py": "from torch.distributed.fsdp._fully_shard import FSDPParam",
        },
    ),
]


@pytest.mark.parametrize(("rule", "planted"), PLANTED)
def test_rules_can_fail(rule: Rule, planted: dict[str, str]) -> None:
    complaints = list(rule([File(path, source) for path, source in planted.items()]))
    assert len(complaints) == 1, complaints
    assert all(path in complaints[0] for path in planted)
