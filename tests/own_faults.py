"""Things of the user's own that end the process, or never answer, for tests of the trainer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping


class Data:
    """Samples that are made up."""

    def __init__(self, *, seq_len: int, held_out: bool, **_: object) -> None:
        self.seq_len, self.held_out, self.num_read = seq_len, held_out, 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> list[int]:
        self.num_read += 1
        return [(i + k) % 250 for k in range(self.seq_len + 1)]


class Exits(Data):
    """Ends its process with the code of one that is done."""

    def __getitem__(self, i: int) -> list[int]:
        raise SystemExit(0)


class Leaves(Data):
    """Ends its process past Python's end, as one that is done."""

    def __getitem__(self, i: int) -> list[int]:
        if i > 20:
            os._exit(0)
        return super().__getitem__(i)


class Interrupts(Data):
    """Raises what Ctrl-C would."""

    def __getitem__(self, i: int) -> list[int]:
        raise KeyboardInterrupt


class Hangs(Data):
    """Gives the data of a few steps."""

    def __getitem__(self, i: int) -> list[int]:
        if self.num_read == 64:
            threading.Event().wait()
        return super().__getitem__(i)


class ExitingSink:
    """Ends its process at the first row."""

    def __init__(self, **_: object) -> None: ...

    def write(self, row: Mapping[str, object]) -> None:
        raise SystemExit(0)

    def close(self) -> None:
        """Close nothing."""


class SleepsAfterStep3:
    """A callback that takes very long."""

    def on_step(self, step: int, row: Mapping[str, object] | None) -> None:
        if step == 3:
            time.sleep(600)
