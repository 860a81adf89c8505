"""Find the name that was meant: every unknown section or key is answered with the nearest one.

Nearest first in the section where it stands; a name that belongs elsewhere word for word wins over
a merely similar one, since moving a key to a wrong table is the commonest slip in these files.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from torchtitan.config.fields import fields, sections
from torchtitan.config.layers import COMMAND_LINE, Findings, Layer, Path, Setting, section, spell


class Names:
    """The names of a tree, and `theirs`: keys of another program, known but in no tree."""

    def __init__(self, tree: type, *, theirs: Collection[Path]) -> None:
        self._fields = fields(tree)
        self._theirs = theirs
        self._tops = [section(name) for name in sections(tree)]
        # every table that may be written, with those that only hold other tables
        keys = (*self._fields, *theirs)
        self._sections = {path[:end] for path in keys for end in range(1, len(path))}

    def without_unknown(self, settings: Layer, found: Findings) -> Layer:
        """Keep what the tree has; each unknown key, and each unknown section once, is a mistake."""
        kept: Layer = {}
        mistakes: dict[str, None] = {}  # an ordered set: a section's keys share one message
        for path, setting in settings.items():
            if path in self._fields:
                kept[path] = setting
            elif path not in self._sections or setting.value != {}:
                mistakes[self._unknown(path, setting)] = None
        found.mistakes += mistakes
        return kept

    def _unknown(self, path: Path, setting: Setting) -> str:
        origin, parent = setting.origin, path[:-1]
        if path in self._sections:
            form = f"{spell((*path, 'key'), origin=origin)} ..."
            return f"{setting.where()}: {section(path)} is a section, not a key; write {form}"
        for end in range(1, len(path)):
            if path[:end] in self._fields:
                value = spell(path[:end], origin=origin)
                if self._fields[path[:end]].keys:
                    form, where = f"{value} '[{{key = value}}]'", setting.where()
                    if origin != COMMAND_LINE:
                        # one message for the table, whatever is in it
                        form, where = f"[{section(path[:end])}]", origin
                    return f"{where}: {value} is a list of tables; write {form}"
                return f"{setting.where()}: {value} is a value, not a table"
        if not parent and setting.value == {}:
            path, parent = (*path, ""), path
        if parent and parent not in self._sections:
            where = setting.where()
            if origin != COMMAND_LINE:
                # one message for the table, whatever is in it
                where, path = origin, (*parent, "")
            rule = f"there is no section {section(parent)}"
            return f"{where}: {rule}{self._did_you_mean(path, origin=origin)}"
        rule = f"{section(parent)} has no key {path[-1]!r}" if parent else "stands in no section"
        return f"{setting.where()}: {rule}{self._did_you_mean(path, origin=origin)}"

    def _did_you_mean(self, path: Path, *, origin: str) -> str:
        name = path[-1].replace("-", "_")
        turned_off = (*path[:-1], name.removeprefix("no_"))
        if name.startswith("no_") and turned_off in self._fields:  # --section.no-key of tyro
            return f"; write {spell(turned_off, origin=origin)} false"
        guess = self._nearest(path)
        if guess is None:
            valid = [key[-1] for key in self._fields if key[:-1] == path[:-1]]
            theirs = [key[-1] for key in self._theirs if key[:-1] == path[:-1]]
            if valid or theirs:
                return f"; valid are {', '.join(valid or theirs)}"
            return (
                f"; valid are {', '.join(self._tops)}, and what modules of your own bring that the "
                f"job names"
            )
        is_section = guess in self._sections and origin != COMMAND_LINE
        return f"; did you mean {section(guess) if is_section else spell(guess, origin=origin)}?"

    def _nearest(self, path: Path) -> Path | None:
        """Return the key that `path` most likely means, or the section if that is unknown."""
        parent, name = path[:-1], path[-1]
        if parent and parent not in self._sections:
            joined = {".".join(known): known for known in self._sections}
            close = difflib.get_close_matches(".".join(parent), joined, n=1)
            if close:
                moved = (*joined[close[0]], name)
                return moved if moved in self._fields else joined[close[0]]
        return (
            _similar(name, among=[key for key in self._fields if key[-1] == name], cutoff=1.0)
            or _similar(name, among=[key for key in self._fields if key[:-1] == parent], cutoff=0.6)
            or _similar(name, among=[key for key in self._theirs if key[:-1] == parent], cutoff=0.6)
            or _similar(name, among=list(self._fields), cutoff=0.75)
        )


def _similar(name: str, *, among: list[Path], cutoff: float) -> Path | None:
    by_name = {key[-1]: key for key in reversed(among)}
    close = difflib.get_close_matches(name, by_name, n=1, cutoff=cutoff)
    return by_name[close[0]] if close else None
