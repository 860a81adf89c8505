"""When to save a checkpoint, how, and which ones to keep.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import ConfigError, StalledError
from torchtitan.base.urls import is_url
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.checksums import find_manifest
from torchtitan.checkpoint.settings import EXPORT, CheckpointConfig
from torchtitan.checkpoint.state import Component, RunState
from torchtitan.mesh.faults import is_timeout
from torchtitan.mesh.ranks import on_first_rank
from torchtitan.models.init import local_part

if TYPE_CHECKING:
    from torchtitan.checkpoint.remote import RemoteCheckpoints
    from torchtitan.metrics.events import EventLog

logger = logging.getLogger(__name__)
PINNED = "async_with_pinned_mem"
SCORE = "validation"
"""Entry of a manifest: the validation loss, and the fingerprint of the data."""
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

    If a run only loads, no store is opened. Raises ConfigError if the store's package is missing,
    ranks do not share a disk that they need to share, or pinned staging needs a GPU.
    """
    if settings.enable and settings.async_mode == PINNED and device_type != "cuda":
        raise ConfigError.at(
            "checkpoint.async_mode", f'"{PINNED}" needs a GPU, this job computes on {device_type}'
        )
    group, folder = build_group(settings.save_timeout_seconds), run_folder / settings.local_folder
    remote: RemoteCheckpoints | None = None
    if not settings.enable:
        return CheckpointIO(group, folder)
    if is_url(settings.folder):
        from torchtitan.checkpoint.remote import RemoteCheckpoints

        remote = RemoteCheckpoints(
            settings.folder, key="checkpoint.folder", settings=settings, folder=folder, group=group
        )
        disk = remote.disk
    else:
        disk = storage.find_disk(run_folder, group=group)
    if len(disk) < group.size() and (remote is None or settings.last_save_in_hf):
        raise ConfigError.at(
            ("job.dump_folder", "checkpoint.folder", "checkpoint.last_save_in_hf"),
            f"must be one folder for all ranks, and some do not see what others write to "
            f"{run_folder.absolute()}; name one on storage that all machines share, or write a "
            f"URL of an object store as checkpoint.folder, without last_save_in_hf",
        )
    return CheckpointIO(group, folder, remote)


def steps_to_delete(
    steps: Sequence[int],
    manifest_of: Callable[[int], Mapping[str, Any] | None],
    *,
    keep_latest: int,
    keep_best: int = 0,
    data: str | None = None,
) -> list[int]:
    """Return which of `steps`, ascending, to delete, and log the best one.

    The loss is in the manifest, so the best checkpoints are known after any restart.

    `keep_latest` 0 keeps all. Losses are compared on the data of fingerprint `data`.
    """
    ranking: list[tuple[float, int]] = []
    for step in steps if keep_best and data is not None else ():
        score = (manifest_of(step) or {}).get(SCORE)
        if isinstance(score, dict) and score.get("data") == data:
            loss = score.get("loss")
            if isinstance(loss, float) and isfinite(loss):
                ranking.append((loss, -step))  # of equal losses the newest
    best = [-step for _, step in sorted(ranking)[:keep_best]]
    if best:
        loss = min(ranking)[0]
        logger.info("The best checkpoint is step-%d, validation loss %.5f", best[0], loss)
    older = steps[:-keep_latest] if keep_latest else ()
    return [step for step in older if step not in best]


class CheckpointManager:
    """Save checkpoints of one run.

    `manifest` has entries of every manifest; `export` writes a Hugging Face folder (second path)
    from the last checkpoint (first path); `validation_data` is the fingerprint of these data;
    `events`, on rank 0, records each committed checkpoint.
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
        self.folder, self._group, self._remote = io.folder, io.group, io.remote
        self._disk = None if io.remote is None else io.remote.disk
        self._state, self._settings, self._manifest = state, settings, manifest
        self._export, self._validation_data, self._events = export, validation_data, events
        self._to_delete = self._local_to_delete = partial(
            steps_to_delete,
            keep_latest=settings.keep_latest_k,
            keep_best=settings.keep_best,
            data=validation_data,
        )
        if io.remote is not None:
            keep_latest = settings.staging_keep_latest_k
            self._local_to_delete = partial(steps_to_delete, keep_latest=keep_latest)
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

        With `last`, training.steps are done: wait for the save, and export it.

        Returns:
            The folder of the checkpoint.

        Raises CheckpointError if this save, or an earlier one in the background, failed on any
        rank. Raises StalledError if a rank did not take part in time.
        """
        step = self._state.progress.step
        self.wait()
        components = self._state.components()
        saved = self._staging.copy(components) if self._in_background else components
        manifest: dict[str, Any] = {"step": step, **self._manifest}
        if validation_loss is not None and self._validation_data is not None:
            manifest[SCORE] = {"loss": validation_loss, "data": self._validation_data}
        save, upload = partial(self._save, step, saved, manifest), partial(self._upload, step)
        if self._in_background and not last:
            self._start(save, upload)
        else:
            self._start(save)
            self.wait()
            self._start(upload)  # in the background in any mode
        if last:
            self.wait()
            self._start(partial(self._write_export, step, components, manifest))
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

    def _save(
        self, step: int, components: Mapping[str, Component], manifest: Mapping[str, Any]
    ) -> None:
        target = self.folder / f"step-{step}"
        storage.write(target, components, manifest=manifest, group=self._group, disk=self._disk)
        # a step counts as saved when it is in the store
        logger.info("%s %s", "Saved" if self._remote is None else "Wrote", target)
        storage.on_each_disk(lambda: self._after_commit(step), group=self._group, disk=self._disk)

    def _after_commit(self, saved: int) -> None:
        if self._is_first_save:
            # later steps are damaged, or this run would have started from them; if they become
            # readable again, none may take precedence over a step of this run
            storage.set_aside_after(self.folder, self._first_step, except_step=saved)
            self._is_first_save = False
        if self._remote is None:
            self._record(saved)
        folders = {step: self.folder / f"step-{step}" for step in storage.find_steps(self.folder)}
        for step in self._local_to_delete([*folders], lambda step: find_manifest(folders[step])):
            storage.delete(folders[step])

    def _upload(self, step: int) -> None:
        if self._remote is not None:
            self._remote.push(f"step-{step}")
            on_first_rank(lambda: self._record(step), group=self._group)
            self._remote.prune(self._to_delete)

    def _record(self, step: int) -> None:
        if self._events is not None:
            self._events.checkpoint(self.folder / f"step-{step}", step=step)

    def _write_export(
        self, step: int, components: Mapping[str, Component], manifest: Mapping[str, Any]
    ) -> None:
        name, target = f"{EXPORT}/step-{step}", self.folder / EXPORT / f"step-{step}"
        if self._export is not None:
            self._export(self.folder / target.name, target)
            if self._remote is not None:
                self._remote.push_export(name)
        elif self._settings.last_save_model_only:
            dtype, model = getattr(torch, self._settings.export_dtype), components["model"]
            tensors = {  # routers' biases stay float32, as in Hugging Face folders
                name: tensor if name.endswith(".expert_bias") else tensor.to(dtype)
                for name, tensor in (model.tensors or {}).items()
            }
            weights = {"model": replace(model, tensors=tensors)}
            storage.write(target, weights, manifest=manifest, group=self._group, disk=self._disk)
            logger.info("%s %s", "Saved" if self._remote is None else "Wrote", target)
            if self._remote is not None:
                self._remote.push(name)

    def has_failed(self) -> bool:
        """Return whether the save in flight has failed, as far as this rank knows."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def wait(self) -> None:
        """Wait for the save in flight, and raise its error.

        Raises CheckpointError if the save failed on any rank. Raises StalledError if a rank did not
        take part in time.
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

    With `pinned`, copies of GPU tensors are page-locked, which allows full bus speed. Such memory
    can never be swapped out, so the user asks for it by name.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, components: Mapping[str, Component]) -> dict[str, Component]:
        """Return the components with all tensors copied. The earlier copy must be written."""
        copies = {}
        for name, component in components.items():
            tensors = component.tensors
            if tensors is not None:
                tensors = {key: self._copy((name, key), t) for key, t in tensors.items()}
            copies[name] = replace(component, tensors=tensors)
        if self._pinned:
            torch.cuda.current_stream().synchronize()  # the next step changes the originals
        return copies

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        source, buffer = tensor.detach(), self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            is_pinned = self._pinned and local_part(source).is_cuda
            # a DTensor for a DTensor: the options apply to the local part
            buffer = torch.empty_like(source, device="cpu", pin_memory=is_pinned)
            self._buffers[key] = buffer
        local_part(buffer).copy_(local_part(source), non_blocking=self._pinned)
        return buffer
