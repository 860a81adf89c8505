"""The names in gate.py are those of tests, by the text of their files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.gate import KEPT, SLOW

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("names", [SLOW, KEPT], ids=["SLOW", "KEPT"])
def test_each_name_is_that_of_a_test(names: tuple[str, ...]) -> None:
    for name in names:
        path, _, test = name.partition("[")[0].partition("::")
        file = ROOT / path
        assert file.is_file(), name
        parsed = ast.parse(file.read_text(encoding="utf-8")).body
        tests = {node.name for node in parsed if isinstance(node, ast.FunctionDef)}
        assert not test or test in tests, name
