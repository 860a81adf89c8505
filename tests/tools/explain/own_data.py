"""Data of a user's own, in the three forms."""

from __future__ import annotations

from collections.abc import Iterator

SIZE = 100


def _sample(i: int) -> list[int]:
    return [(i + j) % 200 for j in range(33)]


class Indexed:
    """Samples by number."""

    def __init__(self, **options: object) -> None:
        pass

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> list[int]:
        return _sample(i)


class Stream:
    """Samples one after another."""

    def __init__(self, **options: object) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self._next < SIZE:
            self._next += 1
            yield _sample(self._next - 1)
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]
