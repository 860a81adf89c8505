"""Files and command line to a tree of settings, or to the list of all that is wrong with them.

One pipeline for every source: another program's keys, unknown names, types and values, what fields
need of each other, rules of sections. Each stage takes out what it refuses and hands on the rest,
with defaults in the gaps, so that one run of the command shows every mistake instead of the first.

Where a value comes from is settled by order alone: the base file, the file, the command line, each
over the one before. Environment variables are left out on purpose: a run's config.toml says it all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from torchtitan.base.errors import ConfigError, Violation, did_you_mean
from torchtitan.config.cli import HELP, print_help, read_command_line
from torchtitan.config.fields import (
    FieldFacts,
    fields,
    section_fields,
    sections,
    value_at,
    values_of,
)
from torchtitan.config.foreign import Foreign
from torchtitan.config.layers import (
    COMMAND_LINE,
    CONFIG_FILE,
    Findings,
    Layer,
    Path,
    Setting,
    literal,
    spell,
)
from torchtitan.config.names import Names
from torchtitan.config.needs import GIVEN
from torchtitan.config.toml_files import read_layers, read_value

logger = logging.getLogger(__name__)
T = TypeVar("T")

RULES = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
    "dict_type": "must be a table",
    "string_too_short": "must not be empty",
}
LARGEST = 10**12
"""Of an integer without a bound of its own: what is computed from it fits into 64 bits."""


@runtime_checkable
class HasRules(Protocol):
    """A section, or the whole tree, with rules that tie its keys to each other."""

    def violations(self) -> Iterator[Violation]:
        """Yield each rule that does not hold, with keys relative to the section."""


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """The settings as far as they are valid, what is wrong with the rest, and remarks."""

    config: T
    given: Layer
    """What files and command line say, in today's spelling, and where."""
    mistakes: list[str]
    notices: list[str]
    foreign_file: str | None
    """The first file with a key that only another program knows."""

    def checked(self) -> T:
        """Return the settings; raises ConfigError with all mistakes if there are any."""
        if self.mistakes:
            raise ConfigError(self.mistakes)
        return self.config

    def wording(self) -> AbstractContextManager[None]:
        """Add to what a ConfigError says of these settings where the value was given."""
        return worded(self.given)


@contextmanager
def worded(given: Layer) -> Iterator[None]:
    """Add to what a ConfigError says of settings where the value was given."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([_word(one, given=given) for one in error.mistakes]) from error


def load(
    tree: type[T],
    argv: Sequence[str] | Layer,
    *,
    foreign: Foreign,
    extend: Callable[[Layer], type[T]] | None = None,
) -> Loaded[T]:
    """Read the file that `argv` names, apply its other options, check everything.

    `argv`: a command line, or the settings that Python gives in its place. `extend` returns the
    tree to check by, from what files and `argv` say. Notices are logged as warnings.

    Raises ConfigError with every mistake; prints the help and raises SystemExit(0) on --help.
    """
    words = argv if isinstance(argv, dict) else [word for word in argv if word not in HELP]
    options, mistakes = read_command_line(words, tree=tree, renamed=foreign.new_names)
    layers: list[Layer] = []
    file_mistakes: list[str] = []
    file = options.get(CONFIG_FILE)
    is_read = True
    if file is not None and file.value is not None:
        try:
            layers = read_layers(file)
        except ConfigError as error:
            is_read = False
            file_mistakes += map(str, error.mistakes)
    if extend is not None:
        given = {path: one for layer in (*layers, options) for path, one in layer.items()}
        try:
            with worded(given):
                tree = extend(given)
        except ConfigError as error:
            file_mistakes += map(str, error.mistakes)
        options, mistakes = read_command_line(words, tree=tree, renamed=foreign.new_names)
    mistakes = [*file_mistakes, *mistakes]
    if len(words) < len(argv):
        print_help(tree)
        raise SystemExit(0)
    loaded = build(tree, [*layers, options], foreign=foreign, check_rules=is_read)
    for notice in loaded.notices:
        logger.warning(notice)
    if mistakes:
        raise ConfigError([*mistakes, *loaded.mistakes])
    loaded.checked()
    return loaded


def build(
    tree: type[T], layers: Sequence[Layer], *, foreign: Foreign, check_rules: bool = True
) -> Loaded[T]:
    """Merge the layers, the last one wins, and check everything.

    Without `check_rules` the rules across fields are left out: for when a file could not be read,
    and for settings that an earlier version has checked.
    """
    found = Findings()
    merged: Layer = {}
    for raw in layers:
        _check_place(raw, found)
        layer = _with_tables(foreign.translate(raw, found), below=merged, tree=tree)
        for pair in _alternatives(tree):
            for one, other in (pair, pair[::-1]):
                if one in layer and GIVEN.holds(layer[one].value):
                    merged.pop(other, None)
        merged |= layer
    if other_job := foreign.other_job(merged):
        return Loaded(tree(), merged, [other_job], [], None)
    valid = foreign.without_theirs(merged, found, tree=tree)
    valid = Names(tree, theirs=foreign.names).without_unknown(valid, found)
    # `none` on the command line resets: the default is right again
    valid = {path: setting for path, setting in valid.items() if setting.value is not None}
    config = _section(tree, (), settings=valid, found=found)
    if check_rules:
        given = {path for path, setting in merged.items() if setting.value is not None}
        refused = given - valid.keys() - foreign.keys.keys()
        for violation in violations(config):
            if refused.isdisjoint(tuple(key.split(".")) for key in violation.keys):
                said = found.notices if violation.is_notice else found.mistakes
                said.append(_word(violation, given=valid))
    theirs = (
        setting.origin
        for layer in layers
        for path, setting in layer.items()
        if setting.is_in_file and foreign.holds(path, setting)
    )
    return Loaded(config, merged, found.mistakes, found.notices, next(theirs, None))


def violations(config: object) -> Iterator[Violation]:
    """Yield the unmet needs of fields, and what the rules of each section and of the tree find."""
    tree = type(config)
    values = values_of(config)
    for path, facts in fields(tree).items():
        for need in facts.needs:
            other = tuple(need.key.split(".")) if "." in need.key else (*path[:-1], need.key)
            asked = need.is_asked_by(values[path], default=facts.default)
            if asked and not need.is_met_by(values[other]):
                keys = (".".join(path), ".".join(other))
                yield Violation(keys, need.rule(values[other]), is_notice=need.is_notice)
                if need.is_notice:  # what has no effect needs nothing else
                    break
    for one, other in _alternatives(tree):
        if GIVEN.holds(values[one]) and GIVEN.holds(values[other]):
            yield Violation(
                (".".join(one), ".".join(other)),
                f"is another way to say {other[-1]}, which is {literal(values[other])}; remove one",
            )
    for path in ((), *sections(tree)):
        section = value_at(config, path)
        if isinstance(section, HasRules):
            for violation in section.violations():
                yield violation.within(".".join(path)) if path else violation


def _alternatives(tree: type) -> list[tuple[Path, Path]]:
    """Return the pairs of keys that say one thing in two ways."""
    return [
        (path, (*path[:-1], key))
        for path, facts in fields(tree).items()
        for key in facts.instead_of
    ]


def _with_tables(layer: Layer, *, below: Layer, tree: type) -> Layer:
    """Make one setting of the keys of each table of any keys.

    It replaces the table below; keys that stand on the command line are added to that.
    """
    done = dict(layer)
    for table in (path for path, facts in fields(tree).items() if facts.kind is dict):
        keys = {path[-1]: done.pop(path) for path in layer if path[:-1] == table}
        if not keys:
            continue
        *_, last = keys.values()
        whole = done.get(table, below.get(table) if last.origin == COMMAND_LINE else None)
        value = dict(whole.value) if whole is not None and isinstance(whole.value, dict) else {}
        value |= {key: setting.value for key, setting in keys.items()}
        value = {key: item for key, item in value.items() if item is not None}
        done[table] = Setting(value, last.origin, table, literal(value), last.problem)
    return done


def _check_place(layer: Layer, found: Findings) -> None:
    """Refuse the one key that a file cannot hold, before the command line's hides it."""
    setting = layer.get(CONFIG_FILE)
    if setting is not None and setting.is_in_file:
        found.mistakes.append(
            f"{setting.where()}: is for the command line only; to build on another file "
            'write base = "other.toml" at the top'
        )


def _problem(setting: Setting, facts: FieldFacts) -> str:
    """Say what is wrong with a value of any type: unreadable, too large, or with a NUL in it."""
    value = setting.value
    is_count = facts.item is int and "<" not in facts.bounds
    if is_count and isinstance(value, int) and abs(value) > LARGEST:
        return f"must be at most {LARGEST}"
    texts = value if isinstance(value, list) else [value]
    if any(isinstance(text, str) and "\0" in text for text in texts):
        return "must not hold the character NUL (\\u0000); remove it"
    return setting.problem


def _section(cls: type, prefix: Path, *, settings: Layer, found: Findings) -> Any:
    """Build one section; what is refused is taken out of the settings and stays at its default."""
    values: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for name, info in section_fields(cls).items():
        path = (*prefix, name)
        if isinstance(info.annotation, type) and is_dataclass(info.annotation):
            values[name] = _section(info.annotation, path, settings=settings, found=found)
        elif path in settings:
            facts, value = fields(cls)[(name,)], settings[path].value
            problem = _problem(settings[path], facts)
            if not problem and facts.keys:
                value, problem = _tables(value, facts.item)
            if problem:
                wrong[name] = problem
            else:
                values[name] = value
    try:
        section = cls(**values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            name = str(detail["loc"][0])
            wrong[name] = _rule(detail, choices=fields(cls)[(name,)].choices)
        section = cls(**{name: value for name, value in values.items() if name not in wrong})
    for name, rule in wrong.items():
        found.mistakes.append(f"{settings.pop((*prefix, name)).where()}: {rule}")
    return section


def _tables(value: object, cls: type) -> tuple[tuple[object, ...], str]:
    """Build each of a list of tables, or say what is wrong with the first one that is wrong."""
    tables = [value] if isinstance(value, dict) else value
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        return (), "must be a list of tables, each as in {key = value}"
    built, keys = [], [path[0] for path in fields(cls)]
    for number, table in enumerate(tables, start=1):
        unknown = [key for key in table if key not in keys]
        if unknown:
            guess = did_you_mean(unknown[0], keys) or f"; valid are {', '.join(keys)}"
            return (), f"table {number} has no key {unknown[0]!r}{guess}"
        try:
            built.append(cls(**table))
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            key = str(detail["loc"][0])
            if detail["type"].startswith("missing"):
                return (), f"table {number} needs {key}; add it"
            rule = _rule(detail, choices=fields(cls)[(key,)].choices)
            return (), f"table {number}: {key} {rule}"
    return tuple(built), ""


def _rule(detail: ErrorDetails, *, choices: Sequence[str]) -> str:
    """Say in our words what pydantic found, with the remedy where one is evident."""
    value = detail["input"]
    rule = RULES.get(detail["type"], detail["msg"].replace("Input should be", "must be"))
    rule = rule.removeprefix("Value error, ")
    if len(detail["loc"]) > 1:
        item = detail["loc"][1]
        which = item + 1 if isinstance(item, int) else literal(item)
        rule = f"item {which} {rule}, got {literal(value)}"
    if detail["type"] == "literal_error":
        return rule + did_you_mean(str(value), choices)
    if detail["type"] == "string_type" and isinstance(value, (int, float)):
        return f'{rule}; write "{literal(value)}" in quotes'
    if isinstance(value, str) and isinstance(read_value(value.lower()), (int, float)):
        return f"{rule}; write {value.lower()} without quotes" if detail["type"] in RULES else rule
    return rule


def _word(mistake: str | Violation, *, given: Layer) -> str:
    """Point at the first key of the rule that somebody wrote."""
    if isinstance(mistake, str):
        return mistake
    paths = [tuple(key.split(".")) for key in mistake.keys]
    written = [given[path] for path in paths if path in given and given[path].value is not None]
    where = written[0].where() if written else f"default: {spell(paths[0], origin='default')}"
    return f"{where}: {mistake.rule}"
