"""Which rank held the others up: `python -m torchtitan hang outputs/run`.

When a rank hangs, all others fail, each with an error of its own, and none knows why. But each has
remembered which collectives it called (`mesh/faults.py`). All ranks of a group call the same ones
in the same order, so whoever has not called what others wait in is the one they wait for; and who
waits for nobody is where it began. A rank that left no record was killed, or still hangs.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import re
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torchtitan.base.errors import DataError, UserError, printable
from torchtitan.base.files import check_is_file
from torchtitan.base.log import plural

LAST_LINES = 3
"""Of the log of a rank that others waited for."""
Group = tuple[str, tuple[int, ...]]
"""What a group is for, and its ranks."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective that a rank has called."""

    group: Group
    number: int
    """Which of the group's it is, from 1."""
    what: str
    """Operator, and the sizes of what it was given."""
    at: float
    """When it was called, in seconds since 1970."""
    where: str
    """The innermost line of the package, or of the program."""

    def __str__(self) -> str:
        axis = self.group[0].removeprefix("mesh_")
        return f"{self.what}, number {self.number} of {axis}, at {_time(self.at)} from {self.where}"


@dataclass(frozen=True, kw_only=True)
class Blocked:
    """A rank that waits in a call for others."""

    call: Call
    waits_for: tuple[int, ...]


def main(argv: Sequence[str]) -> int:
    """Print who waited for whom and return 0, or print what is missing and return 2."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan hang",
        description="Tell which rank held the others up when a run has ended in a time-out.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="the job.dump_folder of the run")
    run: Path = parser.parse_args(argv).run
    try:
        from torchtitan.job import CONFIG_FILE
        from torchtitan.resume_rules import Job

        comm = Job.stored_in(run / CONFIG_FILE).config.comm
        folder, prefix = run / comm.save_traces_folder, comm.save_traces_file_prefix
        calls = read_calls(folder, prefix=prefix)
        late = comm.train_timeout_seconds / 2
        sys.stdout.write(printable(describe(calls, late=late, logs=run / "logs")))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def read_calls(folder: Path, *, prefix: str) -> dict[int, list[Call]]:
    """Return what each rank has called, by its rank and in its order.

    Raises:
        DataError: There are no records, or one cannot be read.
    """
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)(\.json)?")
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    found = {int(m[1]): file for file in files if (m := pattern.fullmatch(file.name))}
    if not found:
        raise DataError(
            f"{folder} must hold the records of ranks, and there are none; they are written when "
            "ranks fail on each other, unless comm.trace_buf_size is 0"
        )
    return {rank: _read(file) for rank, file in sorted(found.items())}


def _read(file: Path) -> list[Call]:
    try:
        check_is_file(file)
        data = file.read_bytes()
        known = json.loads(data) if file.suffix == ".json" else _Plain(io.BytesIO(data)).load()
        groups = {
            name: (_text(group["desc"]), tuple(map(_whole, json.loads(group["ranks"]))))
            for name, group in known["pg_config"].items()
            if group["ranks"] != "[]"
        }
        return [
            _call(entry, groups=groups)
            for entry in known["entries"]
            if not entry["is_p2p"] and entry["process_group"][0] in groups
        ]
    except Exception as error:  # damaged bytes can make a pickle fail in any way
        raise DataError(
            f"{file} must be a record of torch's flight recorder, it cannot be read: {error!r}; "
            "remove it, the records of other ranks may be enough"
        ) from error


class _Plain(pickle._Unpickler):
    """Reads numbers, texts, lists and dictionaries, and calls nothing; Python's reader in C grows
    its memo to any index that it reads."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _call(entry: Mapping[str, Any], *, groups: Mapping[str, Group]) -> Call:
    sizes = " ".join("x".join(map(str, map(_whole, s))) or "1" for s in entry["input_sizes"])
    return Call(
        group=groups[entry["process_group"][0]],
        number=_whole(entry["collective_seq_id"]),
        what=f"{entry['profiling_name'].split(':')[-1].lstrip('_')} of {sizes or 'nothing'}",
        at=_whole(entry["time_created_ns"]) / 1e9,
        where=_where(entry.get("frames", ())),
    )


def _where(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost frame outside of libraries."""
    own = [one for one in frames if "site-packages" not in one["filename"]]
    for frame in own or frames[:1]:
        path = Path(frame["filename"])
        name = "/".join(path.parts[-2:])
        return f"{name}:{_whole(frame['line'])} ({_text(frame['name'])})"
    return "a place that is not recorded"


def _whole(value: object) -> int:
    """Return a value that fits into 64 bits; raise TypeError for any other: it may be nested, and
    endless where it is printed."""
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise TypeError(f"a whole number is due, not a {type(value).__name__}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is due, not a {type(value).__name__}")
    return value


def find_blocked(calls: Mapping[int, Sequence[Call]], *, late: float) -> dict[int, Blocked]:
    """Return the ranks whose last call others of its group have not made, by rank, or have made
    more than `late` seconds after it: when its time was over."""
    last: defaultdict[Group, dict[int, Call]] = defaultdict(dict)
    for rank, made in calls.items():
        for call in made:
            last[call.group][rank] = call

    def is_there(other: Call | None, call: Call) -> bool:
        if other is None or other.number < call.number:
            return False
        return other.number > call.number or other.at <= call.at + late

    found = {}
    for rank, made in calls.items():
        if not made:
            continue
        call = made[-1]
        of_group = last[call.group]
        missing = tuple(r for r in call.group[1] if not is_there(of_group.get(r), call))
        if missing:
            found[rank] = Blocked(call=call, waits_for=missing)
    return found


def find_unlike(calls: Mapping[int, Sequence[Call]]) -> list[str]:
    """Return calls of one number that were not the same on all ranks, the first of each group."""
    made: defaultdict[tuple[Group, int], dict[int, Call]] = defaultdict(dict)
    for rank, each in calls.items():
        for call in each:
            made[call.group, call.number][rank] = call
    said: dict[Group, str] = {}
    for (group, _), by_rank in sorted(made.items(), key=lambda item: item[0][1]):
        if group not in said and len({call.what for call in by_rank.values()}) > 1:
            lines = [f"  rank {rank}: {call}" for rank, call in by_rank.items()]
            said[group] = "\n".join(["Ranks called different things in the same place:", *lines])
    return [*said.values()]


def describe(calls: Mapping[int, Sequence[Call]], *, late: float, logs: Path) -> str:
    """Return who waited for whom, and what is known of those that waited for nobody."""
    world = sorted({rank for made in calls.values() for call in made for rank in call.group[1]})
    silent = [rank for rank in world if rank not in calls]
    blocked = find_blocked(calls, late=late)
    lines = [f"{plural(len(world), 'rank')}, records of {len(calls)}", ""]
    lines += [
        f"rank {rank} waits for {_ranks(one.waits_for)} in {one.call}"
        for rank, one in blocked.items()
    ]
    awaited = {rank for one in blocked.values() for rank in one.waits_for}
    for rank in sorted(awaited - blocked.keys()):
        lines.append("")
        if rank in silent:
            lines.append(
                f"It began with rank {rank}: others wait for it, and it has left no record, so it "
                "was killed, or hangs outside of any collective"
            )
        else:
            made = calls[rank]
            said = f"its last call was {made[-1]}" if made else "it had called nothing"
            lines.append(f"It began with rank {rank}: others wait, it does not; {said}")
        lines += _last_lines(logs / f"rank_{rank}.log")
    lines += ["", *find_unlike(calls)]
    if not blocked:
        lines.append("No rank waits for another in what was recorded.")
    return "\n".join(lines).strip() + "\n"


def _last_lines(log: Path) -> list[str]:
    if not log.is_file():
        return [f"  and there is no {log}"]
    ends = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return [f"  {log} ends with:", *(f"    {line}" for line in ends)]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _time(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
