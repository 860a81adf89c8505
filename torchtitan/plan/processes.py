"""Processes to rehearse in: one process can pretend one world at a time."""

from __future__ import annotations

import multiprocessing
from multiprocessing.pool import Pool

from torchtitan.base.cores import num_cores

MOST = 16
"""Processes at once. Each takes about 0.4 GiB, and no answer needs many more rehearsals. One for
each of the 192 cores of a large machine would hold 77 GiB of a host that other ranks still use."""


def num_processes(num_jobs: int) -> int:
    """Return how many processes rehearse so many jobs."""
    return max(1, min(num_jobs, num_cores(), MOST))


def open_pool(num_jobs: int) -> Pool:
    """Start processes to rehearse so many jobs; they begin anew, without what this one holds."""
    return multiprocessing.get_context("spawn").Pool(num_processes(num_jobs))
