"""Keys of another program that files hold: renamed here, or known and without their feature.

A setting that is silently ignored is the worst mistake a trainer can make, and refusing a file that
merely spells out a default is the second worst. So a table, which is data, says of each key which
values ask for nothing. These load and are dropped; any other is refused with what to write instead,
or gets a notice while the feature that would read it is switched off.

The table is a TOML file:

    [renamed]                       old key = today's
    [earlier_names]                 the same for keys of earlier versions of ours, with the values
                                    that changed: {to = "section.key", values = {old = "new"}}
    [nobodys_choice]                key = values that a default wrote, dropped before renaming
    [switches]                      key = the key without which it asks for nothing, or that key
                                    and the value, one of a list, that alone switches it on
    [features.NAME]
    instead = "what to write instead"
    was_ours = true                 where an earlier version of ours had the feature
    keys."section.key" = [values that ask for nothing]
    values."section.key" = [values of a key of ours that are not built]
    whole_job."section.key" = [the same, and nothing else of such a job is looked at]
"""

from __future__ import annotations

import functools
import pathlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.config.fields import fields
from torchtitan.config.layers import Findings, Layer, Path, Setting, literal, same, spell
from torchtitan.config.toml_files import parse

OFF: tuple[object, ...] = (None, False, [], (), 1, "none")
"""Values that switch off: of a feature, a list, a degree, a mode."""


@dataclass(frozen=True)
class Unbuilt:
    """Values of a key, and what to do instead."""

    values: list[object]
    instead: str


@dataclass(frozen=True)
class Foreign:
    """The table of another program's keys."""

    name: str
    renamed: Mapping[Path, Path]
    earlier: Mapping[Path, tuple[Path, Mapping[str, object]]]
    """Keys of earlier versions of ours: today's key, and today's values by the earlier ones."""
    nobodys_choice: Mapping[Path, list[object]]
    switches: Mapping[Path, tuple[Path, str | None]]
    keys: Mapping[Path, Unbuilt]
    """Keys without a feature, with the values that ask for nothing."""
    values: Mapping[Path, list[Unbuilt]]
    """Keys of ours, with values of theirs that are refused."""
    whole_job: Mapping[Path, list[Unbuilt]]
    ours: Collection[Path]
    """Those of `keys` that an earlier version of ours had."""

    @property
    def names(self) -> Collection[Path]:
        """Every key that is no key of ours."""
        return [*self.renamed, *self.earlier, *self.keys]

    @property
    def new_names(self) -> Mapping[Path, Path]:
        """Today's key by each old one."""
        return {**self.renamed, **{old: today for old, (today, _) in self.earlier.items()}}

    def holds(self, path: Path, setting: Setting) -> bool:
        """Tell whether only the other program would have written this."""
        is_key = path in self.renamed or (path in self.keys and path not in self.ours)
        return is_key or bool(self.refused_value(path, setting))

    def translate(self, layer: Layer, found: Findings) -> Layer:
        """Rename the old keys of one layer.

        Layers are translated before they are merged: an override in today's spelling wins over a
        base file in the old one, and only one place naming both with different values is wrong.
        """
        result: Layer = {}
        for path, setting in layer.items():
            today, program = self.renamed.get(path), f"{self.name}'s"
            if path in self.earlier:
                (today, values), program = self.earlier[path], "the earlier"
                if isinstance(setting.value, str) and setting.value in values:
                    value = values[setting.value]
                    setting = replace(setting, value=value, given=literal(value))
            if any(same(setting.value, value) for value in self.nobodys_choice.get(path, ())):
                continue
            if today is None:
                result[path] = setting
                continue
            other, name = layer.get(today), spell(today, origin=setting.origin)
            if other is not None and not same(other.value, setting.value):
                found.mistakes.append(
                    f"{setting.where()}: is the old name of {name}, which is given as well, with "
                    f"another value ({other.given}); remove the old line"
                )
                continue
            old = spell(path, origin=setting.origin)
            found.notices.append(f"{setting.origin}: {old} is {program} name; here it is {name}")
            result.setdefault(today, setting)
        return result

    def other_job(self, settings: Layer) -> str | None:
        """Say that a job is of a kind that is not built: no other line can be mended then."""
        for path, entries in self.whole_job.items():
            instead = _refused(entries, settings.get(path))
            if instead:
                where = settings[path].where()
                return f"{where}: {instead}; nothing else of this job was checked"
        return None

    def without_theirs(self, settings: Layer, found: Findings, *, tree: type) -> Layer:
        """Drop what asks for nothing, refuse what asks for a feature that is not built."""
        kept: Layer = {}
        without_effect: dict[tuple[Path, str], list[str]] = defaultdict(list)
        for path, setting in settings.items():
            reason, accepted = self._refusal(path, setting)
            is_off = self._is_off(path, settings=settings, tree=tree)
            facts, value = fields(tree).get(path), setting.value
            choices = facts.choices if facts is not None else ()
            if is_off and choices and isinstance(value, str) and value not in choices:
                reason = f"{value} {reason or 'is none of ' + ', '.join(choices)}"
            if reason and is_off:
                without_effect[self.switches[path][0], reason].append(setting.where())
            elif reason:
                found.mistakes.append(f"{setting.where()}: {reason}{accepted}")
            elif path not in self.keys:
                kept[path] = setting
        found.notices += [
            f"{'; '.join(places)}: {'has' if len(places) == 1 else 'have'} no effect, "
            f"{'.'.join(switch)} is off ({reason})"
            for (switch, reason), places in without_effect.items()
        ]
        return kept

    def refused_value(self, path: Path, setting: Setting) -> str | None:
        """Say what to do instead of a value of theirs of a key of ours."""
        entries = [*self.values.get(path, ()), *self.whole_job.get(path, ())]
        return _refused(entries, setting)

    def _refusal(self, path: Path, setting: Setting) -> tuple[str | None, str]:
        """Say what to do instead, and which values are accepted."""
        known, value = self.keys.get(path), setting.value
        if known is None:
            return self.refused_value(path, setting), ""
        # one word stands for a list of one
        given = (value, [value])
        if value is None or any(same(form, one) for form in given for one in known.values):
            return None, ""
        accepted = " or ".join(map(literal, known.values))
        only = f"only {accepted} is accepted" if accepted else "remove the line"
        return known.instead, f" ({only})"

    def _is_off(self, path: Path, *, settings: Layer, tree: type) -> bool:
        if path not in self.switches:
            return False
        switch, wanted = self.switches[path]
        facts = fields(tree).get(switch)
        value = settings[switch].value if switch in settings else None
        if value is None and facts is not None:
            value = facts.default
        if wanted is not None:
            return not (isinstance(value, (list, tuple)) and wanted in value) and value != wanted
        return any(same(value, off) for off in OFF)


def _refused(entries: Collection[Unbuilt], setting: Setting | None) -> str | None:
    given = setting.value if setting is not None else None
    values = given if isinstance(given, list) else [given]
    return next((e.instead for e in entries for v in values if v in e.values), None)


@functools.cache
def read_foreign(file: pathlib.Path, *, name: str) -> Foreign:
    """Read a table of another program's keys."""
    table: Any = parse(file.read_text("utf-8"), origin=str(file))
    keys: dict[Path, Unbuilt] = {}
    values: dict[Path, list[Unbuilt]] = defaultdict(list)
    whole_job: dict[Path, list[Unbuilt]] = defaultdict(list)
    ours: set[Path] = set()
    for feature in table["features"].values():
        instead = feature["instead"]
        keys |= {_path(key): Unbuilt(v, instead) for key, v in feature.get("keys", {}).items()}
        if feature.get("was_ours"):
            ours |= {_path(key) for key in feature["keys"]}
        for kind, into in (("values", values), ("whole_job", whole_job)):
            for key, refused in feature.get(kind, {}).items():
                into[_path(key)].append(Unbuilt(refused, instead))
    return Foreign(
        name=name,
        renamed={_path(old): _path(new) for old, new in table["renamed"].items()},
        earlier={
            _path(old): (_path(new["to"]), new.get("values", {}))
            for old, new in table["earlier_names"].items()
        },
        nobodys_choice={_path(key): found for key, found in table["nobodys_choice"].items()},
        switches={_path(key): _switch(given) for key, given in table["switches"].items()},
        keys=keys,
        values=values,
        whole_job=whole_job,
        ours=ours,
    )


def _switch(given: str | list[str]) -> tuple[Path, str | None]:
    if isinstance(given, str):
        return _path(given), None
    key, wanted = given
    return _path(key), wanted


def _path(dotted: str) -> Path:
    return tuple(dotted.split("."))
