"""Work that one process of a machine does for all ranks there.

A thousand ranks that each list a bucket, or look at each of ten thousand files on a shared disk,
are what a slow start is made of. So the first rank of a machine to ask does such work, and tells
the others through the job's store. They wait for as long as it takes: copying data can take
hours, more than a collective would wait. If it fails, it fails on all of them, with one message.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from torchtitan.base.errors import DataError, UserError, Violation
from torchtitan.mesh.process_group import is_first, job_store

LONGEST = timedelta(days=7)
"""To wait for another rank. If that dies, the launcher ends the others at once."""


class OncePerMachine:
    """Calls functions on one rank of each machine, and returns what they return on all.

    All ranks make it, and call it for the same functions, in the same order. What these return must
    be as JSON can hold it.
    """

    def __init__(self) -> None:
        # a second run of the same processes must not be told what the first one found
        self._run = job_store().add(f"once/runs of {dist.get_rank()}", 1)
        self._numbers = count()

    def __call__(self, work: Callable[[], Any]) -> Any:
        """Do it, or wait until another rank of this machine has done it.

        Raises:
            UserError: `work` did, here or there.
        """
        key = f"once/{self._run}/{next(self._numbers)}/{socket.gethostname()}"
        store = job_store()
        if not is_first(f"{key}/begun"):
            store.wait([key], LONGEST)
            return _received(json.loads(store.get(key)))
        try:
            result = work()
        except BaseException as error:
            store.set(key, json.dumps({"error": _told(error)}))
            raise
        store.set(key, json.dumps({"result": result}))
        return result


def _told(error: BaseException) -> dict[str, object]:
    if isinstance(error, DataError) and isinstance(error.problem, Violation):
        return {"keys": error.problem.keys, "rule": error.problem.rule}
    said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return {"keys": [], "rule": said}


def _received(message: dict[str, Any]) -> Any:
    if "result" in message:
        return message["result"]
    keys, rule = message["error"]["keys"], message["error"]["rule"]
    raise DataError(Violation(tuple(keys), rule) if keys else rule)
