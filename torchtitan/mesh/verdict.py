"""What the nodes of a job make of it when ranks have ended: done, meet again, or the end.

torch's agents each decide alone, by `--max_restarts`: a lost node makes the ranks of all others
fail, which counts as a crash of each of them, and with no restarts left the first to notice closes
the job for all. Here each agent writes down how its ranks have ended, waits until every other one
has done so or gives no sign of life, and all judge the same facts by the same rule.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

MUST_BE_FIXED = (2, 3)
"""Exit codes of `train.py` after which a start with the same settings ends in the same way."""
STOPPED = 4
HUNG = 5
"""Of a rank that has waited too long for another one. No job ends with it: once it is not started
again in place it ends as one that was stopped, since another start, on other nodes, may go on."""
LEFT = (STOPPED, -signal.SIGTERM)
"""Asked to leave: a rank that is still importing dies of the signal."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the ranks of one node ended."""

    codes: tuple[int, ...]
    """Exit codes; none of a node that stands by."""
    lost: tuple[int, ...] = ()
    """Nodes that gave no sign of life when this one had its ranks killed; they may be back."""
    is_signalled: bool
    """Whether this node was asked to stop the job."""
    restarts_left: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows, for all nodes alike."""

    action: Literal["done", "meet", "end"]
    why: str
    code: int = 0
    restarts_left: int = 0


def judge(endings: Mapping[int, Ending], *, lost: Collection[int], makes_room: bool) -> Verdict:
    """Judge how the nodes of a round, by number, have ended.

    `lost` nodes gave no sign of life; `makes_room`: ranks were asked to leave for a node that
    waits.
    """
    codes = [code for _, ending in sorted(endings.items()) for code in ending.codes]
    restarts_left = min((ending.restarts_left for ending in endings.values()), default=0)
    for code in codes:
        if code in MUST_BE_FIXED:
            return Verdict(action="end", why="a rank has said what must be fixed", code=code)
    if any(ending.is_signalled for ending in endings.values()):
        return Verdict(action="end", why="stopped by a signal", code=STOPPED)
    if lost or any(ending.lost for ending in endings.values()):
        return Verdict(action="meet", why="a node is lost", restarts_left=restarts_left)
    if not codes:  # all nodes stood by
        return Verdict(action="meet", why="more nodes are here", restarts_left=restarts_left)
    if not any(codes):
        return Verdict(action="done", why="all ranks are done")
    if makes_room and any(code in LEFT for code in codes):
        return Verdict(action="meet", why="a node is let in", restarts_left=restarts_left)
    if STOPPED in codes:
        return Verdict(action="end", why="the ranks have stopped", code=STOPPED)
    if restarts_left:
        return Verdict(action="meet", why="a rank has crashed", restarts_left=restarts_left - 1)
    if HUNG in codes:
        why = "a rank hangs; no --max_restarts are left"
        return Verdict(action="end", why=why, code=STOPPED)
    [code, *_] = sorted(filter(None, codes))
    code = code if code > 0 else 1
    return Verdict(action="end", why="a rank has crashed; no --max_restarts are left", code=code)
