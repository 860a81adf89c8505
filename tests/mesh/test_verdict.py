"""What nodes make of it when ranks have ended: one row for each thing that can happen."""

from __future__ import annotations

import pytest

from torchtitan.mesh.verdict import Ending, judge


def ending(*codes: int, signalled: bool = False, left: int = 0) -> Ending:
    return Ending(codes=codes, is_signalled=signalled, restarts_left=left)


@pytest.mark.parametrize(
    ("endings", "lost", "room", "expected"),
    [
        # all done, a node that stands by included
        ([ending(0, 0), ending(0, 0), ending()], [], False, ("done", 0, 0)),
        # too few for any layout, and then one more
        ([ending(left=3), ending(left=3)], [], False, ("meet", 0, 3)),
        # a lost node takes the others' ranks along, and uses up no restart
        ([ending(1, 1), ending(1, -9)], [2], False, ("meet", 0, 0)),
        ([ending(1, left=2), ending(left=2)], [2], False, ("meet", 0, 2)),
        # lost after the last step: nothing is left to train, but who knows
        ([ending(0), ending(0)], [2], False, ("meet", 0, 0)),
        # taken for lost, and back: its ranks were killed for that
        (
            [Ending(codes=(-9,), lost=(1,), is_signalled=False, restarts_left=0), ending(1)],
            [],
            False,
            ("meet", 0, 0),
        ),
        # a crash: restarts are for this, and all nodes count alike
        ([ending(1, left=2), ending(-11, left=1)], [], False, ("meet", 0, 0)),
        ([ending(1), ending(-11)], [], False, ("end", 1, 0)),
        ([ending(-9), ending()], [], False, ("end", 1, 0)),
        # what must be fixed is never started again, nor by a lost node
        ([ending(1, left=5), ending(2, left=5)], [], False, ("end", 2, 0)),
        ([ending(3, left=5), ending(1, left=5)], [2], True, ("end", 3, 0)),
        # stopped: by a signal to one node, a deadline, or to let a node in
        ([ending(4, signalled=True), ending(4, left=3)], [], True, ("end", 4, 0)),
        ([ending(1, signalled=True, left=3), ending(1, left=3)], [2], False, ("end", 4, 0)),
        ([ending(4, left=3), ending(4, left=3)], [], False, ("end", 4, 0)),
        ([ending(4, left=3), ending(4, left=3)], [], True, ("meet", 0, 3)),
        # asked to leave in set-up, some by the signal, the others by broken connections
        ([ending(-15), ending(4), ending(1)], [], True, ("meet", 0, 0)),
        # a rank waited too long for another: started again, and if not here then elsewhere
        ([ending(5, left=1), ending(-9, left=1)], [], False, ("meet", 0, 0)),
        ([ending(5), ending(-9)], [], False, ("end", 4, 0)),
        # a node waits, but this was a crash
        ([ending(1), ending(1)], [], True, ("end", 1, 0)),
    ],
)
def test_verdict(
    endings: list[Ending], lost: list[int], room: bool, expected: tuple[str, int, int]
) -> None:
    verdict = judge(dict(enumerate(endings)), lost=lost, makes_room=room)
    assert (verdict.action, verdict.code, verdict.restarts_left) == expected
