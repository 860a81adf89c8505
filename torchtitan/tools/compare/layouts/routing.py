"""Which experts a rank's tokens are sent to: written down, and decided by another run's record.

Tokens are dealt out differently in every layout, so each gets a name that does not depend on it: a
hash of its whole sample, and its place there. Names are made before a sample is cut for context
parallelism, and cut in the same way; each tensor-parallel rank routes its contiguous part. A layer
routes the rows of a step in their order, in as many microbatches as there may be.

A record has for each layer the scores of all tokens and the experts chosen from them. With a
reference a token is sent where the reference sent it, and what it would have chosen by itself is
still written down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan.models.interface import RouterModule

if TYPE_CHECKING:
    from torchtitan.parallel.execution import Batch
    from torchtitan.trainer import Run

Choose = Callable[[Tensor, Tensor | None], Tensor]
CHOICES = "choices"
PLACES = 2**20
"""A name's last 20 bits: places of a sample."""
Record = dict[str, dict[str, Tensor]]
"""By layer: `names` (T), `scores` (T, E) with the bias, and the chosen `ids` (T, K)."""


def name_tokens(samples: Mapping[str, Tensor]) -> Tensor:
    """Return a number for each token of whole samples, int64 (B, S); alike for equal samples."""
    tokens_BS, labels_BS = samples["tokens"], samples["labels"]
    assert tokens_BS.shape[1] <= PLACES, "so many places have no names"
    hashes = [
        int.from_bytes(blake2b(torch.cat(pair).numpy().tobytes(), digest_size=5).digest(), "little")
        for pair in zip(tokens_BS.cpu(), labels_BS.cpu(), strict=True)
    ]
    return torch.tensor(hashes)[:, None] * PLACES + torch.arange(tokens_BS.shape[1])


def join(records: Sequence[Record]) -> Record:
    """Put the records of all ranks together, sorted by name."""
    found: Record = {}
    for layer in sorted({layer for record in records for layer in record}, key=int):
        parts = [record[layer] for record in records if layer in record]
        order_T = torch.cat([part["names"] for part in parts]).sort(stable=True).indices
        found[layer] = {key: torch.cat([part[key] for part in parts])[order_T] for key in parts[0]}
    return found


def read_choices(folder: Path, step: int) -> Record:
    """Read what all ranks wrote of a step."""
    return join([torch.load(file) for file in sorted((folder / f"step-{step}").iterdir())])


def watch_routing(run: Run, *, folder: Path, rank: int, replayed: Path | None) -> Run:
    """Return the run, which writes the choices of each step to `folder`/step-N, and takes them from
    `replayed`, if given. Where this rank holds no experts it is returned as it is."""
    routing = _Routing(run, replayed=replayed)
    if not routing.attach():
        return run
    plain = run.execution

    class Watched:
        owns_loss, evaluate = plain.owns_loss, plain.evaluate
        after_update = plain.after_update

        def forward_backward(self, batches: Sequence[Batch], *, divisor: Tensor) -> Tensor:
            routing.begin(num_batches=len(batches))
            loss_sum = plain.forward_backward(batches, divisor=divisor)
            routing.write(folder / f"step-{run.progress.step}" / f"rank-{rank}.pt")
            return loss_sum

    return replace(run, execution=Watched(), sequence_shard=routing)  # type: ignore[arg-type]


class _Routing:
    """Stands between a run's routers and their choices, and for the run's `sequence_shard`."""

    def __init__(self, run: Run, *, replayed: Path | None) -> None:
        self._run, self._shard, self._replayed = run, run.sequence_shard, replayed
        self._tp, self._tp_rank = run.mesh.dims.tp, run.mesh.data.get_local_rank("tp")
        self._taken: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._reference: Record = {}
        self._made: dict[str, list[dict[str, Tensor]]] = defaultdict(list)
        self._num_rows: dict[str, int] = {}

    def take(self, samples: Mapping[str, Tensor]) -> Batch:
        """Cut samples as the run does, and the names of their tokens in the same way."""
        named = {**samples, "tokens": name_tokens(samples)}
        self._taken.append(self._shard.take(named).tokens)
        return self._shard.take(samples)

    def attach(self) -> bool:
        """Put `_decide` in the place of each router's choice; tell whether there is any."""
        found = False
        for part in self._run.model:
            for layer, block in part.layers.items():
                for module in block.modules():
                    if isinstance(module, RouterModule):
                        decide = partial(self._decide, layer, module)
                        module.choose = _beneath(module.choose, decide)
                        found = True
        return found

    def begin(self, *, num_batches: int) -> None:
        """Start a step on the batches that were taken last."""
        self._rows = [row for batch in self._taken[-num_batches:] for row in batch]
        self._taken.clear()
        self._made.clear()
        self._num_rows.clear()
        if self._replayed is not None:
            self._reference = read_choices(self._replayed, self._run.progress.step)

    def write(self, file: Path) -> None:
        """Write down what was chosen in this step."""
        file.parent.mkdir(parents=True, exist_ok=True)
        made = {
            layer: {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            for layer, parts in self._made.items()
        }
        torch.save(made, file)

    def _decide(
        self,
        layer: str,
        router: RouterModule,
        choose: Choose,
        scores_BSE: Tensor,
        bias_E: Tensor | None,
    ) -> Tensor:
        """Choose in the place of `choose`; `on_choice` hears of the choices that are used."""
        on_choice, router.on_choice = router.on_choice, None
        own_BSK = choose(scores_BSE, bias_E)
        router.on_choice = on_choice
        if not torch.is_grad_enabled():  # an evaluation
            return own_BSK
        compared_BSE = scores_BSE if bias_E is None else scores_BSE + bias_E
        names_BS = self._names(layer, num_rows=len(scores_BSE))
        assert names_BS.shape == scores_BSE.shape[:2], "a router meets other tokens than it should"
        part = {"names": names_BS, "scores": compared_BSE, "ids": own_BSK}
        flat = {key: x.detach().cpu().flatten(0, 1) for key, x in part.items()}
        self._made[layer].append(flat)
        if self._replayed is not None:
            own_BSK = self._look_up(layer, flat["names"]).to(own_BSK.device).view_as(own_BSK)
        if on_choice is not None:
            on_choice(scores_BSE, own_BSK)
        return own_BSK

    def _look_up(self, layer: str, names_T: Tensor) -> Tensor:
        theirs = self._reference[layer]
        place_T = torch.searchsorted(theirs["names"], names_T)
        place_T = place_T.clamp(max=len(theirs["names"]) - 1)
        assert theirs["names"][place_T].equal(names_T), "the reference lacks a token"
        return theirs["ids"][place_T]

    def _names(self, layer: str, *, num_rows: int) -> Tensor:
        """Return the names of the next rows' tokens that this rank routes."""
        start = self._num_rows.get(layer, 0)
        self._num_rows[layer] = start + num_rows
        rows_BS = torch.stack(self._rows[start : start + num_rows])
        parts = rows_BS.chunk(self._tp, dim=1)  # there may be fewer than ranks
        return parts[self._tp_rank] if self._tp_rank < len(parts) else rows_BS[:, :0]


def _beneath(choose: Choose, decide: Callable[[Choose, Tensor, Tensor | None], Tensor]) -> Choose:
    """Return `choose` with `decide` around it, but inside of what keeps it for recomputation."""
    if isinstance(choose, partial) and choose.args:
        inner, *others = choose.args
        return partial(choose.func, partial(decide, inner), *others, **choose.keywords)
    return partial(decide, choose)
