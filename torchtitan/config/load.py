"""Load settings: merge the sources, check everything, and report all mistakes at once.

The stages are the same for every source: foreign names, unknown names, types, rules between keys.
Each stage takes out what it refuses and passes on the rest, with defaults in the gaps, so that one
run of a command shows every mistake with the place where it was written.

The later source wins: base file, file, command line. Environment variables are left out on
purpose, so that a run's config.toml is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from torchtitan.base.errors import ConfigError, Violation
from torchtitan.config.schema import (
    Path,
    is_given,
    keys,
    literal,
    section_fields,
    sections,
    value_at,
    values_of,
)
from torchtitan.config.sources import (
    COMMAND_LINE,
    CONFIG_FILE,
    HELP,
    Layer,
    Report,
    Setting,
    parse_command_line,
    read_layers,
    spell,
)

if TYPE_CHECKING:
    from torchtitan.config.foreign import Foreign

logger = logging.getLogger(__name__)
T = TypeVar("T")


@runtime_checkable
class HasRules(Protocol):
    """A section or a tree with rules between its keys."""

    def violations(self) -> Iterator[Violation]:
        """Yield each broken rule, with keys relative to the section."""


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """Loaded settings.

    Args:
        config: The tree, with defaults where values are wrong.
        given: What files and command line hold, by today's names.
        foreign_file: The first file with a key that only another program knows.
    """

    config: T
    given: Layer
    mistakes: list[str]
    notices: list[str]
    foreign_file: str | None

    def checked(self) -> T:
        """Return the settings; raises ConfigError if there are mistakes."""
        if self.mistakes:
            raise ConfigError(self.mistakes)
        return self.config

    def wording(self) -> AbstractContextManager[None]:
        """Add the origin of settings to a ConfigError that is raised inside."""
        return add_origins(self.given)


@contextmanager
def add_origins(given: Layer) -> Iterator[None]:
    """Add the origin of settings to a ConfigError that is raised inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([_add_origin(one, given=given) for one in error.mistakes]) from error


def load(
    tree: type[T],
    argv: Sequence[str] | Layer,
    *,
    foreign: Foreign,
) -> Loaded[T]:
    """Read the file that `argv` names, apply its other options, and check everything.

    Args:
        argv: Command line, or settings given in Python.

    Raises:
        ConfigError: Lists every mistake.
        SystemExit: After `--help` was printed.
    """
    words = argv if isinstance(argv, dict) else [word for word in argv if word not in HELP]
    if len(words) < len(argv):
        from torchtitan.config.help import print_help

        print_help(tree)
        raise SystemExit(0)
    options, stray = parse_command_line(words, tree=tree, renamed=foreign.new_names)
    mistakes: list[str] = []
    layers: list[Layer] = []
    file = options.get(CONFIG_FILE)
    is_read = True
    if file is not None and file.value is not None:
        try:
            layers = read_layers(file)
        except ConfigError as error:
            is_read = False
            mistakes += map(str, error.mistakes)
    loaded = build(tree, [*layers, options], foreign=foreign, check_rules=is_read)
    for notice in loaded.notices:
        logger.warning(notice)
    if all_mistakes := [*mistakes, *stray, *loaded.mistakes]:
        raise ConfigError(all_mistakes)
    return loaded


def build(
    tree: type[T], layers: Sequence[Layer], *, foreign: Foreign, check_rules: bool = True
) -> Loaded[T]:
    """Merge layers, where later ones win, and check everything.

    Args:
        check_rules: Whether to check rules between keys. False if a file could not be read, and for
            settings that an earlier version has checked.
    """
    report, merged = Report(), Layer()
    for layer in layers:
        file = layer.get(CONFIG_FILE)
        if file is not None and file.is_in_file:
            report.mistakes.append(
                f"{file.where()}: is for the command line only; to build on another file "
                'write base = "other.toml" at the top'
            )
        _merge(foreign.translate(layer, report), into=merged, tree=tree)
    if mistake := foreign.refused_job(merged):
        return Loaded(tree(), merged, [mistake], [], None)
    known = foreign.without_foreign(foreign.expand(merged, report), report, tree=tree)
    valid = _without_unknown(known, report, tree=tree, foreign=foreign)
    # `none` on the command line restores the default
    valid = {path: setting for path, setting in valid.items() if setting.value is not None}
    config = _build_section(tree, tree, (), settings=valid, report=report)
    if check_rules:
        given = {path for path, setting in merged.items() if setting.value is not None}
        refused = given - valid.keys() - foreign.keys.keys()
        for violation in violations(config):
            # a rule about a key that was refused would speak of its default
            if refused.isdisjoint(tuple(key.split(".")) for key in violation.keys):
                found = report.notices if violation.is_notice else report.mistakes
                found.append(_add_origin(violation, given=valid))
    foreign_files = (
        setting.origin
        for layer in layers
        for path, setting in layer.items()
        if setting.is_in_file and foreign.is_foreign(path, setting)
    )
    return Loaded(config, merged, report.mistakes, report.notices, next(foreign_files, None))


def violations(config: object) -> Iterator[Violation]:
    """Yield each broken rule between keys."""
    known, values = keys(type(config)), values_of(config)
    for path, key in known.items():
        for need in key.requires:
            other = tuple(need.key.split(".")) if "." in need.key else (*path[:-1], need.key)
            if not need.applies_to(values[path], default=key.default):
                continue
            if not need.is_met_by(values[other]):
                names = (".".join(path), ".".join(other))
                yield Violation(names, need.rule(values[other]), is_notice=need.is_notice)
                if need.is_notice:  # what has no effect requires nothing else
                    break
        for name in key.replaces:
            other = (*path[:-1], name)
            both = values[path], values[other]
            if all(map(is_given, both)) and any(both):  # 0 and 0 agree
                rule = f"replaces {name}, which is {literal(values[other])}; remove one"
                yield Violation((".".join(path), ".".join(other)), rule)
    for path in ((), *sections(type(config))):
        section = value_at(config, path)
        if isinstance(section, HasRules):
            for violation in section.violations():
                yield violation.within(".".join(path)) if path else violation


def _merge(layer: Layer, *, into: Layer, tree: type) -> None:
    """Add a layer to those below it."""
    layer = dict(layer)
    for path, key in keys(tree).items():
        if key.kind is dict:
            _gather_table(path, layer=layer, below=into)
        for name in key.replaces:
            other = (*path[:-1], name)
            for this, that in ((path, other), (other, path)):
                if this in layer and is_given(layer[this].value):
                    into.pop(that, None)
    into |= layer


def _gather_table(path: Path, *, layer: Layer, below: Layer) -> None:
    """Make the keys of a table of any keys one setting.

    A table in a file replaces the one below; options of the command line are added to it.
    """
    items = {one[-1]: layer.pop(one) for one in [*layer] if one[:-1] == path}
    if not items:
        return
    *_, last = items.values()
    table = layer.get(path, below.get(path) if last.origin == COMMAND_LINE else None)
    merged = dict(table.value) if table is not None and isinstance(table.value, dict) else {}
    merged |= {name: setting.value for name, setting in items.items()}
    merged = {name: value for name, value in merged.items() if value is not None}
    layer[path] = Setting(merged, last.origin, path, literal(merged), last.problem)


def _build_section(
    cls: Any, make: Callable[..., Any], prefix: Path, *, settings: Layer, report: Report
) -> Any:
    """Build a section; what is refused is removed from the settings and keeps its default."""
    values: dict[str, Any] = {}
    for one, annotation in section_fields(cls):
        path = (*prefix, one.name)
        if is_dataclass(annotation):
            inner: Any = annotation if one.default_factory is MISSING else one.default_factory
            values[one.name] = _build_section(
                annotation, inner, path, settings=settings, report=report
            )
        elif path in settings:
            problem = settings[path].problem
            try:
                values[one.name] = keys(cls)[one.name,].convert(settings[path].value)
            except ValueError as error:
                problem = problem or str(error)
            if problem:
                values.pop(one.name, None)
                report.mistakes.append(f"{settings.pop(path).where()}: {problem}")
    return make(**values)


def _add_origin(mistake: str | Violation, *, given: Mapping[Path, Setting]) -> str:
    """Begin a mistake with the first key of its rule that is given."""
    if isinstance(mistake, str):
        return mistake
    paths = [tuple(key.split(".")) for key in mistake.keys]
    paths = [path[:end] for path in paths for end in range(len(path), 0, -1)]
    written = [given[path] for path in paths if path in given and given[path].value is not None]
    where = written[0].where() if written else f"default: {spell(paths[0], origin='default')}"
    return f"{where}: {mistake.rule}"


# --- unknown names -----------------------------------------------------------------------------


def _without_unknown(settings: Layer, report: Report, *, tree: type, foreign: Foreign) -> Layer:
    """Return the settings that the tree has. Each unknown key or section is a mistake."""
    known = keys(tree)
    tables = {path[:end] for path in (*known, *foreign.names) for end in range(1, len(path))}
    kept: Layer = {}
    mistakes: dict[str, None] = {}  # an ordered set: the keys of a section share one message
    for path, setting in settings.items():
        if path in known:
            kept[path] = setting
        elif path not in tables or setting.value != {}:
            from torchtitan.config.unknown import describe_unknown

            mistake = describe_unknown(path, setting, tree=tree, tables=tables, foreign=foreign)
            mistakes[mistake] = None
    report.mistakes += mistakes
    return kept
