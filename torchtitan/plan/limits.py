"""What a plan cannot know of a job, in sentences that several commands print."""

from __future__ import annotations

from torchtitan.plan.job import Planned

BUDGET_IS_NOT_TRIED = (
    'activation_checkpoint.mode = "memory_budget" is not tried, for what the compiler chooses is '
    "not rehearsed: these settings replace it."
)


def of_recomputation(planned: Planned) -> list[str]:
    """Return what a plan leaves to the compiler: a rehearsal does not compile."""
    if not planned.has_budget:
        return []
    budget = planned.config.activation_checkpoint.memory_budget
    return [
        f'activation_checkpoint.mode = "memory_budget" ({budget:g}): what the compiler recomputes '
        "is not rehearsed. Memory is planned as if nothing were, so the job should need less; the "
        "time at worst is that of a second forward more."
    ]
