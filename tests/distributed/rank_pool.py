"""Gloo ranks that are started once and run many jobs.

Starting a process and importing torch costs seconds, a job on tiny models a fraction of one. Each
job is a function that runs on the first `world` ranks in a process group of its own. A rank that
raises fails the job with its traceback; one that does not answer in time is killed, with all the
others, and new ones are started for the next job."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

JOBS_OF_A_RANK = 30
"""New ranks are started after so many jobs: torch's caches of DTensor layouts hold on to process
groups, and each has threads that wake a hundred times a second."""
PRELOADED = [
    "torchtitan.train",
    "tests.distributed.pipeline_jobs",
    *(f"torchtitan.parallel.{name}" for name in ("tensor", "expert", "float8", "compile")),
    "torchtitan.parallel.context.attention",
    "torchtitan.parallel.pipeline.execution",
    *(f"torchtitan.optim.{name}" for name in ("muon", "balance", "spikes")),
    "torchtitan.validate",
    "torchtitan.finetune.lora",
    "torchtitan.hf.export",
    "torchtitan.hf.source",
    "torch._inductor.compile_fx",
]
"""What ranks have imported when they start: they are forks of a server that has it."""
STARTED_BY = "forkserver"


class RankError(AssertionError):
    """A rank of a job raised, died or hung."""


class RankPool:
    """Up to `size` ranks on this machine, started on first use."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranks: list[tuple[mp.process.BaseProcess, Connection]] = []
        self._num_jobs = 0

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int,
        timeout: float = 120,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on ranks 0 to world-1; return what each returned."""
        self._num_jobs += 1
        if self._num_jobs % JOBS_OF_A_RANK == 0:
            self.close()
        while len(self._ranks) < world:
            self._ranks.append(_start(len(self._ranks)))
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for rank, (_, pipe) in enumerate(self._ranks[:world]):
                pipe.send((function, args, kwargs, rank, world, store, timeout))
            try:
                return self._collect(world, deadline=time.monotonic() + timeout)
            except RankError:
                self.close()
                raise

    def _collect(self, world: int, *, deadline: float) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < world:
            for rank, (process, pipe) in enumerate(self._ranks[:world]):
                if rank in answers or not pipe.poll(0.005):
                    if time.monotonic() > deadline:
                        raise RankError(f"rank {rank} gave no answer in time")
                    continue
                try:
                    ok, answer = pipe.recv()
                except EOFError:
                    process.join(5)
                    raise RankError(f"rank {rank} died with {process.exitcode}") from None
                if not ok:
                    raise RankError(f"rank {rank} of {world}:\n{answer}")
                answers[rank] = answer
        return [answers[rank] for rank in range(world)]

    def close(self) -> None:
        """End the ranks; the next job starts new ones."""
        for process, _ in self._ranks:
            process.kill()
        for process, pipe in self._ranks:
            process.join()
            pipe.close()
        self._ranks.clear()


def start_server() -> None:
    """Start the server of which ranks are forks, before a data loader starts one with less."""
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def _start(index: int) -> tuple[mp.process.BaseProcess, Connection]:
    context: Any = mp.get_context(STARTED_BY)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), name=f"rank-{index}", daemon=False)
    process.start()
    theirs.close()
    return process, ours


def _serve(pipe: Connection) -> None:
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that a job starts
    torch.set_num_threads(1)
    gc.freeze()  # what is imported: looking through it takes a fifth of a second in each job
    gc.freeze = lambda: None  # a trainer's own would keep what the job leaves behind
    while True:
        try:
            function, args, kwargs, rank, world, store, timeout = pipe.recv()
        except EOFError:
            os._exit(0)  # the tests are over
        pipe.send(_run_job(function, args, kwargs, rank, world, store, timeout))


def _run_job(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rank: int,
    world: int,
    store: str,
    timeout: float,
) -> tuple[bool, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=min(60, timeout)),
        )
        answer = function(*args, **kwargs)
        dist.barrier()
        return True, answer
    except BaseException:  # noqa: BLE001 - DCP raises such; the test process reports it
        return False, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # cycles hold process groups
        _clear_sharding_prop_cache()  # it remembers meshes, and with them another job's ranks
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(False)
