"""Name the rank that the other ranks of a run waited for.

    torchtitan hang outputs/run
    torchtitan hang JOB [--section.key VALUE ...]    # the folder of this job

Each rank records its collectives (`mesh/faults.py`), and all ranks of a group call the same ones in
the same order. So a rank that has not made a call, or made it after the timeout, is awaited by the
ranks that have; one that is awaited and waits for no rank is the origin. PyTorch's `torchfrtrace`
compares the calls in detail, but executes what the files name.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torchtitan.base.errors import DataError, printable
from torchtitan.base.files import check_is_file, read_text
from torchtitan.base.log import plural
from torchtitan.tools.verbs import build_parser, report_errors

LAST_LINES = 3
"""Printed lines of an awaited rank's log."""


class Call(NamedTuple):
    """A collective that a rank called."""

    group: tuple[str, str, tuple[int, ...]]
    """Backend ("gloo", "nccl"), description and ranks."""
    number: int
    """Number within the group and backend, from 1."""
    at: float
    """Seconds since 1970."""
    text: str
    is_completed: bool = False
    """Recorded by NCCL only."""


@report_errors
def main(argv: Sequence[str]) -> int:
    """Print the ranks that waited, and for whom, and return 0; return 2 without records."""
    parser = build_parser("hang", __doc__)
    parser.add_argument("run", nargs="?", help="the job.dump_folder of the run, or its job")
    parser.parse_known_args(argv)  # --help
    from torchtitan.job import CONFIG_FILE, load_config
    from torchtitan.resume_rules import Job

    is_folder = len(argv) == 1 and Path(argv[0]).is_dir()
    if argv and "/" in argv[0] and not argv[0].startswith("-") and not Path(argv[0]).exists():
        raise DataError(f"RUN must be the folder of a run, or a job, got {argv[0]}")
    run = Path(argv[0] if is_folder else load_config(argv).job.dump_folder)
    comm = Job.stored_in(run / CONFIG_FILE).config.comm
    calls = read_calls(run / comm.save_traces_folder, prefix=comm.save_traces_file_prefix)
    lines = describe(calls, late=comm.train_timeout_seconds / 2, logs=run / "logs")
    sys.stdout.write(printable("\n".join(lines)) + "\n")
    return 0


def read_calls(folder: Path, *, prefix: str) -> dict[int, list[Call]]:
    """Return the calls of each rank, in order. NCCL's own record replaces this library's record of
    NCCL. Raises DataError if the folder has no record, or one cannot be read."""
    from torchtitan.mesh.faults import GLOO, NCCL

    calls: defaultdict[int, list[Call]] = defaultdict(list)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    for start in (prefix, NCCL, GLOO):
        for file in files:
            rank = file.name.removeprefix(start)
            is_record = file.name.startswith(start) and rank.isdecimal()
            if is_record and (start != NCCL or int(rank) not in calls):
                calls[int(rank)] += _read(file)
    if not calls:
        raise DataError(
            f"{folder} has no records of ranks; they are written when a collective fails or times "
            "out, unless comm.trace_buf_size is 0. Until then logs/rank_N.log of each rank that "
            "waits has its stacks"
        )
    return dict(sorted(calls.items()))


class _Plain(pickle.Unpickler):
    """Unpickles only numbers, strings and containers."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _read(file: Path) -> list[Call]:
    try:
        check_is_file(file)
        record = _Plain(io.BytesIO(file.read_bytes())).load()
        groups = {
            name: (group["desc"], tuple(map(int, json.loads(group["ranks"]))))
            for name, group in record["pg_config"].items()
        }
        calls = []
        for entry in record["entries"]:
            name, ranks = groups.get(entry["process_group"][0], ("", ()))
            if ranks and not entry["is_p2p"]:
                calls.append(_call(entry, name, ranks))
        return calls
    except Exception as error:  # damaged bytes can make a pickle fail in any way
        raise DataError(
            f"{file} must be a record of torch's flight recorder, and cannot be read: {error!r}"
        ) from error


def _call(entry: Mapping[str, Any], group: str, ranks: tuple[int, ...]) -> Call:
    sizes = " ".join("x".join(map(str, size)) or "1" for size in entry["input_sizes"])
    backend, _, operator = entry["profiling_name"].rpartition(":")
    at, number = entry["time_created_ns"] / 1e9, int(entry["collective_seq_id"])
    text = f"{operator.lstrip('_')} of {sizes or 'nothing'}, number {number} of {group}"
    text += f", at {time.strftime('%H:%M:%S', time.localtime(at))}"
    own = (f for f in entry.get("frames", ()) if "site-packages" not in f["filename"])
    if frame := next(own, None):
        path = "/".join(Path(frame["filename"]).parts[-2:])
        text += f" from {path}:{frame['line']} ({frame['name']})"
    is_completed = entry.get("state") == "completed"
    return Call((backend, group, ranks), number, at, text, is_completed)


def find_waits(
    calls: Mapping[int, Sequence[Call]], *, late: float
) -> dict[int, tuple[Call, list[int]]]:
    """Return the call that each waiting rank waits in, and the ranks that it waits for: they have
    not made the call, or made it more than `late` seconds later.

    A rank calls NCCL far ahead of its device, so any call that is not completed may be open. It
    waits for gloo at once, so only its last call may be.
    """
    last = {(rank, call.group): call for rank, made in calls.items() for call in made}

    def is_awaited(rank: int, call: Call) -> bool:
        newest = last.get((rank, call.group))
        if newest is None or newest.number != call.number:
            return newest is None or newest.number < call.number
        return newest.at > call.at + late

    waits: dict[int, tuple[Call, list[int]]] = {}
    for rank, made in calls.items():
        nccl = [call for call in made if call.group[0] == "nccl" and not call.is_completed]
        for call in nccl + [call for call in made if call.group[0] != "nccl"][-1:]:
            awaited = [member for member in call.group[2] if is_awaited(member, call)]
            if awaited:
                waits.setdefault(rank, (call, awaited))
    return waits


def describe(calls: Mapping[int, Sequence[Call]], *, late: float, logs: Path) -> list[str]:
    """Return lines about the ranks that waited, and the last call and log of each origin."""
    waits = find_waits(calls, late=late)
    lines = [f"records of {plural(len(calls), 'rank')}"]
    for rank, (call, awaited) in waits.items():
        lines.append(f"rank {rank} waits for rank {', '.join(map(str, awaited))} in {call.text}")
    for rank in sorted({rank for _, awaited in waits.values() for rank in awaited} - waits.keys()):
        log = logs / f"rank_{rank}.log"
        text = read_text(log, errors="replace") if log.exists() else ""
        processes = re.findall(r"rank \d+ (on \S+, process \d+)$", text, re.MULTILINE)
        call_text = "left no record: it was killed, or hung"
        if calls.get(rank):
            call_text = f"last called {max(calls[rank], key=lambda call: call.at).text}"
        process = f" ({processes[-1]})" if processes else ""
        lines.append(f"It started with rank {rank}{process}, which {call_text}; the end of {log}:")
        lines += [f"    {line}" for line in text.splitlines()[-LAST_LINES:]]
    return lines if waits else [*lines, "No rank waits for another in the recorded collectives."]
