"""torchrun with the exit code of the rank that failed first.

torchrun itself exits with 1 and a traceback for any failure of a rank. But a user's mistake must
end with one message and code 2 on any number of ranks, and a scheduler requeues a job by its code.
So this entry calls torchrun's own parser and `run`, and only translates the result. Arguments,
restarts and rendezvous are torchrun's.

NCCL ends a rank by SIGABRT when a collective times out or a link fails, after it has written its
record. Another start may help, so the code is 4.

SIGTERM, SIGINT and SIGUSR1 stop the job: torchrun forwards them to the ranks, which save and exit.
"""

from __future__ import annotations

if __name__ == "__main__":
    from torchtitan.base.path import drop_current_folder

    drop_current_folder()

import argparse
import json
import logging
import os
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
from torch.distributed.run import parse_args, parse_min_max_nnodes, run

from torchtitan.base.errors import NonFiniteError, StoppedError, UserError, printable
from torchtitan.base.log import replace_closed_streams
from torchtitan.mesh.faults import GLOO, NCCL
from torchtitan.mesh.ranks import END_FILE, RUN_FILE, STORE
from torchtitan.mesh.stop import STARTED

SHUTDOWN_SECONDS = 3600
"""Default of `--shutdown_timeout` (torch 2.13 or newer): as long as a save may take. torchrun's own
default, 30 seconds, is too short for a large checkpoint."""
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
    replace_closed_streams()
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
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder:
        run_file = Path(folder) / "run.json"
        os.environ[RUN_FILE] = str(run_file)
        if max_nodes == 1:
            meet_in_files(arguments, folder=Path(folder))
        end_file = run_file.with_name(END_FILE)
        try:
            run(arguments)
        except SignalException:  # perhaps too late to stop the run
            is_done = end_file.is_file() and end_file.read_text() == "finished"
            return 0 if is_done else StoppedError.exit_code
        except ChildFailedError as error:
            files = RunFiles.read(run_file, since=started)
            sys.stderr.write(describe_failure(error, files))
            return exit_code_of_job(error, files)
        if run_file.is_file() and not end_file.is_file():
            sys.stderr.write(
                "the ranks ended with exit code 0 before their training did: custom code must not "
                "call os._exit\n"
            )
            return 1
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
class RunFiles:
    """Where the ranks of a training write."""

    folder: Path
    prefix: Path
    """Path of the flight recorder's files up to the rank."""
    since: float
    """Time of the start. Older files are those of an earlier run."""

    @classmethod
    def read(cls, file: Path, *, since: float) -> RunFiles | None:
        """Read what a rank wrote at its start; None if no training has started."""
        if not file.is_file():
            return None
        content = json.loads(file.read_text())
        folder, prefix = Path(content["folder"]), Path(content["prefix"])
        return cls(folder=folder, prefix=prefix, since=since)

    def is_new(self, file: Path) -> bool:
        """Return whether a file was written since the start."""
        return file.is_file() and file.stat().st_mtime >= self.since

    def has_records(self, rank: int | str = "[0-9]*") -> bool:
        """Return whether a rank, by default any, wrote its collectives."""
        names = (f"{prefix}{rank}" for prefix in (self.prefix.name, GLOO, NCCL))
        return any(self.is_new(file) for name in names for file in self.prefix.parent.glob(name))

    def was_aborted_by_nccl(self, rank: int, failure: ProcessFailure) -> bool:
        """Return whether NCCL ended a rank: by SIGABRT, after it had written its record."""
        record = self.prefix.with_name(f"{self.prefix.name}{rank}")
        return failure.exitcode == -signal.SIGABRT and self.is_new(record)


def exit_code_of_job(error: ChildFailedError, files: RunFiles | None) -> int:
    """Return the exit code of a job whose ranks failed."""
    rank, first = error.get_first_failure()
    for failure in (first, *error.failures.values()):
        if failure.exitcode in REPORTED:
            return failure.exitcode
    is_nccl = files is not None and files.was_aborted_by_nccl(rank, first)
    if first.exitcode in KILLED_IN_SETUP or is_nccl:
        return StoppedError.exit_code
    return max(first.exitcode, 1)  # negative: a signal


def describe_failure(error: ChildFailedError, files: RunFiles | None) -> str:
    """Return the last paragraph of a failed job's output: which rank ended first and why, its log,
    and the commands that resume the job and find a hanging rank.

    It is empty if the ranks have printed everything.
    """
    rank, first = error.get_first_failure()
    lines = []
    if first.exitcode not in (*REPORTED, *KILLED_IN_SETUP):
        cause = f"with exit code {first.exitcode}"
        if first.exitcode < 0:
            names = {int(number): number.name for number in signal.Signals}
            cause = f"by {names.get(-first.exitcode, f'signal {-first.exitcode}')}"
            cause += ", perhaps of the OOM killer" if first.exitcode == -signal.SIGKILL else ""
        if files and files.was_aborted_by_nccl(rank, first):
            cause += " of NCCL: a collective timed out, or a link failed"
        lines.append(f"rank {rank} was the first to end on {socket.gethostname()}, {cause}")
        if len(error.failures) > 1:
            codes = (
                f"rank {number}: {failure.exitcode}" for number, failure in error.failures.items()
            )
            lines.append(f"  codes: {', '.join(codes)}")
        if files and files.is_new(log := files.folder / "logs" / f"rank_{rank}.log"):
            lines.append(f"  log: {log}")
    # with a record of its own, unlike a rank that waited for data
    elif first.exitcode == StoppedError.exit_code and files and files.has_records(rank):
        lines.append(f"rank {rank} waited too long for another rank, exit code {first.exitcode}")
    if lines and files and any(files.folder.glob("checkpoint/step-*")):
        lines.append("  run the same command to resume from the last checkpoint")
    if lines and files and files.has_records():
        hang = f"torchtitan hang {shlex.quote(str(files.folder))}"
        lines.append(f"  to name a rank that other ranks waited for: {hang}")
    return printable("\n".join(lines).strip()) + "\n" * bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
