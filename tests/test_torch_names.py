"""Every name of torch that the package reads exists in the torch that is installed.

Read from the sources, so that names in branches for a GPU, which no test here runs, are looked up
too. A name that only some builds or releases have stands in `SOME_BUILDS`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch

import torchtitan

SOURCES = Path(torchtitan.__file__).parent
SOME_BUILDS: dict[str, str] = {
    "torch._C._cuda_attach_out_of_memory_observer": "built with CUDA",
    "torch._C._distributed_c10d._dump_nccl_trace": "built with NCCL",
    "torch.distributed.pipelining.schedules.InferenceMode": "2.12 and newer",
    "torch.distributed.pipelining.schedules.InferenceMode.STATIC": "2.12 and newer",
}


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield each line and the dotted names of torch that it reads, through aliases of imports."""
    tree = ast.parse(source)
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in aliases:
            yield node.lineno, ".".join([aliases[inner.id], *reversed(parts)])


def exists(name: str) -> bool:
    """Look a name up. Attributes of values, not of modules and classes, are not followed."""
    found, path = torch, "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if found is None:  # the default group, while there is none
            return True
        if not hasattr(found, part):
            try:
                found = import_module(path)
            except ImportError:
                return False
        else:
            found = getattr(found, part)
    return True


def missing(source: str) -> list[tuple[int, str]]:
    return [
        (line, name) for line, name in names(source) if name not in SOME_BUILDS and not exists(name)
    ]


def test_every_name_exists() -> None:
    found = {
        f"{path.relative_to(SOURCES)}:{line}": name
        for path in sorted(SOURCES.rglob("*.py"))
        for line, name in missing(path.read_text())
    }
    assert found == {}


def test_a_name_that_is_gone_is_told_with_its_line() -> None:
    source = "import torch.distributed as dist\nif dist.is_nccl_available():\n    dist._gone()\n"
    assert missing(source) == [(3, "torch.distributed._gone")]
    assert missing("from torch._C import gone") == [(1, "torch._C.gone")]
