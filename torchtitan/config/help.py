"""`--help`: every key of a tree, with the docstring under its field."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass

from torchtitan.config.settings import SCALARS, Key, Rule, keys, literal, sections

ABOUT = (
    "usage: torchtitan train JOB [--section.key VALUE ...]\n\n"
    "JOB is a TOML file, or the name of one that comes with the library. It holds settings as "
    "[section] key = value; options override it. Values are written as in TOML, strings without "
    "quotes. An option without a value means true, several words make a list, and none unsets an "
    "optional setting."
)
INDENT = " " * 6


def format_help(tree: type) -> str:
    """Return every key of a tree, section by section."""
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, INDENT, INDENT, break_on_hyphens=False
    )
    lines = [ABOUT]
    for section, cls in sections(tree).items():
        lines.append(f"\n[{'.'.join(section)}]: {cls.__doc__}")
        for path, key in keys(tree).items():
            if path[:-1] == section:
                lines += [f"  --{'.'.join(path)}", wrapper.fill(describe(key))]
    return "\n".join(lines)


def describe(key: Key) -> str:
    """Return docstring, type, default and requirements of a key."""
    default = "not set" if key.default is None else literal(key.default)
    parts = [type_text(key), "required" if key.default is MISSING else f"default: {default}"]
    for need in key.requirements:
        parts.append(f"{' or '.join(map(literal, need.of))} needs {need}".lstrip())
    inner = keys(key.item) if is_dataclass(key.item) else {}
    columns = "".join(f" {path[0]}: {describe(item)}" for path, item in inner.items())
    return f"{docstring_of(key)} ({'; '.join(parts)}){columns}"


def type_text(key: Key) -> str:
    """Return type and rules of a key, such as `int, > 0` or `list of str`."""
    name = "table" if key.item not in SCALARS else key.item.__name__
    text = "table of any keys" if key.is_table else "list of " * key.list_depth + name
    return ", ".join([text, *(rule.text for rule in key.metadata if isinstance(rule, Rule))])


def docstring_of(key: Key) -> str:
    """Return the docstring under the field of a key, in one line."""
    cls, remark = key.field.metadata.get("source", (key.section, ""))
    return " ".join(f"{docstrings(cls).get(key.field.name, '')} {remark}".split())


@functools.cache
def docstrings(cls: type) -> Mapping[str, str]:
    """Return the string under each field of a dataclass, including its bases."""
    texts: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if is_dataclass(base)]):
        module = ast.parse(inspect.getsource(sys.modules[base.__module__]))
        nodes = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef))
        body = next((node.body for node in nodes if node.name == base.__name__), [])
        for statement, text in itertools.pairwise(body):
            match statement, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(doc))):
                    texts[name] = doc
    return texts
