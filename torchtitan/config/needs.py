"""What a field declares beside its type: above all about other settings.

Most rules between settings only say that one of them is read, or makes sense, beside certain values
of another. Said on the field they are data: the engine checks them all, and `--help` prints them.

    momentum: Annotated[Decay, Needs("name", "SGD")] = 0.0
"""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.config.layers import literal, same


@dataclass(frozen=True)
class AtLeast:
    """A number that is at least this."""

    least: int

    def holds(self, value: object) -> bool:
        """Tell whether the value is allowed."""
        return isinstance(value, int) and value >= self.least


class Given:
    """Any value at all: not None, and no empty list, table or text."""

    def holds(self, value: object) -> bool:
        """Tell whether the value is allowed."""
        return value not in (None, (), [], {}, "")


GIVEN = Given()


@dataclass(frozen=True)
class Needs:
    """The field needs another setting, once it has another value than its default."""

    key: str
    """A key of the same section, or a dotted path from the top."""
    wanted: object
    """The value that it needs, `AtLeast` or `GIVEN`; a tuple holds alternatives."""
    remedy: str = ""
    """What else to do."""
    of: tuple[object, ...] = ()
    """Only these values of the field need it."""
    is_notice: bool = False
    """Without it the field has no effect, and the job may start all the same."""

    @property
    def text(self) -> str:
        """Write what is needed: `name = "SGD"`, `rank >= 1`, `initial_load_path`."""
        if isinstance(self.wanted, AtLeast):
            return f"{self.key} >= {self.wanted.least}"
        if isinstance(self.wanted, Given):
            return self.key
        wanted = self.wanted if isinstance(self.wanted, tuple) else (self.wanted,)
        return f"{self.key} = {' or '.join(map(literal, wanted))}"

    def is_asked_by(self, value: object, *, default: object) -> bool:
        """Tell whether the field's value needs anything."""
        return value in self.of if self.of else not same(value, default)

    def is_met_by(self, value: object) -> bool:
        """Tell whether the other setting has a value that will do."""
        if isinstance(self.wanted, (AtLeast, Given)):
            return self.wanted.holds(value)
        wanted = self.wanted if isinstance(self.wanted, tuple) else (self.wanted,)
        return any(same(value, one) for one in wanted)

    def rule(self, other: object) -> str:
        """Say that it is not met by the `other` setting's value, and what to do."""
        effect = "has no effect: it " if self.is_notice else ""
        got = "" if isinstance(self.wanted, Given) else f", got {literal(other)}"
        return f"{effect}needs {self.text}{got}; {self.remedy or 'set that, or remove this'}"


class InsteadOf:
    """The field says in another way what siblings say: the later file of the two wins."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys
