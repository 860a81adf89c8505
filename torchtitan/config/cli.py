"""The command line: `--section.key value` for every key, and `--help` from the field docstrings.

argparse splits the words and prints the help; types and names are checked later, in the same place
as those of files, so that a wrong option joins the same report instead of ending the program at
once. Values are written as in TOML (1e-3, true, ["a", "b"], inf), but strings need no quotes: a
shell has eaten them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from rich_argparse import RichHelpFormatter

from torchtitan.base.errors import ConfigError
from torchtitan.config.compat import RENAMED
from torchtitan.config.fields import FieldFacts, fields, sections
from torchtitan.config.layers import COMMAND_LINE, Layer, Path, Setting, literal, section, spell
from torchtitan.config.toml_files import parse
from torchtitan.config.unbuilt import UNBUILT

USAGE = "python -m torchtitan.train --job.config_file FILE [--section.key VALUE ...]"
ABOUT = (
    "Every setting of a job. A TOML file holds them as [section] key = value; an option here wins "
    "over the file. Values are written as in TOML, strings without quotes; a switch alone means "
    "true, several words make a list, and none takes an optional setting back."
)


METAVARS = {str: "TEXT", int: "INT", float: "NUMBER", bool: "true|false"}


class _Formatter(RichHelpFormatter):
    # Square brackets are section names here, not rich's markup.
    text_markup = False
    help_markup = False
    group_name_formatter = str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report through the one error that also carries the mistakes of files."""
        raise ConfigError(f"{COMMAND_LINE}: {message}")


def read_command_line(argv: Sequence[str]) -> tuple[Layer, list[str]]:
    """Split the words into settings, and mistakes for words that belong to no option.

    Prints the help and raises SystemExit(0) on --help.
    """
    try:
        found, rest = build_parser().parse_known_args(list(argv))
    except ConfigError as error:
        return {}, [str(mistake) for mistake in error.mistakes]
    values = vars(found)
    if values.pop("help"):
        build_parser(for_help=True).print_help()
        raise SystemExit(0)
    layer: Layer = {}
    for name, words in values.items():
        path = tuple(name.split("."))
        layer[path] = _setting(path, words=[words] if isinstance(words, str) else words)
    unknown, stray = _unknown(rest)
    return layer | unknown, stray


def build_parser(*, for_help: bool = False) -> argparse.ArgumentParser:
    """Build the parser: every key of the schema with help, older and unbuilt ones without.

    To argparse a value may be missing, so that it is reported with all else; the help says it must
    not.
    """
    parser = _Parser(
        usage=USAGE,
        description=ABOUT,
        formatter_class=_Formatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="Show this help and exit.")
    for path, cls in sections().items():
        group = parser.add_argument_group(section(path), cls.__doc__)
        for key, facts in fields().items():
            if key[:-1] == path:
                _add_option(group, key=key, facts=facts, for_help=for_help)
    for key in (RENAMED.keys() | UNBUILT.keys()) - fields().keys():
        parser.add_argument(
            spell(key, origin=COMMAND_LINE),
            nargs="*",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    return parser


def _add_option(
    group: argparse._ArgumentGroup, *, key: Path, facts: FieldFacts, for_help: bool
) -> None:
    nargs: str | None = "*" if facts.kind is tuple else "?"
    if for_help and facts.kind not in (bool, tuple):
        nargs = None
    default = "not set" if facts.default is None else literal(facts.default)
    text = f"{facts.help} ({facts.type_text}; default: {default})"
    group.add_argument(
        spell(key, origin=COMMAND_LINE),
        nargs=nargs,
        const=() if nargs == "?" else None,
        default=argparse.SUPPRESS,
        metavar=METAVARS[facts.item],
        help=text.replace("%", "%%"),
    )


def _setting(path: Path, *, words: Sequence[str]) -> Setting:
    """Give the words of one option their value; none at all means true."""
    facts = fields().get(RENAMED.get(path, path))
    given = " ".join(words)
    problem = ""
    if not words and facts is not None and facts.kind is not bool:
        problem = f"needs a value ({facts.type_text})"
    try:
        given.encode()
    except UnicodeEncodeError:  # bytes that nobody could write down in the resolved TOML
        given = given.encode(errors="backslashreplace").decode()
        problem = "must be UTF-8"
    values = [_value(word, facts=facts) for word in words] or [True]
    value = values if len(values) > 1 else values[0]
    return Setting(value, COMMAND_LINE, path, given, problem)


def _value(word: str, *, facts: FieldFacts | None) -> object:
    """Read a word as the TOML value it is, or as a bare string where text is due."""
    if word.lower() == "none" and (facts is None or facts.unset_by_none):
        return None
    try:
        table = parse(f"value = {word}", origin=COMMAND_LINE)
    except ConfigError:
        return word
    value = table["value"]
    if facts is not None and facts.item is str:
        # selective_ac_option = 2 means the text "2"; only quotes and lists are TOML's here
        is_toml = isinstance(value, (str, list) if facts.kind is tuple else str)
        return value if is_toml else word
    return value if len(table) == 1 else word


def _unknown(rest: Sequence[str]) -> tuple[Layer, list[str]]:
    """Sort what argparse did not know into options, to be answered with the nearest, and others."""
    layer: Layer = {}
    mistakes = []
    words = list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            mistakes.append(f"{COMMAND_LINE}: {word!r} belongs to no option{_remedy(word)}")
            continue
        name, _, given = word.partition("=")
        if not given and words and not words[0].startswith("--"):
            given = words.pop(0)
        path = tuple(name[2:].split("."))
        layer[path] = Setting(given, COMMAND_LINE, path, given)
    return layer, mistakes


def _remedy(word: str) -> str:
    if word.startswith("-"):  # argparse takes -1 for a value, but -1e-3 for an option
        return f"; a value that begins with - is written --section.key={word}"
    return f"; write --job.config_file {word}" if word.endswith(".toml") else ""
