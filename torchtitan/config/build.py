"""Turn merged layers into a Config, or into the list of all that is wrong with them.

One pipeline for every source: older spellings, keys without a feature, unknown names, types and
values, rules across fields. Each stage takes out what it refuses and hands on the rest, with
defaults in the gaps, so that one run of the command shows every mistake instead of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from torchtitan.base.errors import ConfigError, did_you_mean
from torchtitan.config import unbuilt
from torchtitan.config.broken import Broken
from torchtitan.config.compat import other_meanings, translate
from torchtitan.config.fields import fields, section_fields
from torchtitan.config.layers import COMMAND_LINE, Layer, Path, Setting, literal, spell
from torchtitan.config.names import without_unknown
from torchtitan.config.rules import broken_rules
from torchtitan.config.toml_files import CONFIG_FILE, parse
from torchtitan.job import Config

RULES = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
    "string_too_short": "must not be empty",
}

WARMUP_STEPS, WARMUP_RATIO = ("lr_scheduler", "warmup_steps"), ("lr_scheduler", "warmup_ratio")
SEED: Path = ("debug", "seed")
LARGEST = 10**12
"""Of a count: what is computed from it, sizes of tensors or times of waiting, fits into 64 bits."""
EITHER: dict[Path, Path] = {WARMUP_STEPS: WARMUP_RATIO, WARMUP_RATIO: WARMUP_STEPS}
"""Two ways to say one thing: what a file or the command line says replaces what its base said in
the other way; in one place both are a contradiction."""


@dataclass(frozen=True)
class Built:
    """The settings as far as they are valid, what is wrong with the rest, and remarks."""

    config: Config
    mistakes: list[str]
    notices: list[str]


def build(layers: Sequence[Layer], *, check_rules: bool = True) -> Built:
    """Merge the layers, the last one wins, and check everything.

    Without `check_rules` the rules across fields are left out: for when a file could not be read.
    """
    translated = [translate(layer) for layer in layers]
    notices = [notice for result in translated for notice in result.notices]
    mistakes = [mistake for result in translated for mistake in result.mistakes]
    mistakes += _misplaced(layers)
    merged: Layer = {}
    for result in translated:
        given = {path for path, setting in result.layer.items() if setting.value is not None}
        for path in given & EITHER.keys():
            merged.pop(EITHER[path], None)
        merged |= result.layer
    if other := unbuilt.other_model(merged):
        return Built(Config(), [other], [])
    notices += unbuilt.notices(merged)
    valid = merged
    for stage in (_without_unreadable, unbuilt.without_unbuilt, without_unknown):
        valid, found = stage(valid)
        mistakes += found
    valid = _without_reset(valid)
    config, bad, found = _section(Config, settings=valid, prefix=())
    mistakes += found
    notices += other_meanings(layers, given=merged, config=config)
    valid = {path: setting for path, setting in valid.items() if path not in bad}
    if check_rules:
        refused = merged.keys() - valid.keys()
        for broken in broken_rules(config):
            if not _is_clouded(broken, refused=refused):
                found = notices if broken.is_notice else mistakes
                found.append(_complaint(broken, settings=valid))
    return Built(config, mistakes, notices)


def checked(built: Built) -> Config:
    """Return the config; raises ConfigError with all mistakes if there are any."""
    if built.mistakes:
        raise ConfigError(built.mistakes)
    return built.config


def _without_unreadable(settings: Layer) -> tuple[Layer, list[str]]:
    found = {path: _problem(path, setting) for path, setting in settings.items()}
    kept = {path: setting for path, setting in settings.items() if not found[path]}
    return kept, [
        f"{settings[path].where()}: {problem}" for path, problem in found.items() if problem
    ]


def _problem(path: Path, setting: Setting) -> str:
    """Say what no setting may be: what torch and the system cannot take comes to no message."""
    value, facts = setting.value, fields().get(path)
    is_count = facts is not None and facts.item is int and path != SEED
    if is_count and isinstance(value, int) and abs(value) > LARGEST:
        return f"must be at most {LARGEST}"
    if "\0" in (value if isinstance(value, str) else "".join(_texts(value))):
        return "must not hold the character NUL (\\u0000); remove it"
    return setting.problem


def _texts(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _misplaced(layers: Sequence[Layer]) -> list[str]:
    """Refuse the one key that a file cannot hold, before the command line's hides it."""
    given = [layer[CONFIG_FILE] for layer in layers if CONFIG_FILE in layer]
    return [
        f"{setting.where()}: is for the command line only; to build on another file "
        'write base = "other.toml" at the top'
        for setting in given
        if setting.origin != COMMAND_LINE
    ]


def _without_reset(settings: Layer) -> Layer:
    """Take out what `none` on the command line resets: its default is right again."""
    return {path: setting for path, setting in settings.items() if setting.value is not None}


def _section(cls: type, *, settings: Layer, prefix: Path) -> tuple[Any, set[Path], list[str]]:
    """Build one section from its settings, those that pydantic refuses left at their defaults.

    Returns the section, the refused keys and a message for each.
    """
    values: dict[str, Any] = {}
    bad: set[Path] = set()
    mistakes: list[str] = []
    for name, info in section_fields(cls).items():
        path = (*prefix, name)
        if isinstance(info.annotation, type) and is_dataclass(info.annotation):
            values[name], inner, found = _section(info.annotation, settings=settings, prefix=path)
            bad |= inner
            mistakes += found
        elif path in settings:
            values[name] = settings[path].value
    try:
        return cls(**values), bad, mistakes
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            path = (*prefix, str(detail["loc"][0]))
            bad.add(path)
            mistakes.append(f"{settings[path].where()}: {_rule(detail, path=path)}")
    good = {name: value for name, value in values.items() if (*prefix, name) not in bad}
    return cls(**good), bad, mistakes


def _rule(detail: ErrorDetails, *, path: Path) -> str:
    """Say in our words what pydantic found, with the remedy where one is evident."""
    value = detail["input"]
    rule = RULES.get(detail["type"], detail["msg"].replace("Input should be", "must be"))
    if len(detail["loc"]) > 1:
        rule = f"item {int(detail['loc'][1]) + 1} {rule}, got {literal(value)}"
    if detail["type"] == "literal_error":
        return rule + did_you_mean(str(value), fields()[path].choices)
    if detail["type"] == "string_type":
        return f'{rule}; write "{literal(value)}" in quotes' if _is_plain(value) else rule
    if isinstance(value, str) and detail["type"] in RULES and _is_plain(_read(value)):
        return f"{rule}; write {value.lower()} without quotes"
    return rule


def _is_plain(value: object) -> bool:
    return isinstance(value, (int, float))


def _read(text: str) -> object:
    """Return the value that a string would be as a bare TOML value, if it would be one."""
    try:
        table = parse(f"value = {text.lower()}", origin="")
    except ConfigError:
        return None
    return table["value"] if len(table) == 1 else None


def _is_clouded(broken: Broken, *, refused: set[Path]) -> bool:
    """Tell whether a refused setting may be the reason: a key of the rule, or one misspelt."""
    keys = {tuple(key.split(".")) for key in broken.keys}
    misspelt = {path[:-1] for path in refused if path not in fields()}
    return bool(keys & refused or {key[:-1] for key in keys} & misspelt)


def _complaint(broken: Broken, *, settings: Layer) -> str:
    """Point at the first key of the rule that somebody wrote."""
    paths = [tuple(key.split(".")) for key in broken.keys]
    given = [settings[path] for path in paths if path in settings]
    where = given[0].where() if given else f"default: {spell(paths[0], origin='default')}"
    return f"{where}: {broken.rule}"
