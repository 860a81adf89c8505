"""`--help`: every key of a tree, with the docstring under its field."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from typing import Any

from rich_argparse import RichHelpFormatter

from torchtitan.config.schema import Key, keys, literal, sections
from torchtitan.config.sources import COMMAND_LINE, header, spell

USAGE = "python -m torchtitan.train --job.config_file FILE [--section.key VALUE ...]"
ABOUT = (
    "Settings of a job. A TOML file holds them as [section] key = value; options override the "
    "file. Values are written as in TOML, strings without quotes. An option without a value means "
    "true, several words make a list, and none unsets an optional setting."
)
METAVARS = {str: "TEXT", int: "INT", float: "NUMBER", bool: "true|false"}


def print_help(tree: type) -> None:
    """Print every key of a tree, section by section."""

    class Formatter(RichHelpFormatter):
        # square brackets are section names, not rich's markup
        text_markup = False
        help_markup = False
        group_name_formatter = str

    parser = argparse.ArgumentParser(
        usage=USAGE, description=ABOUT, formatter_class=Formatter, add_help=False
    )
    parser.add_argument("-h", "--help", action="store_true", help="Show this help and exit.")
    for section, cls in sections(tree).items():
        group = parser.add_argument_group(header(section), cls.__doc__)
        for path, key in keys(tree).items():
            if path[:-1] == section:
                group.add_argument(
                    spell(path, origin=COMMAND_LINE),
                    nargs="?" if key.kind is bool else "*" if key.kind is tuple else None,
                    metavar="TABLE" if key.kind is dict else METAVARS.get(key.item, "TABLE"),
                    help=describe(key).replace("%", "%%"),
                )
    parser.print_help()


def describe(key: Key) -> str:
    """Return docstring, type, default and requirements of a key."""
    default = "not set" if key.default is None else literal(key.default)
    parts = [key.type_text, "required" if key.default is MISSING else f"default: {default}"]
    for one in key.requires:
        parts.append(f"{' or '.join(map(literal, one.of))} needs {one.text}".lstrip())
    inner = keys(key.item) if is_dataclass(key.item) else {}
    columns = "".join(f" {path[0]}: {describe(inner_key)}" for path, inner_key in inner.items())
    return f"{docstring_of(key)} ({'; '.join(parts)}){columns}"


def docstring_of(key: Key) -> str:
    """Return the docstring under the field of a key."""
    cls, remark = key.source
    return " ".join(f"{docstrings(cls).get(key.name, '')} {remark}".split())


@functools.cache
def docstrings(cls: type) -> Mapping[str, str]:
    """Return the string under each field of a dataclass, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if is_dataclass(base)]):
        body = _class_bodies(sys.modules.get(base.__module__)).get(base.__name__, [])
        for statement, text in itertools.pairwise(body):
            match statement, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ):
                    found[name] = doc
    return found


@functools.cache
def _class_bodies(module: Any) -> Mapping[str, list[ast.stmt]]:
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):  # a module without a file
        return {}
    return {one.name: one.body for one in ast.walk(tree) if isinstance(one, ast.ClassDef)}
