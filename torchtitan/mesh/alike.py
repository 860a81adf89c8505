"""Whether all ranks were given the same settings, and read the same data.

Ranks that train different jobs wait for each other in different collectives, until a time-out that
names neither the rank nor the setting. A file that is old on one machine, or that is written while
a rank reads it, is enough. So the first thing that ranks tell each other is what they were given.
Data that differ would not even end in a time-out: a rank whose copy is old trains on other samples,
and nothing shows it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
import torch.distributed as dist

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.config.fields import file_key, values_of
from torchtitan.config.layers import literal
from torchtitan.mesh.process_group import gather

MOST_NAMED = 3


def check_alike(config: object) -> None:
    """Compare the settings of all ranks, which call this together.

    Raises:
        ConfigError: They differ; on every rank, and it says where.
    """
    left_out = file_key(type(config))  # the same file may lie elsewhere on another machine
    settings = {
        ".".join(path): literal(value)
        for path, value in values_of(config).items()
        if path != left_out
    }
    if said := _compare(settings):
        raise ConfigError(
            f"all ranks must be given the same settings, and {said}; give all machines the same "
            f"file and the same options"
        )


def check_data_alike(fingerprint: Mapping[str, str]) -> None:
    """Compare the data of all ranks by what their samples and their order depend on.

    Raises:
        DataError: They differ; on every rank, and it says where.
    """
    if said := _compare(fingerprint):
        raise DataError(
            f"all ranks must read the same data, and {said}; give all machines the same files, and "
            f"delete a dataset_cache that was made from others"
        )


def _compare(ours: Mapping[str, str]) -> str | None:
    """Say which ranks have others than rank 0, and where; None: all have the same."""
    written = json.dumps(ours, sort_keys=True).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(written).digest()), dtype=torch.uint8)
    digests = gather(digest)
    others = [rank for rank, each in enumerate(digests) if not torch.equal(each, digests[0])]
    if not others:
        return None
    known: list[Mapping[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(known, dict(ours))
    odd = f"ranks {', '.join(map(str, others))} have" if others[1:] else f"rank {others[0]} has"
    return f"{odd} others than rank 0: {_difference(known[0], known[others[0]])}"


def _difference(first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return the first few settings that differ, with both values."""
    found = [
        f"{name} is {other.get(name, 'unset')} there and {first.get(name, 'unset')} on rank 0"
        for name in dict.fromkeys([*first, *other])
        if first.get(name) != other.get(name)
    ]
    more = len(found) - MOST_NAMED
    return ", ".join(found[:MOST_NAMED]) + (f", and {more} more" if more > 0 else "")
