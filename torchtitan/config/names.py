"""Find the name that was meant: every unknown section or key is answered with the nearest one.

Nearest first in the section where it stands; a name that belongs elsewhere word for word wins over
a merely similar one, since moving a key to a wrong table is the commonest slip in these files.
"""

from __future__ import annotations

import difflib

from torchtitan.config.compat import RENAMED
from torchtitan.config.fields import fields, sections
from torchtitan.config.layers import COMMAND_LINE, Layer, Path, Setting, section, spell
from torchtitan.config.unbuilt import UNBUILT


def without_unknown(settings: Layer) -> tuple[Layer, list[str]]:
    """Keep what the schema knows; each unknown key, and each unknown section once, is a mistake."""
    kept: Layer = {}
    mistakes: dict[str, None] = {}  # an ordered set: a section's keys share one message
    known_sections = _known_sections()
    for path, setting in settings.items():
        if path in fields():
            kept[path] = setting
        elif path not in known_sections or setting.value != {}:
            mistakes[_unknown(path, setting=setting)] = None
    return kept, list(mistakes)


def _known_sections() -> set[Path]:
    """Every table that may be written, with those that only hold other tables."""
    keys = fields().keys() | UNBUILT.keys() | RENAMED.keys()
    return {path[:end] for path in keys for end in range(1, len(path))}


def _unknown(path: Path, *, setting: Setting) -> str:
    origin, parent = setting.origin, path[:-1]
    if path in _known_sections():
        form = f"{spell((*path, 'key'), origin=origin)} ..."
        return f"{setting.where()}: {section(path)} is a section, not a key; write {form}"
    for end in range(1, len(path)):
        if path[:end] in fields():
            return f"{setting.where()}: {spell(path[:end], origin=origin)} is a value, not a table"
    if parent and parent not in _known_sections():
        return _unknown_section(path, setting=setting)
    if not parent and setting.value == {}:
        return _unknown_section((*path, ""), setting=setting)
    rule = f"{section(parent)} has no key {path[-1]!r}" if parent else "stands in no section"
    return f"{setting.where()}: {rule}{_did_you_mean(path, origin=origin)}"


def _unknown_section(path: Path, *, setting: Setting) -> str:
    parent = path[:-1]
    if setting.origin == COMMAND_LINE:
        subject = setting.where()
    else:
        subject, path = setting.origin, (*parent, "")  # one message for the table, whatever is in
    mistake = f"{subject}: there is no section {section(parent)}"
    return mistake + _did_you_mean(path, origin=setting.origin)


def _did_you_mean(path: Path, *, origin: str) -> str:
    name, turned_off = path[-1].replace("-", "_"), (*path[:-1], path[-1][3:].replace("-", "_"))
    if name.startswith("no_") and turned_off in fields():  # as torchtitan's command line says it
        return f"; write {spell(turned_off, origin=origin)} false"
    guess = nearest(path)
    if guess is None:
        valid = [key[-1] for key in fields() if key[:-1] == path[:-1]]
        theirs = [key[-1] for key in (*RENAMED, *UNBUILT) if key[:-1] == path[:-1]]
        names = valid or theirs or [section(name) for name in sections()]
        return f"; valid are {', '.join(names)}"
    is_section = guess in _known_sections() and origin != COMMAND_LINE
    return f"; did you mean {section(guess) if is_section else spell(guess, origin=origin)}?"


def nearest(path: Path) -> Path | None:
    """Return the valid key that `path` most likely means, or the section if that is unknown."""
    parent, name = path[:-1], path[-1]
    if parent and parent not in _known_sections():
        joined = {".".join(known): known for known in _known_sections()}
        close = difflib.get_close_matches(".".join(parent), joined, n=1)
        if close:
            moved = (*joined[close[0]], name)
            return moved if moved in fields() else joined[close[0]]
    return (
        _similar(name, among=[key for key in fields() if key[-1] == name], cutoff=1.0)
        or _similar(name, among=[key for key in fields() if key[:-1] == parent], cutoff=0.6)
        or _similar(name, among=[key for key in UNBUILT if key[:-1] == parent], cutoff=0.6)
        or _similar(name, among=list(fields()), cutoff=0.75)
    )


def _similar(name: str, *, among: list[Path], cutoff: float) -> Path | None:
    by_name = {key[-1]: key for key in reversed(among)}
    close = difflib.get_close_matches(name, by_name, n=1, cutoff=cutoff)
    return by_name[close[0]] if close else None
