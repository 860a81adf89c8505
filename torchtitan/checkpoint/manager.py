"""When to save, what to keep, and where to go on from.

A save runs in the loop (`disabled`) or, once a copy of the state is made, in a thread (`async`)
that talks over a process group of its own. One save is in flight at most, and older checkpoints are
removed only after the new one is committed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.state import RunState, rng_tensors, set_rng
from torchtitan.checkpoint.storage import Component
from torchtitan.config.schema import CheckpointConfig

logger = logging.getLogger(__name__)
SAVE_TIMEOUT = timedelta(hours=1)


class CheckpointManager:
    """Saves and loads one run's checkpoints.

    `state` is the run; `folder` holds the `step-N` folders; `manifest` is written into each of
    them."""

    def __init__(
        self,
        state: RunState,
        *,
        settings: CheckpointConfig,
        folder: Path,
        manifest: Mapping[str, Any],
    ) -> None:
        self.folder = folder
        self._state = state
        self._settings = settings
        self._manifest = manifest
        self._group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
        self._thread: ThreadPoolExecutor | None = None
        if settings.async_mode != "disabled":
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def load(self) -> bool:
        """Resume from the newest whole checkpoint, or `load_step`; False if there is none.

        Raises:
            CheckpointError: `load_step` is not there, or the checkpoint does not fit the run.
        """
        wanted = self._settings.load_step
        steps = storage.on_first_rank(lambda: storage.find_steps(self.folder), group=self._group)
        if wanted == -1 and not steps:
            return False
        if wanted != -1 and wanted not in steps:
            raise CheckpointError(
                f"checkpoint.load_step {wanted} is not in {self.folder}; it holds "
                f"{steps or 'no checkpoint'}"
            )
        source = self.folder / f"step-{steps[-1] if wanted == -1 else wanted}"
        self._load(source)
        logger.info("Resumed from %s", source)
        return True

    def _load(self, source: Path) -> None:
        state, components = self._state, self._state.components()
        missing = components.keys() - storage.read_manifest(source)["components"]
        if missing:
            raise CheckpointError(
                f"a run resumes from a full checkpoint, but {source} lacks "
                f"{', '.join(sorted(missing))} (saved with last_save_model_only?); choose an "
                f"earlier one by checkpoint.load_step"
            )
        for name in ("model", "optimizer"):
            tensors = components[name].tensors
            storage.read_tensors(source, name, into=tensors, group=self._group)
        state.loader.load_state_dict(storage.read_state(source, "dataloader"))
        train_state = storage.read_state(source, "train_state")
        state.progress.step = train_state["step"]
        state.progress.tokens_seen = train_state["tokens_seen"]
        if train_state["world_size"] != dist.get_world_size():
            logger.info("Another number of ranks: random generators start from debug.seed")
            return
        rank = dist.get_rank()
        rng = rng_tensors(rank=rank)
        storage.read_tensors(source, "train_state", into=rng, group=self._group)
        set_rng(rng, rank=rank)

    def save_if_due(self, *, last: bool, now: bool = False) -> bool:
        """Save where the cadence, the end of the run or `now` asks for it; tell whether it did.

        Raises:
            CheckpointError: This save, or an earlier one in the background, failed.
        """
        self._raise_if_failed()
        step = self._state.progress.step
        due = step % self._settings.interval == 0
        first = step == 1 and self._settings.enable_first_step_checkpoint
        if self._settings.load_only or not (last or now or due or first):
            return False
        self._wait()
        components = self._state.components()
        if last and self._settings.last_save_model_only:
            components = {"model": components["model"]}
        if self._thread is None:
            self._save(step, components)
        else:
            self._pending = self._thread.submit(self._save, step, _copied(components))
        if last:
            self._wait()
        return True

    def _save(self, step: int, components: Mapping[str, Component]) -> None:
        target = self.folder / f"step-{step}"
        storage.write(
            target, components, manifest={"step": step, **self._manifest}, group=self._group
        )
        logger.info("Saved %s", target)
        keep = self._settings.keep_latest_k
        if keep:
            storage.on_first_rank(lambda: self._delete_all_but(keep), group=self._group)

    def _delete_all_but(self, keep: int) -> None:
        for step in storage.find_steps(self.folder)[:-keep]:
            storage.delete(self.folder / f"step-{step}")

    def _raise_if_failed(self) -> None:
        if self._pending is not None and self._pending.done():
            self._wait()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the save in flight, and raise what it raised."""
        self._wait()
        if self._thread is not None:
            self._thread.shutdown()


def _copied(components: Mapping[str, Component]) -> dict[str, Component]:
    """Copy every tensor into host memory, where training does not change it."""
    return {
        name: Component(
            tensors={key: t.detach().to("cpu", copy=True) for key, t in c.tensors.items()},
            state=c.state,
        )
        for name, c in components.items()
    }
