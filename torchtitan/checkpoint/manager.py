"""When to save, and what to keep.

A save runs in a thread, over a process group of its own. The loop waits for it (`disabled`), or
continues once the state is copied (`async`; `async_with_pinned_mem` copies in another way). At most
one save is in flight, and older checkpoints are removed only after the new one is committed.

How long a save takes depends on the storage, so its group waits for an hour. A rank that hangs is
found much sooner: ranks send each other heartbeats while they save (`mesh.faults.Pulse`), and
whoever waits for a save watches them. Hence the thread: a blocked collective cannot watch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchtitan.base.errors import ConfigError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.disks import on_each_disk
from torchtitan.checkpoint.folders import MANIFEST, delete, find_steps, set_aside_after
from torchtitan.checkpoint.ranks import on_first_rank
from torchtitan.checkpoint.remote import RemoteSteps
from torchtitan.checkpoint.retention import Retention, describe_score
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.staging import Staging
from torchtitan.checkpoint.state import RunState
from torchtitan.checkpoint.storage import Component
from torchtitan.mesh.faults import Pulse

logger = logging.getLogger(__name__)
SAVE_TIMEOUT = timedelta(hours=1)
"""Longest wait within a save for a rank that lives."""
PINNED = "async_with_pinned_mem"
EXPORT = "export"  # inside the folder, where no name of a step can meet it
Export = Callable[[Path, Path], None]


class Recorder(Protocol):
    """What writes down which checkpoints a run has made."""

    def checkpoint(self, folder: Path, *, step: int) -> None:
        """Record one; raise CheckpointError if that is not possible."""


def build_group() -> dist.ProcessGroup:
    """Build the process group of checkpoints, apart from the ones that training uses."""
    return dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)


def check_staging(settings: CheckpointConfig, *, device_type: str) -> None:
    """Refuse page-locked memory where there is no GPU to copy from."""
    if settings.enable and settings.async_mode == PINNED and device_type != "cuda":
        raise ConfigError(
            f'checkpoint.async_mode = "{PINNED}" copies from a GPU, and this job computes on '
            f'{device_type}; write "async"'
        )


class CheckpointManager:
    """Saves one run's checkpoints.

    `state` is the run; `folder` holds the `step-N` folders; `manifest` is written into each of
    them; `group` is this manager's own; a save ends when a rank's `pulse` stops. `export` writes
    the Hugging Face folder at the end, from the last step's folder to another; None: not asked for.
    `validation_data` identifies the data of the validation, if there is one. With `remote` each
    checkpoint is uploaded once it is whole in `folder`, while training goes on. `ledger`, on rank 0
    alone, hears of each that is whole.
    """

    def __init__(
        self,
        state: RunState,
        *,
        settings: CheckpointConfig,
        folder: Path,
        manifest: Mapping[str, Any],
        group: dist.ProcessGroup,
        pulse: Pulse,
        export: Export | None = None,
        validation_data: str | None = None,
        remote: RemoteSteps | None = None,
        ledger: Recorder | None = None,
    ) -> None:
        self.folder = folder
        self._state = state
        self._settings = settings
        self._manifest = manifest
        self._group = group
        self._pulse = pulse
        self._export = export
        self._validation_data = validation_data
        self._ledger = ledger
        self._remote, self._disk = remote, None if remote is None else remote.disk
        self._kept = self._kept_here = Retention(
            keep_latest=settings.keep_latest_k, keep_best=settings.keep_best, data=validation_data
        )
        if remote is not None:
            self._kept_here = Retention(keep_latest=settings.staging_keep_latest_k)
        self._begun_at, self._is_first_save = state.progress.step, True
        self._in_background = settings.async_mode != "disabled"
        self._pending: Future[None] | None = None
        self._staging = Staging(pinned=settings.async_mode == PINNED)

    def is_due(self, *, last: bool, now: bool = False) -> bool:
        """Tell whether the cadence, the end of the run or `now` asks for a save."""
        step = self._state.progress.step
        first = step == 1 and self._settings.enable_first_step_checkpoint
        return last or now or first or step % self._settings.interval == 0

    def save(self, *, last: bool, validation_loss: float | None = None) -> Path:
        """Save or, if asynchronous, begin to; return the folder.

        `validation_loss` is that of the present weights, where it was measured.

        Raises:
            CheckpointError: This save, or an earlier one in the background, failed.
            PeerError: Another rank hangs.
        """
        step = self._state.progress.step
        self.wait()
        components = self._state.components()
        saved = self._staging.copy(components) if self._in_background else components
        save, send = partial(self._save, step, saved, validation_loss), partial(self._send, step)
        if self._in_background and not last:
            self._start(save, send)
        else:
            self._start(save)
            self.wait()
            if self._remote is not None:
                self._start(send)  # in the background in any mode
        if last:
            self.wait()
            self._start(partial(self._write_export, step, components))
            self.wait()
        return self.folder / f"step-{step}"

    def _start(self, *actions: Callable[[], None]) -> None:
        """Run `actions`, which all ranks take part in, in a thread; `wait` tells how they ended."""
        pending: Future[None] = Future()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # each thread has its own
                with self._pulse.beating():
                    for action in actions:
                        action()
            except BaseException as error:  # noqa: BLE001 - DCP raises such; `wait` raises it
                pending.set_exception(error)
            else:
                pending.set_result(None)

        self._pending = pending
        # a daemon: one that waits for a rank that hangs keeps no process from ending
        threading.Thread(target=run, name="checkpoint", daemon=True).start()

    def complete(self) -> None:
        """Save a run that ends where it starts, and write the export that is asked for and not
        there: it failed, or was not asked for then."""
        settings, step = self._settings, self._state.progress.step
        exports = self._export is not None or settings.last_save_model_only
        if step > 0 and not exports:
            return
        saved = self.folder / f"step-{step}" / MANIFEST
        exported = self.folder / EXPORT / f"step-{step}"

        def is_there() -> bool:
            # whole if it is there; one of the other kind has a manifest, or lacks it
            has_manifest = (exported / MANIFEST).is_file()
            has_files = exported.is_dir() and any(exported.iterdir())
            return has_files and has_manifest == (self._export is None)

        if exports and on_first_rank(is_there, group=self._group):
            return
        components = self._state.components()
        if not on_first_rank(saved.is_file, group=self._group):
            # it came from another folder
            self._start(partial(self._save, step, components, None), partial(self._send, step))
            self.wait()
        self._start(partial(self._write_export, step, components))
        self.wait()

    def _write_export(self, step: int, components: Mapping[str, Component]) -> None:
        if self._export is not None:
            name = f"step-{step}"
            self._export(self.folder / name, self.folder / EXPORT / name)
            if self._remote is not None:
                self._remote.send_export(f"{EXPORT}/{name}")
        elif self._settings.last_save_model_only:
            self._write(self.folder / EXPORT, step, {"model": components["model"]})
            if self._remote is not None:
                self._remote.send(f"{EXPORT}/step-{step}")

    def _write(
        self,
        folder: Path,
        step: int,
        components: Mapping[str, Component],
        validation_loss: float | None = None,
    ) -> None:
        target = folder / f"step-{step}"
        manifest = {"step": step, **self._manifest}
        if validation_loss is not None and self._validation_data is not None:
            manifest |= describe_score(validation_loss, data=self._validation_data)
        storage.write(target, components, manifest=manifest, group=self._group, disk=self._disk)
        logger.info("Saved %s", target)

    def _save(
        self, step: int, components: Mapping[str, Component], validation_loss: float | None
    ) -> None:
        self._write(self.folder, step, components, validation_loss)
        on_each_disk(lambda: self._tidy(step), group=self._group, disk=self._disk)

    def _tidy(self, saved: int) -> None:
        if self._ledger is not None:
            self._ledger.checkpoint(self.folder / f"step-{saved}", step=saved)
        if self._is_first_save:
            # damaged, or this run would have begun with them; readable again one day, none of them
            # may come before a step of this run, or displace one
            for aside in set_aside_after(self.folder, self._begun_at, but=saved):
                logger.warning("%s was passed over, and is set aside", aside)
            self._is_first_save = False
        steps = find_steps(self.folder)
        for step in self._kept_here.to_delete(steps, place=self.folder):
            delete(self.folder / f"step-{step}")

    def _send(self, step: int) -> None:
        if self._remote is not None:
            self._remote.send(f"step-{step}")
            self._remote.tidy(step, self._kept)

    def has_failed(self) -> bool:
        """Tell whether the save in flight has failed, as far as this rank knows."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def wait(self) -> None:
        """Wait for the save in flight, and raise what it raised.

        Raises:
            PeerError: Another rank hangs.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._pulse.watch(pending)
            pending.result()

    def suspicion(self) -> str:
        """Say which ranks seem to hang, by a save in flight; "" if none does."""
        return self._pulse.suspicion()

    def close(self) -> None:
        """Wait for the save in flight, and raise what it raised."""
        self.wait()
