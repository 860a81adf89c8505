"""The command line: `--section.key value` for every key, and `--help` from the field docstrings.

Words are only split here; types and names are checked later, in the same place as those of files,
so that a wrong option joins the same report instead of ending the program at once, which is why
argparse prints the help and no more. Values are written as in TOML (1e-3, true, ["a", "b"], inf),
but strings need no quotes: a shell has eaten them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torchtitan.config.fields import FieldFacts, fields, sections
from torchtitan.config.layers import COMMAND_LINE, CONFIG_FILE, Layer, Path, Setting, section, spell
from torchtitan.config.toml_files import read_value

USAGE = "python -m torchtitan.train --job.config_file FILE [--section.key VALUE ...]"
ABOUT = (
    "Every setting of a job. A TOML file holds them as [section] key = value; an option here wins "
    "over the file. Values are written as in TOML, strings without quotes; a switch alone means "
    "true, several words make a list, and none takes an optional setting back."
)
HELP = ("-h", "--help")
METAVARS = {str: "TEXT", int: "INT", float: "NUMBER", bool: "true|false"}
OPTION = re.compile(r"--[\w.-]+(=|\Z)|-[^\d.\s]\S*\Z")


def read_command_line(
    argv: Sequence[str] | Layer, *, tree: type, renamed: Mapping[Path, Path]
) -> tuple[Layer, list[str]]:
    """Split the words into settings, and mistakes for words that belong to no option.

    Settings that come from Python are returned as they are.
    """
    if isinstance(argv, dict):
        return argv, []
    layer: Layer = {}
    mistakes = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            mistakes.append(f"{COMMAND_LINE}: {word!r} belongs to no option{_remedy(word)}")
            continue
        name, has_value, value = word[2:].partition("=")
        path = tuple(name.split("."))
        facts = fields(tree).get(renamed.get(path, path))
        given = [value] if has_value else []
        takes_all = facts is None or facts.kind is tuple
        while words and not OPTION.match(words[0]) and not has_value and (takes_all or not given):
            given.append(words.pop(0))
        layer[path] = _setting(path, words=given, facts=facts)
    return layer, mistakes


def print_help(tree: type) -> None:
    """Print every key of the tree, section by section."""
    import argparse  # here: a start that shows no help needs neither

    from rich_argparse import RichHelpFormatter

    class Formatter(RichHelpFormatter):
        # Square brackets are section names here, not rich's markup.
        text_markup = False
        help_markup = False
        group_name_formatter = str

    parser = argparse.ArgumentParser(
        usage=USAGE, description=ABOUT, formatter_class=Formatter, add_help=False
    )
    parser.add_argument("-h", "--help", action="store_true", help="Show this help and exit.")
    for path, cls in sections(tree).items():
        group = parser.add_argument_group(section(path), cls.__doc__)
        for key, facts in fields(tree).items():
            if key[:-1] == path:
                group.add_argument(
                    spell(key, origin=COMMAND_LINE),
                    nargs="?" if facts.kind is bool else "*" if facts.kind is tuple else None,
                    metavar=METAVARS.get(facts.item, "TABLE"),
                    help=facts.text.replace("%", "%%"),
                )
    parser.print_help()


def _setting(path: Path, *, words: Sequence[str], facts: FieldFacts | None) -> Setting:
    """Give the words of one option their value; none at all means true."""
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
    value = read_value(word)
    # selective_ac_option = 2 means the text "2"; only quotes and lists are TOML's there
    is_text = facts is not None and facts.item is str
    takes_list = facts is not None and facts.kind is tuple
    return word if is_text and not isinstance(value, (str, list) if takes_list else str) else value


def _remedy(word: str) -> str:
    if word.startswith("-"):
        return f"; a value that begins with - is written --section.key={word}"
    is_file = word.endswith(".toml")
    return f"; write {spell(CONFIG_FILE, origin=COMMAND_LINE)} {word}" if is_file else ""
