"""Names of other programs and of earlier versions: translated or refused.

A setting that is silently ignored is the worst mistake a trainer can make. Refusing a file that
only spells out a default is the second worst. A table states for each foreign key which values
request nothing: these are dropped. Other values are refused with a remedy.

The table is a TOML file:

    [renamed]                       "old.key" = "new.key", or
                                    {to = "new.key", values = {old = new}, ignored = [values]}
    [features.NAME]
    instead = "what to write instead"
    keys."section.key" = [values that request nothing]
    values."section.key" = [values that are refused, of a key that is built]
    means."section.key" = value     instead of refusing: settings that replace these values
"""

from __future__ import annotations

import functools
import pathlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.config.schema import Path, literal, same
from torchtitan.config.sources import Layer, Report, Setting, parse, spell


@dataclass(frozen=True)
class Renamed:
    """Today's name of a key.

    Args:
        values: Today's value by earlier ones.
        ignored: Values that request nothing.
    """

    to: Path
    values: Mapping[str, object]
    ignored: list[object]


@dataclass(frozen=True)
class Refused:
    """A refused value, and its remedy.

    Args:
        means: Settings that replace the value. Empty: it is refused.
    """

    instead: str
    means: Mapping[Path, object]


@dataclass(frozen=True)
class Foreign:
    """Tables of foreign names.

    Args:
        renamed: Keys with another name here.
        keys: Keys that are not built: the values that request nothing, and what to write instead.
        values: Values that are refused or replaced, of keys that are built.
        other_trainers: File with the names of other trainers, which `unknown.py` reads.
    """

    renamed: Mapping[Path, Renamed]
    keys: Mapping[Path, tuple[list[object], str]]
    values: Mapping[Path, Mapping[str, Refused]]
    other_trainers: pathlib.Path | None

    @property
    def names(self) -> list[Path]:
        """Every foreign key."""
        return [*self.renamed, *self.keys]

    @property
    def new_names(self) -> Mapping[Path, Path]:
        """Today's path by each old one."""
        return {old: new.to for old, new in self.renamed.items()}

    def translate(self, layer: Layer, report: Report) -> Layer:
        """Rename the old keys of one layer.

        Layers are translated before they are merged, so that a later layer with today's name
        overrides an earlier one with the old name.
        """
        result: Layer = {}
        for path, setting in layer.items():
            new = self.renamed.get(path)
            if new is None:
                result[path] = setting
                continue
            if any(same(setting.value, value) for value in new.ignored):
                continue
            if isinstance(setting.value, str) and setting.value in new.values:
                value = new.values[setting.value]
                setting = replace(setting, value=value, given=literal(value))
            other, name = layer.get(new.to), spell(new.to, origin=setting.origin)
            if other is not None and not same(other.value, setting.value):
                report.mistakes.append(
                    f"{setting.where()}: is the old name of {name}, which also has a value "
                    f"({other.given}); remove the old line"
                )
                continue
            old = spell(path, origin=setting.origin)
            report.notices.append(f"{setting.origin}: {old} is an old name; here it is {name}")
            result.setdefault(new.to, setting)
        return result

    def refuse(self, settings: Layer, report: Report) -> Layer:
        """Return the settings without foreign keys and values. Those that request something are
        mistakes; values with `means` are replaced, with a notice."""
        kept = dict(settings)
        for path, setting in settings.items():
            if path in self.keys:
                del kept[path]
                accepted, instead = self.keys[path]
                if not _requests_nothing(setting, accepted=accepted):
                    values = " or ".join(map(literal, accepted))
                    only = f"only {values} is accepted" if values else "remove the line"
                    report.mistakes.append(f"{setting.where()}: {instead} ({only})")
                continue
            refused = self.values.get(path, {})
            given = setting.value if isinstance(setting.value, (list, tuple)) else [setting.value]
            found = next(
                (refused[one] for one in given if isinstance(one, str) and one in refused), None
            )
            if found is None:
                continue
            if not found.means:
                del kept[path]
            told = report.notices if found.means else report.mistakes
            told.append(f"{setting.where()}: {found.instead}")
            for new, value in found.means.items():
                other = settings.get(new) if new != path else None
                if other is not None and not same(other.value, value):
                    rule = f"is {literal(value)} with {setting.where()}; remove one"
                    report.mistakes.append(f"{other.where()}: {rule}")
                kept[new] = replace(setting, value=value, written=new, given=literal(value))
        return kept


def _requests_nothing(setting: Setting, *, accepted: list[object]) -> bool:
    forms = (setting.value, [setting.value])  # a list may be written as one value
    return setting.value is None or any(same(form, one) for form in forms for one in accepted)


@functools.cache
def read_foreign(file: pathlib.Path, *, other_trainers: pathlib.Path | None = None) -> Foreign:
    """Read the table of foreign names; see `Foreign` for `other_trainers`."""
    table: Any = parse(file.read_text("utf-8"), origin=str(file))
    renamed: dict[Path, Renamed] = {}
    for old, new in table["renamed"].items():
        entry = new if isinstance(new, dict) else {"to": new}
        values, ignored = entry.get("values", {}), entry.get("ignored", [])
        renamed[_path(old)] = Renamed(_path(entry["to"]), values, ignored)
    known: dict[Path, tuple[list[object], str]] = {}
    refused: dict[Path, dict[str, Refused]] = defaultdict(dict)
    for feature in table["features"].values():
        for key, accepted in feature.get("keys", {}).items():
            known[_path(key)] = accepted, feature["instead"]
        for key, values in feature.get("values", {}).items():
            means = {_path(name): value for name, value in feature.get("means", {}).items()}
            refused[_path(key)] |= dict.fromkeys(values, Refused(feature["instead"], means))
    return Foreign(renamed=renamed, keys=known, values=refused, other_trainers=other_trainers)


def _path(dotted: str) -> Path:
    return tuple(dotted.split("."))
