"""Names of other programs and of earlier versions: translated, ignored or refused.

A setting that is silently ignored is the worst mistake a trainer can make. Refusing a file that
only spells out a default is the second worst. A table states for each foreign key which values
request nothing: these are dropped. Other values are refused with a remedy, or get a notice while
their feature is off.

The table is a TOML file:

    [renamed]                       "old.key" = "new.key", or {to = "new.key", ignored = [values]}
    [earlier_names]                 of earlier versions: {to = "new.key", values = {old = new}}
    [switches]                      "key" = "switch", or ["switch", "value"]: the key requests
                                    nothing while the switch is off, or lacks that value
    [features.NAME]
    instead = "what to write instead"
    was_ours = true                 an earlier version of this library had these keys
    keys."section.key" = [values that request nothing]
    values."section.key" = [values that are refused, of a key that is built]
    means."section.key" = value     instead of refusing: what these values stand for here
    whole_job."section.key" = [the same, and nothing else of such a job is checked]

    [items]                         "key" = [names]: all that a list may hold, also while it is off
    [other_defaults]                "key" = {meaning = "default there and here", when = a switch}:
                                    logged if a file of the program leaves the key out

"""

from __future__ import annotations

import functools
import pathlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.config.schema import Path, keys, literal, same
from torchtitan.config.sources import Layer, Report, Setting, parse, spell

Switch = tuple[Path, str | None]
"""A key, and the value that switches the feature on. None: any that is not in `OFF`."""
OFF: tuple[object, ...] = (None, False, [], (), 0, 0.0, 1, "none")
"""Values of a switch, list, number, degree or mode that is off."""


@dataclass(frozen=True)
class Renamed:
    """Today's name of a key.

    Args:
        program: Program that has the old name. None: an earlier version of this library.
        values: Today's value by earlier ones.
        ignored: Values that request nothing.
    """

    to: Path
    program: str | None
    values: Mapping[str, object]
    ignored: list[object]


@dataclass(frozen=True)
class Values:
    """Values of a key, and what to write instead."""

    values: list[object]
    instead: str
    is_earlier: bool
    """Whether an earlier version of this library had the key."""
    means: Mapping[Path, object] = field(default_factory=dict)
    """Settings that the values stand for. Empty: they are refused."""


@dataclass(frozen=True)
class Foreign:
    """Tables of foreign names.

    Args:
        renamed: Keys with another name here.
        switches: Keys that request nothing while another key is off, or lacks the value.
        keys: Keys that are not built, with the values that request nothing.
        values: Refused values of keys that are built.
        whole_job: Refused values that make the rest of a job meaningless.
        items: Names that a list may hold.
        other_defaults: Keys with another default there: the difference, and when it matters.
        other_trainers: File with the names of other trainers, which `unknown.py` reads.
    """

    renamed: Mapping[Path, Renamed]
    switches: Mapping[Path, Switch]
    keys: Mapping[Path, Values]
    values: Mapping[Path, list[Values]]
    whole_job: Mapping[Path, list[Values]]
    items: Mapping[Path, list[str]]
    other_defaults: Mapping[Path, tuple[str, Switch | None]]
    other_trainers: pathlib.Path | None

    @property
    def names(self) -> list[Path]:
        """Every foreign key."""
        return [*self.renamed, *self.keys]

    @property
    def new_names(self) -> Mapping[Path, Path]:
        """Today's path by each old one."""
        return {old: new.to for old, new in self.renamed.items()}

    def is_foreign(self, path: Path, setting: Setting) -> bool:
        """Return whether only the other program would have written this."""
        if path in self.renamed:
            return self.renamed[path].program is not None
        is_key = path in self.keys and not self.keys[path].is_earlier
        return is_key or self._refused_value(path, setting) is not None

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
            program = "the earlier" if new.program is None else f"{new.program}'s"
            report.notices.append(f"{setting.origin}: {old} is {program} name; here it is {name}")
            result.setdefault(new.to, setting)
        return result

    def refused_job(self, settings: Layer) -> str | None:
        """Return the mistake of a job that is of no kind built here."""
        for path, entries in self.whole_job.items():
            if entry := _find(entries, settings.get(path)):
                where = settings[path].where()
                return f"{where}: {entry.instead}; nothing else of this job was checked"
        return None

    def without_foreign(self, settings: Layer, report: Report, *, tree: type) -> Layer:
        """Return the settings without foreign keys: those that request nothing are dropped, the
        others are mistakes, or notices while their feature is off."""
        kept: Layer = {}
        ineffective: dict[tuple[Path, str], list[str]] = defaultdict(list)
        for path, setting in settings.items():
            reason, accepted = self._refusal(path, setting)
            is_off = path in self.switches and self._is_off(path, settings=settings, tree=tree)
            choices = keys(tree)[path].choices if path in keys(tree) else ()
            is_wrong = isinstance(setting.value, str) and setting.value not in choices
            if is_off and choices and is_wrong:
                reason = f"{setting.value} {reason or 'is none of ' + ', '.join(choices)}"
            given = setting.value if isinstance(setting.value, list) else [setting.value]
            names = [None, *self.items.get(path, given)]  # None unsets a key
            if unknown := [str(item) for item in given if item not in names]:
                rule = f"names must be of {', '.join(self.items[path])}, got {', '.join(unknown)}"
                report.mistakes.append(f"{setting.where()}: {rule}: {reason}{accepted}")
            elif reason and is_off:
                ineffective[self.switches[path][0], reason].append(setting.where())
            elif reason:
                report.mistakes.append(f"{setting.where()}: {reason}{accepted}")
            elif path not in self.keys:
                kept[path] = setting
        report.notices += [
            f"{'; '.join(places)}: {'has' if len(places) == 1 else 'have'} no effect, "
            f"{'.'.join(switch)} is off ({reason})"
            for (switch, reason), places in ineffective.items()
        ]
        return kept

    def other_meanings(
        self, given: Collection[Path], values: Mapping[Path, object]
    ) -> Iterator[str]:
        """Yield what the keys that a job leaves out mean in the other program."""
        for path, (meaning, switch) in self.other_defaults.items():
            if path not in given and (switch is None or _is_on(values[switch[0]], switch[1])):
                yield meaning

    def expand(self, settings: Layer, report: Report) -> Layer:
        """Replace values that stand for other settings by these."""
        result = dict(settings)
        for path, setting in settings.items():
            entry = _find(self.values.get(path, ()), setting)
            for new, value in entry.means.items() if entry else ():
                other = settings.get(new) if new != path else None
                if other is not None and not same(other.value, value):
                    rule = f"is {literal(value)} with {setting.where()}; remove one"
                    report.mistakes.append(f"{other.where()}: {rule}")
                result[new] = replace(setting, value=value, written=new, given=literal(value))
            if entry and entry.means:
                report.notices.append(f"{setting.where()}: {entry.instead}")
        return result

    def _refused_value(self, path: Path, setting: Setting) -> Values | None:
        return _find([*self.values.get(path, ()), *self.whole_job.get(path, ())], setting)

    def _refusal(self, path: Path, setting: Setting) -> tuple[str | None, str]:
        """Return what to write instead, and which values are accepted."""
        known, value = self.keys.get(path), setting.value
        if known is None:
            refused = self._refused_value(path, setting)
            return (refused.instead if refused else None), ""
        given = (value, [value])  # a list may be written as one value
        if value is None or any(same(form, one) for form in given for one in known.values):
            return None, ""
        accepted = " or ".join(map(literal, known.values))
        only = f"only {accepted} is accepted" if accepted else "remove the line"
        return known.instead, f" ({only})"

    def _is_off(self, path: Path, *, settings: Layer, tree: type) -> bool:
        switch, wanted = self.switches[path]
        value = settings[switch].value if switch in settings else None
        if value is None and switch in keys(tree):
            value = keys(tree)[switch].default
        return not _is_on(value, wanted)


def _is_on(value: object, wanted: str | None) -> bool:
    if wanted is None:
        # 1 is a degree that is off, and 1.0 a rate that is not
        return not any(same(value, off) and type(value) is type(off) for off in OFF)
    return value == wanted or (isinstance(value, (list, tuple)) and wanted in value)


def _find(entries: Collection[Values], setting: Setting | None) -> Values | None:
    given = setting.value if setting is not None else None
    values = given if isinstance(given, list) else [given]
    return next((one for one in entries for v in values if v in one.values), None)


@functools.cache
def read_foreign(
    file: pathlib.Path, *, program: str, other_trainers: pathlib.Path | None = None
) -> Foreign:
    """Read the table of a program's names; see `Foreign` for `other_trainers`."""
    table: Any = parse(file.read_text("utf-8"), origin=str(file))
    renamed: dict[Path, Renamed] = {}
    for group, owner in (("renamed", program), ("earlier_names", None)):
        for old, new in table[group].items():
            entry = new if isinstance(new, dict) else {"to": new}
            values, ignored = entry.get("values", {}), entry.get("ignored", [])
            renamed[_path(old)] = Renamed(_path(entry["to"]), owner, values, ignored)
    known: dict[Path, Values] = {}
    refused: dict[str, dict[Path, list[Values]]] = {
        kind: defaultdict(list) for kind in ("values", "whole_job")
    }
    for feature in table["features"].values():
        instead, is_earlier = feature["instead"], feature.get("was_ours", False)
        means = {_path(key): value for key, value in feature.get("means", {}).items()}
        for key, values in feature.get("keys", {}).items():
            known[_path(key)] = Values(values, instead, is_earlier)
        for kind, into in refused.items():
            for key, values in feature.get(kind, {}).items():
                into[_path(key)].append(Values(values, instead, is_earlier, means))
    return Foreign(
        renamed=renamed,
        switches={_path(key): _switch(given) for key, given in table["switches"].items()},
        keys=known,
        values=refused["values"],
        whole_job=refused["whole_job"],
        items={_path(key): names for key, names in table.get("items", {}).items()},
        other_defaults={
            _path(key): (one["meaning"], _switch(one["when"]) if "when" in one else None)
            for key, one in table.get("other_defaults", {}).items()
        },
        other_trainers=other_trainers,
    )


def _switch(given: str | list[str]) -> Switch:
    return (_path(given), None) if isinstance(given, str) else (_path(given[0]), given[1])


def _path(dotted: str) -> Path:
    return tuple(dotted.split("."))
