"""Name the rank that the other ranks of a run waited for.

    python -m torchtitan hang outputs/run
    python -m torchtitan hang --job.config_file F    # the folder of a job with these settings

When a rank hangs, all other ranks fail with timeouts, which do not name it. But each rank records
its collectives (`mesh/faults.py`). All ranks of a group call the same collectives in the same
order, so a rank that has not made a call that other ranks of the group wait in is awaited by them.
An awaited rank that waits for no other rank is the origin. A rank without a record was killed, or
still hangs. NCCL and gloo each count their own calls and write their own record.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from torchtitan.base.errors import DataError, printable
from torchtitan.base.files import check_is_file
from torchtitan.base.log import plural
from torchtitan.tools.verbs import build_parser, report_errors

LAST_LINES = 3
"""Printed lines of an awaited rank's log."""
UNEVEN = ("scatter", "alltoall", "all_to_all")
"""Operators whose input sizes differ between ranks: only the root of a scatter has inputs."""
Group = tuple[str, str, tuple[int, ...]]
"""Backend ("gloo", "nccl"), description and ranks of a process group."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective that a rank called."""

    group: Group
    number: int
    """Number within the group and backend, from 1."""
    what: str
    """Operator and input sizes."""
    at: float
    """Time of the call, in seconds since 1970."""
    where: str
    """Innermost line outside of libraries."""
    is_completed: bool = False
    """Recorded by NCCL only."""

    def __str__(self) -> str:
        axis = self.group[1].removeprefix("mesh_").replace("undefined", "an unnamed group")
        return f"{self.what}, number {self.number} of {axis}, at {_time(self.at)} from {self.where}"


@dataclass(frozen=True, kw_only=True)
class Blocked:
    """A rank that waits in a call for other ranks."""

    call: Call
    waits_for: tuple[int, ...]


@report_errors
def main(argv: Sequence[str]) -> int:
    """Print the ranks that waited, and for whom, and return 0; return 2 without records."""
    parser = build_parser("hang", __doc__)
    parser.add_argument("run", type=Path, help="the job.dump_folder of the run")
    has_settings = any(word.startswith("--") and "." in word for word in argv)
    has_settings |= not argv and "CONFIG_FILE" in os.environ
    run: Path | None = None if has_settings else parser.parse_args(argv).run
    from torchtitan.job import CONFIG_FILE, load_config
    from torchtitan.resume_rules import Job

    run = run or Path(load_config(argv).job.dump_folder)
    comm = Job.stored_in(run / CONFIG_FILE).config.comm
    folder, prefix = run / comm.save_traces_folder, comm.save_traces_file_prefix
    calls = read_calls(folder, prefix=prefix)
    late = comm.train_timeout_seconds / 2
    sys.stdout.write(printable(describe(calls, late=late, logs=run / "logs")))
    return 0


def read_calls(folder: Path, *, prefix: str) -> dict[int, list[Call]]:
    """Return the calls of each rank, in order.

    Folder and prefix are those of [comm]. Raises DataError if there are no records, or one cannot
    be read.
    """
    from torchtitan.mesh.faults import GLOO, NCCL

    files = sorted(folder.iterdir()) if folder.is_dir() else []
    calls: defaultdict[int, list[Call]] = defaultdict(list)
    for start in (prefix, NCCL, GLOO):
        for file in files:
            if match := re.fullmatch(rf"{re.escape(start)}(\d+)", file.name):
                rank = int(match[1])
                if start != NCCL or rank not in calls:  # NCCL's own record is newer
                    calls[rank] += _read(file)
    if not calls:
        raise DataError(
            f"{folder} has no records of ranks; they are written when a collective fails or times "
            "out (in a save after checkpoint.save_timeout_seconds), unless comm.trace_buf_size is "
            "0. Until then logs/rank_N.log of each rank that waits has its stacks"
        )
    return dict(sorted(calls.items()))


def _read(file: Path) -> list[Call]:
    try:
        check_is_file(file)
        record = _Plain(io.BytesIO(file.read_bytes())).load()
        groups = {
            name: (_text(group["desc"]), tuple(map(_whole, json.loads(group["ranks"]))))
            for name, group in record["pg_config"].items()
            if group["ranks"] != "[]"
        }
        return [
            _call(entry, groups=groups)
            for entry in record["entries"]
            if not entry["is_p2p"] and entry["process_group"][0] in groups
        ]
    except Exception as error:  # damaged bytes can make a pickle fail in any way
        raise DataError(
            f"{file} must be a record of torch's flight recorder, and cannot be read: {error!r}; "
            "without it, the records of the other ranks may be enough"
        ) from error


class _Plain(pickle._Unpickler):
    """Unpickles only numbers, strings, lists and dictionaries.

    Python's unpickler in C could be made to allocate any amount of memory, and so could
    bytearrays, which are allocated before they are read.
    """

    dispatch: ClassVar = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _call(entry: Mapping[str, Any], *, groups: Mapping[str, tuple[str, tuple[int, ...]]]) -> Call:
    sizes = " ".join("x".join(map(str, map(_whole, s))) or "1" for s in entry["input_sizes"])
    backend, _, operator = _text(entry["profiling_name"]).rpartition(":")
    return Call(
        group=(backend, *groups[entry["process_group"][0]]),
        number=_whole(entry["collective_seq_id"]),
        what=f"{operator.lstrip('_')} of {sizes or 'nothing'}",
        at=_whole(entry["time_created_ns"]) / 1e9,
        where=_where(entry.get("frames", ())),
        is_completed=entry.get("state") == "completed",
    )


def _where(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost frame outside of libraries."""
    own = [entry for entry in frames if "site-packages" not in entry["filename"]]
    for frame in own or frames[:1]:
        path = Path(frame["filename"])
        name = "/".join(path.parts[-2:])
        return f"{name}:{_whole(frame['line'])} ({_text(frame['name'])})"
    return "an unknown line"


def _whole(value: object) -> int:
    """Return an integer of 64 bits. Raise TypeError for other values, such as nested lists."""
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise TypeError(f"expected an integer, got a {type(value).__name__}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got a {type(value).__name__}")
    return value


def find_blocked(calls: Mapping[int, Sequence[Call]], *, late: float) -> dict[int, Blocked]:
    """Return the ranks that wait in a call, by rank.

    A rank waits for the ranks of the group that have not made the call, or made it more than `late`
    seconds later, after its timeout.
    """
    last: defaultdict[Group, dict[int, Call]] = defaultdict(dict)
    for rank, made in calls.items():
        for call in made:
            last[call.group][rank] = call

    def is_there(candidate: Call | None, call: Call) -> bool:
        if candidate is None or candidate.number < call.number:
            return False
        return candidate.number > call.number or candidate.at <= call.at + late

    waiting = {}
    for rank, made in calls.items():
        for call in _may_wait_in(made):
            of_group = last[call.group]
            missing = tuple(r for r in call.group[2] if not is_there(of_group.get(r), call))
            if missing:
                waiting[rank] = Blocked(call=call, waits_for=missing)
                break
    return waiting


def _may_wait_in(made: Sequence[Call]) -> list[Call]:
    """Return the calls of a rank that may not have returned, in their order.

    A rank calls NCCL far ahead of its device, and the record has the state of each call. It waits
    for gloo at once, so only its last call may be open.
    """
    nccl = [call for call in made if call.group[0] == "nccl" and not call.is_completed]
    return nccl + [call for call in made if call.group[0] != "nccl"][-1:]


def find_unlike(calls: Mapping[int, Sequence[Call]]) -> list[str]:
    """Describe the first call of each group that differs between its ranks."""
    made: defaultdict[tuple[Group, int], dict[int, Call]] = defaultdict(dict)
    for rank, rank_calls in calls.items():
        for call in rank_calls:
            made[call.group, call.number][rank] = call
    groups: dict[Group, str] = {}
    for (group, _), by_rank in sorted(made.items(), key=lambda item: item[0][1]):
        if group not in groups and len({_comparable(call) for call in by_rank.values()}) > 1:
            lines = [f"  rank {rank}: {call}" for rank, call in by_rank.items()]
            groups[group] = "\n".join(
                ["Ranks called different collectives with the same number:", *lines]
            )
    return [*groups.values()]


def _comparable(call: Call) -> str:
    """Return the part of a call that is equal on all ranks of its group."""
    operator = call.what.partition(" of ")[0]
    return operator if operator.startswith(UNEVEN) else call.what


def describe(calls: Mapping[int, Sequence[Call]], *, late: float, logs: Path) -> str:
    """Return the ranks that waited, and for whom, with the last call and log of each origin."""
    world = sorted({rank for made in calls.values() for call in made for rank in call.group[2]})
    silent = [rank for rank in world if rank not in calls]
    blocked = find_blocked(calls, late=late)
    lines = [f"{plural(len(world), 'rank')}, records of {len(calls)}", ""]
    lines += [
        f"rank {rank} waits for {_ranks(blocked_call.waits_for)} in {blocked_call.call}"
        for rank, blocked_call in blocked.items()
    ]
    awaited = {rank for blocked_call in blocked.values() for rank in blocked_call.waits_for}
    for rank in sorted(awaited - blocked.keys()):
        log = logs / f"rank_{rank}.log"
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        origin = f"It started with rank {rank}{_place(text)}: other ranks wait for it"
        if rank in silent:
            origin += ", and it left no record, so it was killed, or hangs outside of a collective"
        else:
            latest = max(calls[rank], key=lambda call: call.at, default=None)
            origin += f"; its last call was {latest}" if latest else "; it made no call"
        ends = [f"    {line}" for line in text.splitlines()[-LAST_LINES:]]
        lines += ["", origin, f"  {log} {'ends with:' if ends else 'is missing or empty'}", *ends]
    lines += ["", *find_unlike(calls)]
    if not blocked:
        lines.append("No rank waits for another in the recorded collectives.")
    return "\n".join(lines).strip() + "\n"


def _place(log: str) -> str:
    """Return host and process that a rank's newest start wrote in its log, in parentheses."""
    processes = re.findall(r"rank \d+ (on \S+, process \d+)$", log, re.MULTILINE)
    return f" ({processes[-1]})" if processes else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _time(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
