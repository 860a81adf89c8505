"""Each promise is held by tests, some of which guard every change."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


TESTS = Path(__file__).parent
PROMISES = tomllib.loads((TESTS / "promises.toml").read_text(encoding="utf-8"))
NOT_IN_GATE = {"plan-real": "a rehearsal beside the same job on real ranks takes 20 s"}


def marks(node: ast.expr) -> Iterator[tuple[str, list[str], bool]]:
    """Yield the name and arguments of each `pytest.mark` in `node`, and whether it keeps cases."""
    for mark in node.elts if isinstance(node, ast.List) else [node]:
        call = mark.func if isinstance(mark, ast.Call) else mark
        if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "pytest.mark":
            texts = [ast.literal_eval(a) for a in mark.args] if call.attr == "promise" else []
            yield call.attr, texts, bool(isinstance(mark, ast.Call) and mark.keywords)


@cache
def runs() -> dict[str, set[str]]:
    """Return where tests of each promise run: gate, CI."""
    result: dict[str, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file_marks = {
            name
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for name, _, _ in marks(node.value)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            own = [mark for decorator in node.decorator_list for mark in marks(decorator)]
            names = file_marks | {name for name, _, _ in own}
            names -= {name for name, _, keeps_cases in own if keeps_cases}
            for promise in {text for name, texts, _ in own if name == "promise" for text in texts}:
                if "long" not in names:
                    result[promise].add("CI")
                if not names & {"long", "slow"}:
                    result[promise].add("gate")
    return result


def test_each_mark_names_a_promise() -> None:
    assert set(runs()) == set(PROMISES)


@pytest.mark.parametrize("promise", PROMISES)
def test_each_promise_guards_changes(promise: str) -> None:
    wanted = {"CI"} if promise in NOT_IN_GATE else {"CI", "gate"}
    assert wanted <= runs()[promise]
