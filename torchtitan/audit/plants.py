"""The bugs that `compare --plant` knows (`bugs.py`), and what each needs to occur in a job.

Without it, as without tied embeddings, there is nothing to find, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.audit import bugs
from torchtitan.audit.layouts.words import Layout
from torchtitan.data.loader import accumulation_steps
from torchtitan.job import Config
from torchtitan.metrics.rows import Row
from torchtitan.models.sizes import MoEConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is known of a job in one layout, trained without a bug."""

    config: Config
    layout: Layout
    sizes: Any
    """Of the model."""
    rows: Sequence[Row]
    """Of the reference."""
    draws: bool
    """Whether its steps draw random numbers."""

    def degree(self, name: str) -> int:
        """Return a degree of [parallelism], without its ending."""
        return self.layout.degrees[f"{name}_degree"]

    @property
    def accumulation(self) -> int:
        """Number of microbatches of a step on each data-parallel rank."""
        training = self.config.training
        local = training.local_batch_size
        whole = training.global_batch_size
        return accumulation_steps(whole, local_batch_size=local, dp=self.layout.dp)


Needs = tuple[Callable[[Job], bool], str]
"""Whether a bug can occur, and why not."""


def _needs(degree: str, why: str) -> Needs:
    return lambda job: job.degree(degree) > 1, why


_REPLICAS = _needs("data_parallel_replicate", "no copies of the model (ddp, hsdp)")
_TP = _needs("tensor_parallel", "no tensor parallelism")
_CP = _needs("context_parallel", "no context parallelism")
_PP = _needs("pipeline_parallel", "no pipeline")
_RANKS: Needs = (lambda job: job.layout.world_size > 1, "one rank has all")
_TIED: Needs = (lambda job: job.sizes.tie_embeddings, "no tied embeddings")
_MASKED: Needs = (
    lambda job: any((row["valid_token_fraction"] or 0.0) < 1 for row in job.rows),
    "no label is masked",
)
_ACCUMULATES: Needs = (lambda job: job.accumulation > 1, "no gradient accumulation")


@dataclass(frozen=True)
class Plant:
    """A bug, and all that it needs to occur."""

    put: Callable[[], None]
    needs: tuple[Needs, ...] = ()
    resumes: bool = False
    """It occurs at a resume."""

    def obstacle(self, job: Job) -> str:
        """Say why it cannot occur in a job; "" if it can."""
        return next((why for can_occur, why in self.needs if not can_occur(job)), "")


PLANTS: Mapping[str, Plant] = {
    plant.put.__name__: plant
    for plant in (
        Plant(
            bugs.mean_of_means,
            (
                (
                    lambda job: job.accumulation * job.layout.world_size > 1,
                    "one microbatch a step",
                ),
                _MASKED,
            ),
        ),
        Plant(bugs.microbatch_dropped, (_ACCUMULATES,)),
        Plant(
            bugs.gradients_averaged_over_dp,
            ((lambda job: job.layout.dp * job.degree("context_parallel") > 1, "no data ranks"),),
        ),
        Plant(bugs.copies_not_reduced, (_REPLICAS,)),
        Plant(
            bugs.norms_not_summed_over_tp,
            (
                _TP,
                (
                    lambda job: job.config.parallelism.enable_sequence_parallel,
                    "no sequence parallelism",
                ),
            ),
        ),
        Plant(bugs.weight_permuted_in_tp_shard, (_TP,)),
        Plant(bugs.labels_shifted_in_cp_shard, (_CP,)),
        Plant(bugs.gradients_not_summed_over_cp, (_CP,)),
        Plant(bugs.mask_ignored, (_MASKED,)),
        Plant(bugs.tied_copy_stale, (_PP, _TIED)),
        Plant(bugs.tied_gradient_not_summed, (_PP, _TIED)),
        Plant(
            bugs.lr_late,
            ((lambda job: len({row["lr"] for row in job.rows}) > 1, "the rate is constant"),),
        ),
        Plant(bugs.norm_of_own_shard, (_RANKS,)),
        Plant(
            bugs.router_bias_not_synced,
            (
                (lambda job: isinstance(job.sizes, MoEConfig), "no experts"),
                (lambda job: job.config.router.bias_update_rate > 0, "the biases do not move"),
                _RANKS,
            ),
        ),
        Plant(bugs.optimizer_not_restored, resumes=True),
        Plant(bugs.position_off_by_one, resumes=True),
        Plant(
            bugs.rng_not_restored,
            ((lambda job: job.draws, "no step draws random numbers"),),
            resumes=True,
        ),
    )
}
"""All bugs by name."""
