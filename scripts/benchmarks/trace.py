"""What a recorded step spent its time on, read from a trace of `profiling.enable_profiling`.

On a GPU the time of an operation is that of its kernels. On a CPU operations call one another, so
what counts is the time of each less that of those it calls.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

KERNEL, OPERATOR = "kernel", "cpu_op"
Event = Mapping[str, Any]


def top_operations(trace: Path, *, count: int = 3) -> list[tuple[str, float]]:
    """Return the operations that took longest, each with its part of the time of all."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    whole = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in whole if event.get("cat") == KERNEL]
    spent: Counter[str] = Counter()
    if kernels:
        for event in kernels:
            spent[event["name"]] += event["dur"]
    else:
        spent = _own_times(event for event in whole if event.get("cat") == OPERATOR)
    total = sum(spent.values())
    return [(name, taken / total) for name, taken in spent.most_common(count)]


def _own_times(events: Iterable[Event]) -> Counter[str]:
    """Add up the time of each operation without that of the operations inside it."""
    threads: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    spent: Counter[str] = Counter()
    for thread in threads.values():
        around: list[Event] = []
        # of two that begin together the longer one is outside
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            spent[event["name"]] += event["dur"]
            if around:
                spent[around[-1]["name"]] -= event["dur"]
            around.append(event)
    return spent
