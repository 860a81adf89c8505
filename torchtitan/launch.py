"""torchrun with the exit code of the rank that failed first.

torchrun itself exits with 1 and a traceback for any failure of a rank. But a user's mistake must
end with one message and code 2 on any number of ranks, and a scheduler requeues a job by its code.
So this entry calls torchrun's own parser and `run`, and only translates the result. Arguments,
restarts and rendezvous are torchrun's.

NCCL ends a rank by SIGABRT when a collective times out or a link fails, after it has written its
record. Another start may help, so the code is 4.

SIGTERM, SIGINT and SIGUSR1 stop the job: torchrun forwards them to the ranks, which save and exit.
It kills them after 30 seconds, too soon for a large checkpoint; `--shutdown_timeout` (torch 2.13 or
newer) sets another limit.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import (
    parse_args,
    parse_min_max_nnodes,
    run,
)

from torchtitan.base.errors import NonFiniteError, StoppedError, UserError, printable
from torchtitan.mesh.ranks import STORE
from torchtitan.mesh.stop import STARTED

SHUTDOWN_SECONDS = 3600
"""Default of `--shutdown_timeout`: as long as a save may take. Who sent the signal often kills the
job earlier."""
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGQUIT")
REPORTED = (UserError.exit_code, NonFiniteError.exit_code, StoppedError.exit_code)
"""Exit codes of a rank that has printed its error."""

KILLED_IN_SETUP = (-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGINT)
"""Exit codes of a rank that got a signal before its first step, when there is nothing to save."""


def main(argv: Sequence[str]) -> int:
    """Start the ranks of this machine and wait for them.

    Returns:
        0, the code of the rank that failed first, or 4 if the launcher got a signal.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = parse_args(list(argv))
    arguments.signals_to_handle = ",".join(SIGNALS)
    is_given = getattr(arguments, "shutdown_timeout", None) is not None
    if not is_given and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ:
        arguments.shutdown_timeout = SHUTDOWN_SECONDS
    started = time.time()
    os.environ[STARTED] = str(time.monotonic())
    min_nodes, max_nodes = parse_min_max_nnodes(arguments.nnodes)
    if min_nodes < max_nodes:
        # with a shared store a restarted node waits for an address that it never receives
        # (read in torch 2.11 to 2.15)
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for name in SIGNALS:  # until torchrun handles them itself
        signal.signal(getattr(signal, name), lambda *_: sys.exit(StoppedError.exit_code))
    try:
        with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder:
            if max_nodes == 1:
                meet_in_files(arguments, folder=Path(folder))
            run(arguments)
    except SignalException:
        return StoppedError.exit_code
    except ChildFailedError as error:
        places = find_places(arguments, since=started)
        sys.stderr.write(describe_failure(error, places))
        return exit_code_of_job(error, places)
    return 0


def meet_in_files(arguments: argparse.Namespace, *, folder: Path) -> None:
    """Let torchrun and the ranks of one machine meet in files instead of a store on a port.

    torchrun's store listens on all interfaces and unpickles what it receives.
    """
    arguments.standalone = False
    arguments.rdzv_backend, arguments.rdzv_id = "c10d", folder.name
    arguments.rdzv_endpoint = str(folder / "rendezvous")
    # each sign of life makes the file longer, and there is no other machine to wait for it
    arguments.rdzv_conf = "store_type=file,keep_alive_interval=3600"
    arguments.local_addr = "127.0.0.1"
    os.environ[STORE] = str(folder / "store")
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # which torchrun starts for the ranks


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the ranks of a training write."""

    folder: Path
    records: Path
    """Folder of the flight recorder's files."""
    prefix: str
    """Prefix of NCCL's files there."""
    since: float
    """Time of the start. Older files are those of an earlier run."""

    def has_records(self, of: int | None = None) -> bool:
        """Return whether any rank, or the one given, wrote its collectives."""
        files = self.records.iterdir() if self.records.is_dir() else []
        ending = "" if of is None else rf"(?<!\d){of}"
        return any(self.is_new(file) and re.search(f"{ending}$", file.name) for file in files)

    def was_aborted_by_nccl(self, rank: int, failure: ProcessFailure) -> bool:
        """Return whether NCCL ended a rank: by SIGABRT, after it had written its record."""
        record = self.records / f"{self.prefix}{rank}"
        return failure.exitcode == -signal.SIGABRT and self.is_new(record)

    def is_new(self, file: Path) -> bool:
        """Return whether a file was written since the start."""
        return file.is_file() and file.stat().st_mtime >= self.since


def exit_code_of_job(error: ChildFailedError, places: Places | None) -> int:
    """Return the exit code of a job whose ranks failed."""
    rank, first = error.get_first_failure()
    for failure in (first, *error.failures.values()):
        if failure.exitcode in REPORTED:
            return failure.exitcode
    is_nccl = places is not None and places.was_aborted_by_nccl(rank, first)
    if first.exitcode in KILLED_IN_SETUP or is_nccl:
        return StoppedError.exit_code
    return max(first.exitcode, 1)  # negative: a signal


def find_places(arguments: argparse.Namespace, *, since: float) -> Places | None:
    """Return where the training that failed writes, None if another program was started."""
    from torchtitan.config.settings import COMMAND_LINE, CONFIG_FILE, Setting, flatten, read_files
    from torchtitan.mesh.settings import CommConfig

    words = [arguments.training_script, *arguments.training_script_args]
    if words[:2] != ["torchtitan", "train"] and words[0] != "torchtitan.train":
        return None
    found = {
        ("job", "dump_folder"): "outputs",
        ("comm", "save_traces_folder"): CommConfig.save_traces_folder,
        ("comm", "save_traces_file_prefix"): CommConfig.save_traces_file_prefix,
    }
    given = {key: _find_option(words, f"--{'.'.join(key)}") for key in found}
    file = _find_option(words, "--job.config_file")
    try:
        tables = read_files(Setting(file, COMMAND_LINE, CONFIG_FILE)) if file else {}
    except UserError:  # it was changed since the start
        if given["job", "dump_folder"] is None:
            return None
        tables = {}
    for table in tables.values():
        layer = flatten(table, origin="")
        found |= {key: str(layer[key].value) for key in found if key in layer}
    found |= {key: value for key, value in given.items() if value is not None}
    folder, records, prefix = found.values()
    try:
        path = Path(folder).expanduser()
    except RuntimeError:  # no such home
        return None
    return Places(folder=path, records=path / records, prefix=prefix, since=since)


def _find_option(words: Sequence[str], name: str) -> str | None:
    """Return the last value of an option, written "--x 1" or "--x=1"."""
    value = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, given = word.partition("=")
        if option == name:
            value = given if equals else following
    return value


def describe_failure(error: ChildFailedError, places: Places | None) -> str:
    """Return the last paragraph of a failed job's output: which rank ended first and why, its log,
    and the commands that resume the job and find a hanging rank.

    It is empty if the ranks have printed everything.

    Args:
        error: What torchrun raised.
        places: Where the ranks write, if known.
    """
    rank, first = error.get_first_failure()
    codes = {number: each.exitcode for number, each in error.failures.items()}
    has_records = places is not None and places.has_records()
    lines = []
    if first.exitcode not in (*REPORTED, *KILLED_IN_SETUP):
        cause = f"with exit code {first.exitcode}"
        if first.exitcode < 0:
            cause = f"by {_signal_name(-first.exitcode)}"
            cause += ", perhaps of the OOM killer" if first.exitcode == -signal.SIGKILL else ""
        if places and places.was_aborted_by_nccl(rank, first):
            cause += " of NCCL: a collective timed out, or a link failed"
        lines.append(f"rank {rank} was the first to end on {socket.gethostname()}, {cause}")
        if len(codes) > 1:
            lines.append(f"  codes: {', '.join(f'rank {n}: {code}' for n, code in codes.items())}")
        if places and places.is_new(log := places.folder / "logs" / f"rank_{rank}.log"):
            lines.append(f"  log: {log}")
    # with a record of its own, unlike a rank that waited for data
    elif first.exitcode == StoppedError.exit_code and places and places.has_records(rank):
        lines.append(f"rank {rank} waited too long for another rank, exit code {first.exitcode}")
    if lines and places and any(places.folder.glob("checkpoint/step-*")):
        lines.append("  run the same command to resume from the last checkpoint")
    if lines and places and has_records:
        hang = f"python -m torchtitan hang {shlex.quote(str(places.folder))}"
        lines.append(f"  to name a rank that other ranks waited for: {hang}")
    return printable("\n".join(lines).strip()) + "\n" * bool(lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
