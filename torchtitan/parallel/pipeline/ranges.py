"""Names for the work of a pipeline stage in a profiler's trace.

torch names its multi-stage schedules' actions itself, waits for other ranks included, and those of
1F1B not at all. A range around the stage's own work tells computing from waiting in every schedule.
Without a profiler a range costs about a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.profiler import record_function

PREFIX = "pipeline:"


def record_actions(stage: Any) -> None:
    """Put a range `pipeline:2F0` around each forward and backward of a torch pipeline stage."""
    name = f"{PREFIX}{stage.stage_index}"
    stage.forward_one_chunk = _recorded(stage.forward_one_chunk, lambda **_: f"{name}F")
    stage.backward_one_chunk = _recorded(
        stage.backward_one_chunk,
        lambda full_backward=True, **_: f"{name}{'B' if full_backward else 'I'}",
    )
    stage.backward_weight_one_chunk = _recorded(
        stage.backward_weight_one_chunk, lambda **_: f"{name}W"
    )


def _recorded(function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
    @wraps(function)
    def recorded(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        with record_function(f"{name(**kwargs)}{microbatch}"):
            return function(microbatch, *args, **kwargs)

    return recorded
