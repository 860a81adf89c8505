"""The family that docs/extend.md writes, as a module and for a while in MODELS."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from torchtitan.models.families import MODELS
from torchtitan.models.spec import ModelSpec

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


def write_family(folder: Path) -> Path:
    """Write the page's one block of Python as a file."""
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    file = folder / "own_family_of_the_page.py"
    file.write_text(code)
    return file


def write_layers_without_positions(folder: Path) -> Path:
    """Write the page's family with layers without positions as a file."""
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    [code] = [block for block in blocks if "class NopeBlock" in block]
    file = folder / "nope_of_the_page.py"
    file.write_text(code)
    return file


def load_family(file: Path) -> Any:
    found = importlib.util.spec_from_file_location(file.stem, file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@contextmanager
def in_models(spec: ModelSpec) -> Iterator[None]:
    """Add a family, as a module with a SPEC."""
    module = ModuleType(f"own_family_{spec.name}")
    module.SPEC = spec  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    with patch.object(MODELS, "_modules", {**MODELS._modules, spec.name: module.__name__}):
        yield
    del sys.modules[module.__name__]
