"""When to save a checkpoint, and how: in the loop or in the background.

A save runs in a background thread over its own process group. The training loop waits for it
(`async_mode = "disabled"`), or copies the state to host memory and continues (`"async"`,
`"async_with_pinned_mem"`). At most one save is in flight, and older checkpoints are deleted only
after the new one is committed.

The duration of a save depends on the storage, so its group has its own timeout,
`checkpoint.save_timeout_seconds`. A rank that dies closes its connections and fails the save at
once; a rank that hangs fails it after the timeout.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import ConfigError, StalledError
from torchtitan.base.urls import is_url
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.retention import SCORE, Retention
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.state import Component, RunState
from torchtitan.mesh.faults import is_timeout
from torchtitan.mesh.ranks import on_first_rank
from torchtitan.models.init import local_part

if TYPE_CHECKING:
    from torchtitan.checkpoint.remote import RemoteCheckpoints
    from torchtitan.metrics.events import EventLog

logger = logging.getLogger(__name__)
PINNED = "async_with_pinned_mem"
EXPORT = "export"  # folder of final exports, beside the steps
Export = Callable[[Path, Path], None]


def build_group(timeout_seconds: int) -> dist.ProcessGroup:
    """Build the process group of checkpoints."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))


@dataclass(frozen=True)
class CheckpointIO:
    """The process group, folder and store of checkpoints."""

    group: dist.ProcessGroup
    """All ranks, for checkpoint collectives only."""
    folder: Path
    """Local parent of the `step-N` folders."""
    remote: RemoteCheckpoints | None = None
    """The store that checkpoint.folder names, if it is a URL."""


def open_io(settings: CheckpointConfig, *, run_folder: Path, device_type: str) -> CheckpointIO:
    """Build the process group of checkpoints, and open their folder or store.

    If a run only loads, no store is opened.

    Args:
        settings: The section [checkpoint].
        run_folder: The folder of the run, job.dump_folder.
        device_type: What the job computes on.

    Raises:
        ConfigError: The store's package is missing, ranks do not share a disk that they need to
            share, or pinned staging needs a GPU.
    """
    if settings.enable and settings.async_mode == PINNED and device_type != "cuda":
        raise ConfigError.at(
            "checkpoint.async_mode",
            f'"{PINNED}" copies from a GPU, and this job computes on {device_type}; write "async"',
        )
    timeout = settings.save_timeout_seconds
    group, folder = build_group(timeout), run_folder / settings.local_folder
    if not settings.enable:
        return CheckpointIO(group, folder)
    if not is_url(settings.folder):
        if storage.find_disks(run_folder, group=group, timeout_seconds=timeout) is not None:
            raise ConfigError.at(
                ("job.dump_folder", "checkpoint.folder"),
                f"must be one folder for all ranks, and some do not see what others write to "
                f"{run_folder.absolute()}; name one on storage that all machines share, or write "
                f"a URL of an object store as checkpoint.folder",
            )
        return CheckpointIO(group, folder)
    from torchtitan.checkpoint.remote import RemoteCheckpoints

    remote = RemoteCheckpoints(
        settings.folder, key="checkpoint.folder", settings=settings, folder=folder, group=group
    )
    if remote.disk is not None and settings.last_save_in_hf:
        raise ConfigError.at(
            ("checkpoint.last_save_in_hf", "checkpoint.folder"),
            "needs a job.dump_folder that all ranks share; remove it, and convert a step of the "
            "store by python -m torchtitan convert",
        )
    return CheckpointIO(group, folder, remote)


class CheckpointManager:
    """Save checkpoints of one run.

    Args:
        state: Objects to save. Read again by each save.
        settings: The [checkpoint] section.
        io: Process group, folder and store. Each committed checkpoint is uploaded to the store in
            the background.
        manifest: Entries added to every manifest.
        export: Writes a Hugging Face folder (second path) from the last checkpoint (first path).
        validation_data: Fingerprint of the validation data.
        events: Records each committed checkpoint. Rank 0 only.
    """

    def __init__(
        self,
        state: RunState,
        *,
        settings: CheckpointConfig,
        io: CheckpointIO,
        manifest: Mapping[str, Any],
        export: Export | None = None,
        validation_data: str | None = None,
        events: EventLog | None = None,
    ) -> None:
        self.folder, self._group, remote = io.folder, io.group, io.remote
        self._state = state
        self._settings = settings
        self._manifest = manifest
        self._export = export
        self._validation_data = validation_data
        self._events = events
        self._remote, self._disk = remote, None if remote is None else remote.disk
        self._retention = self._local_retention = Retention(
            keep_latest=settings.keep_latest_k, keep_best=settings.keep_best, data=validation_data
        )
        if remote is not None:
            self._local_retention = Retention(keep_latest=settings.staging_keep_latest_k)
        self._first_step, self._is_first_save = state.progress.step, True
        self._in_background = settings.async_mode != "disabled"
        self._pending: Future[None] | None = None
        self._staging = Staging(pinned=settings.async_mode == PINNED)

    def is_due(self, *, last: bool, now: bool = False) -> bool:
        """Return whether the interval, the end of the run or a request (`now`) asks for a save."""
        step = self._state.progress.step
        first = step == 1 and self._settings.enable_first_step_checkpoint
        return last or now or first or step % self._settings.interval == 0

    def save(self, *, last: bool, validation_loss: float | None = None) -> Path:
        """Save the state as `step-N`, in the background if `async_mode` allows it.

        Args:
            last: Wait for the save, and export it: training.steps are done. False if stopped early.
            validation_loss: Loss of the current weights, if it was measured.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: This save, or an earlier one in the background, failed on any rank.
            StalledError: A rank did not take part in time.
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
        """Run collective `actions` in a thread; `wait` raises their error."""
        pending: Future[None] = Future()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # per thread
                for action in actions:
                    action()
            except BaseException as error:  # noqa: BLE001 - DCP raises such; `wait` raises it
                pending.set_exception(error)
            else:
                pending.set_result(None)

        self._pending = pending
        # a daemon does not keep the process alive while it waits for a rank that hangs
        threading.Thread(target=run, name="checkpoint", daemon=True).start()

    def _write_export(self, step: int, components: Mapping[str, Component]) -> None:
        name = f"step-{step}"
        if self._export is not None:
            self._export(self.folder / name, self.folder / EXPORT / name)
            if self._remote is not None:
                self._remote.push_export(f"{EXPORT}/{name}")
        elif self._settings.last_save_model_only:
            dtype, model = getattr(torch, self._settings.export_dtype), components["model"]
            tensors = {  # routers' biases stay float32, as in Hugging Face folders
                name: tensor if name.endswith(".expert_bias") else tensor.to(dtype)
                for name, tensor in (model.tensors or {}).items()
            }
            self._write(self.folder / EXPORT, step, {"model": replace(model, tensors=tensors)})
            if self._remote is not None:
                self._remote.push(f"{EXPORT}/{name}")

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
            manifest[SCORE] = {"loss": validation_loss, "data": self._validation_data}
        storage.write(target, components, manifest=manifest, group=self._group, disk=self._disk)
        verb = "Saved" if self._remote is None else "Wrote"  # saved when it is in the store
        logger.info("%s %s", verb, target)

    def _save(
        self, step: int, components: Mapping[str, Component], validation_loss: float | None
    ) -> None:
        self._write(self.folder, step, components, validation_loss)
        storage.on_each_disk(lambda: self._after_commit(step), group=self._group, disk=self._disk)

    def _after_commit(self, saved: int) -> None:
        if self._is_first_save:
            # later steps are damaged, or this run would have started from them; if they become
            # readable again, none may take precedence over a step of this run
            storage.set_aside_after(self.folder, self._first_step, except_step=saved)
            self._is_first_save = False
        if self._remote is None:
            self._record(saved)

        def manifest_of(step: int) -> Mapping[str, Any]:
            return storage.read_manifest(self.folder / f"step-{step}")

        steps = storage.find_steps(self.folder)
        for step in self._local_retention.steps_to_delete(steps, manifest_of=manifest_of):
            storage.delete(self.folder / f"step-{step}")

    def _send(self, step: int) -> None:
        if self._remote is not None:
            self._remote.push(f"step-{step}")
            on_first_rank(lambda: self._record(step), group=self._group)
            self._remote.prune(step, self._retention)

    def _record(self, step: int) -> None:
        if self._events is not None:
            self._events.checkpoint(self.folder / f"step-{step}", step=step)

    def has_failed(self) -> bool:
        """Return whether the save in flight has failed, as far as this rank knows."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def wait(self) -> None:
        """Wait for the save in flight, and raise its error.

        Raises:
            CheckpointError: The save failed on any rank.
            StalledError: A rank did not take part in time.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except RuntimeError as error:
            if not is_timeout(error):
                raise
            raise StalledError(
                f"a rank did not take part in the save for {self._settings.save_timeout_seconds} s "
                f"(checkpoint.save_timeout_seconds): it hangs or was stopped; run the same "
                f"command to resume from the checkpoint before"
            ) from error

    close = wait


class Staging:
    """Host memory for one copy of the state. Each copy overwrites the one before.

    A save continues from the copy while training changes the state. On a CPU, allocating new pages
    takes several times as long as copying, so the memory is kept for later saves.

    Args:
        pinned: Whether copies of GPU tensors are page-locked, which allows full bus speed. Such
            memory can never be swapped out, so the user asks for it by name.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, components: Mapping[str, Component]) -> dict[str, Component]:
        """Return the components with all tensors copied. The earlier copy must be written."""
        copies = {
            name: Component(
                tensors=None
                if component.tensors is None
                else {key: self._copy((name, key), t) for key, t in component.tensors.items()},
                state=component.state,
            )
            for name, component in components.items()
        }
        if self._pinned:
            torch.cuda.current_stream().synchronize()  # the next step changes the originals
        return copies

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        source = tensor.detach()
        buffer = self._buffers.get(key)
        is_new = buffer is None or not _has_same_shape(buffer, source)
        if self._pinned and local_part(source).is_cuda:
            if is_new:
                # a DTensor for a DTensor: the options apply to the local part
                self._buffers[key] = torch.empty_like(source, device="cpu", pin_memory=True)
            local_part(self._buffers[key]).copy_(local_part(source), non_blocking=True)
        elif is_new:
            self._buffers[key] = source.to("cpu", copy=True)
        else:
            local_part(self._buffers[key]).copy_(local_part(source))
        return self._buffers[key]


def _has_same_shape(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and local_part(a).shape == local_part(b).shape
