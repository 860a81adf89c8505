"""Which rank writes a tensor that several ranks hold alike.

DCP deals such tensors out among their ranks, so that all write as many bytes. That is right for
weights that are copied, and wrong for small tensors, such as the optimizer's count of steps for
each parameter: every rank that resumes would open the files of as many other ranks as there are
parameters, a million times in all with 4,096 ranks. So the first rank that holds a small one writes
it, and DCP deals out the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

SMALL = 1 << 10
"""Elements up to which a tensor is small."""


class SmallOnFirstRank(DefaultSavePlanner):
    """Lets the first rank that holds a small tensor write it, alone."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what each rank writes, and the metadata of all."""
        written: set[Any] = set()
        plans = []
        for plan in all_plans:
            kept = [item for item in plan.items if item.index not in written or not is_small(item)]
            written.update(item.index for item in plan.items)
            plans.append(replace(plan, items=kept))
        return super().create_global_plan(plans)


def is_small(item: WriteItem) -> bool:
    """Tell whether what is written of a tensor is small."""
    return item.tensor_data is not None and item.tensor_data.chunk.sizes.numel() <= SMALL
