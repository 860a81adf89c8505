"""Find the name that was meant: every unknown section or key is answered with the nearest one.

A name that another section has word for word wins over a merely similar one of its own section,
since a key in the wrong table is the commonest slip in these files.
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
        origin, parent, where = setting.origin, path[:-1], setting.where()
        if path in self._sections:
            form = f"{spell((*path, 'key'), origin=origin)} ..."
            return f"{where}: {section(path)} is a section, not a key; write {form}"
        for end in range(1, len(path)):
            if path[:end] in self._fields:
                value = spell(path[:end], origin=origin)
                if not self._fields[path[:end]].keys:
                    return f"{where}: {value} is a value, not a table"
                if origin == COMMAND_LINE:
                    return (
                        f"{where}: {value} is a list of tables; write {value} '[{{key = value}}]'"
                    )
                # one message for the table, whatever is in it
                form = f"[{section(path[:end])}]"
                return f"{origin}: {value} is a list of tables; write {form}"
        if not parent and setting.value == {}:
            path, parent = (*path, ""), path
        if parent and parent not in self._sections:
            if origin != COMMAND_LINE:
                # one message for the table, whatever is in it
                where, path = origin, (*parent, "")
            rule = f"there is no section {section(parent)}"
        else:
            rule = (
                f"{section(parent)} has no key {path[-1]!r}" if parent else "stands in no section"
            )
        switch = (*parent, path[-1].replace("-", "_").removeprefix("no_"))
        if (
            path[-1].startswith(("no-", "no_")) and switch in self._fields
        ):  # torchtitan's --section.no-key
            return f"{where}: {rule}; write {spell(switch, origin=origin)} false"
        guess = self._nearest(path)
        if guess is not None:
            is_section = guess in self._sections and origin != COMMAND_LINE
            meant = section(guess) if is_section else spell(guess, origin=origin)
            return f"{where}: {rule}; did you mean {meant}?"
        for keys in (self._fields, self._theirs):
            if names := [key[-1] for key in keys if key[:-1] == parent]:
                return f"{where}: {rule}; valid are {', '.join(names)}"
        return (
            f"{where}: {rule}; valid are {', '.join(self._tops)}, and what modules of your own "
            f"bring that the job names"
        )

    def _nearest(self, path: Path) -> Path | None:
        """Return the key that `path` most likely means, or the section if that is unknown."""
        parent, name = path[:-1], path[-1]
        if parent and parent not in self._sections:
            joined = {".".join(known): known for known in self._sections}
            if close := difflib.get_close_matches(".".join(parent), joined, n=1):
                meant = joined[close[0]]
                return (*meant, name) if (*meant, name) in self._fields else meant
        by_name = {key[-1]: key for key in reversed([*self._fields])}
        by_name |= {key[-1]: key for key in (*self._theirs, *self._fields) if key[:-1] == parent}
        close = difflib.get_close_matches(name, by_name, n=1, cutoff=0.7)
        return by_name[close[0]] if close else None
