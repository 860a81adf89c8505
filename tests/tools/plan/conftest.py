"""Rehearsals of several ranks or jobs without processes of their own."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from torchtitan.tools.plan import records, remedies


class _Results:
    def __init__(self, results: Iterator[Any]) -> None:
        self._results = results

    def next(self, timeout: float) -> Any:
        return next(self._results)


class _InProcess:
    def imap(self, work: Callable[[Any], Any], items: Sequence[Any]) -> _Results:
        sent = pickle.loads(pickle.dumps([(work, item) for item in items]))
        return _Results(copy(item) for copy, item in sent)

    imap_unordered = imap


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rehearse here what is pickled for a pool: importing torch costs more than small jobs."""
    for module in (records, remedies):
        monkeypatch.setattr(module, "open_pool", lambda _: nullcontext(_InProcess()))
    yield
    logging.disable(logging.NOTSET)  # a job that was sent is placed without warnings
