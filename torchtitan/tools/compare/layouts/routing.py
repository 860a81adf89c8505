"""Record which experts a rank's tokens are sent to, and replay the record of another run.

Layouts distribute tokens differently, so each token gets a name that does not depend on the layout:
a hash of its full sample, and its place there. Names are made before context parallelism cuts a
sample, and are cut in the same way. Each tensor-parallel rank routes its contiguous part. A layer
routes the rows of a step in order, in any number of microbatches.

The record of a layer has the scores of all tokens and the chosen experts. With a reference, tokens
are sent to the reference's experts, and the choices they would have made are recorded.
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
    from torchtitan.parallel.execution import Batch, Execution
    from torchtitan.trainer import Run

Choose = Callable[[Tensor, Tensor | None], Tensor]
CHOICES = "choices"
MAX_PLACES = 2**20
"""The last 20 bits of a name are the place in the sample."""
Record = dict[str, dict[str, Tensor]]
"""By layer: `names` (T), `scores` (T, E) with the bias, and the chosen `ids` (T, K)."""


class ObservedExecution:
    """An execution that calls `before(batches)` and `after()` around each step."""

    def __init__(
        self,
        execution: Execution,
        *,
        before: Callable[[Sequence[Batch]], None] = lambda batches: None,
        after: Callable[[], None],
    ) -> None:
        self.owns_loss, self.evaluate = execution.owns_loss, execution.evaluate
        self.after_update = execution.after_update
        self._run, self._before, self._after = execution.forward_backward, before, after

    def forward_backward(self, batches: Sequence[Batch], *, divisor: Tensor) -> Tensor:
        """Run the batches of a step."""
        self._before(batches)
        loss_sum = self._run(batches, divisor=divisor)
        self._after()
        return loss_sum


def name_tokens(samples: Mapping[str, Tensor]) -> Tensor:
    """Return a name for each token of full samples, int64 (B, S). Equal samples get equal names."""
    tokens_BS, labels_BS = samples["tokens"], samples["labels"]
    assert tokens_BS.shape[1] <= MAX_PLACES, "a name has 20 bits for the place"
    hashes = [
        int.from_bytes(blake2b(torch.cat(pair).numpy().tobytes(), digest_size=5).digest(), "little")
        for pair in zip(tokens_BS.cpu(), labels_BS.cpu(), strict=True)
    ]
    return torch.tensor(hashes)[:, None] * MAX_PLACES + torch.arange(tokens_BS.shape[1])


def read_choices(folder: Path, step: int) -> Record:
    """Read the records of all ranks in a step, sorted by name."""
    records = [torch.load(file) for file in sorted((folder / f"step-{step}").iterdir())]
    choices: Record = {}
    for layer in sorted({layer for record in records for layer in record}, key=int):
        parts = [record[layer] for record in records if layer in record]
        order_T = torch.cat([part["names"] for part in parts]).sort(stable=True).indices
        choices[layer] = {key: x[order_T] for key, x in _join(parts).items()}
    return choices


def _join(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def watch_routing(run: Run, *, folder: Path, rank: int, replayed: Path | None) -> Run:
    """Return a run that records the choices of each step in `folder`/step-N.

    With `replayed`, the folder of another run, tokens go to the experts of that run. A rank without
    experts gets its run back.
    """
    routing = _Routing(run, folder=folder, rank=rank, replayed=replayed)
    if not routing.attach():
        return run
    observed = ObservedExecution(run.execution, before=routing.start, after=routing.write)
    return replace(run, execution=observed, sequence_shard=routing)  # type: ignore[arg-type]


class _Routing:
    """Wraps the `choose` of a run's routers and its `sequence_shard`."""

    def __init__(self, run: Run, *, folder: Path, rank: int, replayed: Path | None) -> None:
        self._run, self._shard, self._replayed = run, run.sequence_shard, replayed
        self._folder, self._file = folder, f"rank-{rank}.pt"
        self._tp, self._tp_rank = run.mesh.dims.tp, run.mesh.data.get_local_rank("tp")
        self._taken: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._reference: Record = {}
        self._choices: dict[str, list[dict[str, Tensor]]] = defaultdict(list)
        self._num_rows: dict[str, int] = defaultdict(int)

    def take(self, samples: Mapping[str, Tensor]) -> Batch:
        """Cut samples like the run does, and the names of their tokens in the same way."""
        tensors = {**samples, "tokens": name_tokens(samples)}
        self._taken.append(self._shard.take(tensors).tokens)
        return self._shard.take(samples)

    def attach(self) -> bool:
        """Wrap the choice of each router, and return whether the rank has any."""
        is_routed = False
        for part in self._run.model:
            for layer, block in part.layers.items():
                for module in block.modules():
                    if isinstance(module, RouterModule):
                        module.choose = _wrap(module.choose, partial(self._decide, layer, module))
                        is_routed = True
        return is_routed

    def start(self, batches: Sequence[Batch]) -> None:
        """Start a step on the batches that were taken last."""
        self._rows = [row for names_BS in self._taken[-len(batches) :] for row in names_BS]
        self._taken.clear()
        self._choices.clear()
        self._num_rows.clear()
        if self._replayed is not None:
            self._reference = read_choices(self._replayed, self._run.progress.step)

    def write(self) -> None:
        """Write the choices of this step."""
        folder = self._folder / f"step-{self._run.progress.step}"
        folder.mkdir(parents=True, exist_ok=True)
        record = {layer: _join(parts) for layer, parts in self._choices.items()}
        torch.save(record, folder / self._file)

    def _decide(
        self,
        layer: str,
        router: RouterModule,
        choose: Choose,
        scores_BSE: Tensor,
        bias_E: Tensor | None,
    ) -> Tensor:
        """Call `choose`, record its choice, and return that or the reference's.

        The router's `on_choice` is called with the returned choice.
        """
        on_choice, router.on_choice = router.on_choice, None
        ids_BSK = choose(scores_BSE, bias_E)
        router.on_choice = on_choice
        if not torch.is_grad_enabled():  # validation
            return ids_BSK
        biased_BSE = scores_BSE if bias_E is None else scores_BSE + bias_E
        names_BS = self._names(layer, num_rows=len(scores_BSE))
        assert names_BS.shape == scores_BSE.shape[:2], "a router must get this rank's tokens"
        choices = {"names": names_BS, "scores": biased_BSE, "ids": ids_BSK}
        flat = {key: x.detach().cpu().flatten(0, 1) for key, x in choices.items()}
        self._choices[layer].append(flat)
        if self._replayed is not None:
            ids_BSK = self._look_up(layer, flat["names"]).to(ids_BSK.device).view_as(ids_BSK)
        if on_choice is not None:
            on_choice(scores_BSE, ids_BSK)
        return ids_BSK

    def _look_up(self, layer: str, names_T: Tensor) -> Tensor:
        reference = self._reference[layer]
        index_T = torch.searchsorted(reference["names"], names_T)
        index_T = index_T.clamp(max=len(reference["names"]) - 1)
        assert reference["names"][index_T].equal(names_T), "the reference must have each token"
        return reference["ids"][index_T]

    def _names(self, layer: str, *, num_rows: int) -> Tensor:
        """Return the names of the tokens that this rank routes in the next rows."""
        start = self._num_rows[layer]
        self._num_rows[layer] += num_rows
        rows_BS = torch.stack(self._rows[start : start + num_rows])
        parts = rows_BS.chunk(self._tp, dim=1)  # possibly fewer than ranks
        return parts[self._tp_rank] if self._tp_rank < len(parts) else rows_BS[:, :0]


def _wrap(choose: Choose, decide: Callable[[Choose, Tensor, Tensor | None], Tensor]) -> Choose:
    """Return `choose` wrapped by `decide`, inside the function that keeps it for recomputation."""
    if isinstance(choose, partial) and choose.args:
        inner, *arguments = choose.args
        return partial(choose.func, partial(decide, inner), *arguments, **choose.keywords)
    return partial(decide, choose)
