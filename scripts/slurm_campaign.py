"""Submit cluster/slurm.sbatch to Slurm on this machine, disturb the job, and compare.

    python scripts/slurm_campaign.py

Slurm's daemons (Debian: slurmctld, slurmd, slurm-client) run with a configuration of their own: a
controller and two nodes. A job with an invalid setting must end with exit code 2 and must not be
queued again. A small job of one rank per node is asked to save and leave (`scancel --batch
--signal USR1`), and must be queued again and resume. Then a node dies with all of its processes;
Slurm must notice it and queue the job again, and the run must resume when the node has returned. At
the end every logged loss and every tensor must equal those of an undisturbed run. Exit code 0 if
all of this holds, 1 if not, 2 without Slurm. The daemons need root.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from scripts.campaign import (
    ENVIRON,
    RESUMED,
    ROOT,
    CampaignError,
    Run,
    build_parser,
    compare_runs,
    run_campaign,
    steps_in,
)
from scripts.ports import hold_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
MACHINE = socket.gethostname()
CPUS = min(2, os.cpu_count() or 1)
"""Per node; more than one if possible, to check that a job gets all of them."""
NODES = (MACHINE, f"{MACHINE}-b")
"""Ranks meet at the alphabetically first node, whose name must resolve."""
CONFIGURATION = """
ClusterName=campaign
SlurmctldHost={machine}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout=10
KillWait=10
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SECONDS_TO_START = 120
NODE = "NodeName={name} NodeHostname={machine} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}\n"


@dataclass
class Slurm:
    """A controller and two nodes on this machine."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Start all daemons, and wait until the nodes are idle.

        Raises:
            CampaignError: They do not become idle.
        """
        (self.folder / "state").mkdir(parents=True)
        places = [hold_port() for _ in range(1 + len(NODES))]
        controller, *ports = (place.getsockname()[1] for place in places)
        text = CONFIGURATION.format(machine=MACHINE, controller=controller, folder=self.folder)
        for name, port in zip(NODES, ports, strict=True):
            text += NODE.format(name=name, machine=MACHINE, port=port, cpus=CPUS)
        self.configuration.write_text(text)
        for place in places:
            place.close()
        self._start("slurmctld", "slurmctld", "-D")
        for name in NODES:
            self.start_node(name)
        deadline = time.monotonic() + SECONDS_TO_START
        while self.ask("sinfo", "-h", "-o", "%T %D") != f"idle {len(NODES)}":
            if time.monotonic() > deadline or self.daemons["slurmctld"].poll() is not None:
                logs = "\n".join(p.read_text()[-1500:] for p in self.folder.glob("*.log"))
                raise CampaignError(f"the nodes are not idle\n{logs}")
            time.sleep(0.1)

    @property
    def configuration(self) -> Path:
        """The configuration of all of Slurm's programs."""
        return self.folder / "slurm.conf"

    @property
    def environ(self) -> dict[str, str]:
        """The environment of Slurm's programs."""
        return {**os.environ, "SLURM_CONF": str(self.configuration)}

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environ, stdout=output, stderr=output
            )

    def start_node(self, name: str) -> None:
        """Start a node, or start it again."""
        self._start(name, "slurmd", "-D", "-N", name)

    def ask(self, *command: str) -> str:
        """Return the output of one of Slurm's programs; "" while the controller starts."""
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip()

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon, its steps and all their processes, as a power failure does."""
        pids = {self.daemons[name].pid, *self._of_node(name)}
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemons[name].wait()

    def _of_node(self, name: str) -> set[int]:
        """Return the processes of jobs on a node, and the daemon of each step."""
        found: set[int] = set()
        ours = {f"SLURM_CONF={self.configuration}", f"SLURMD_NODENAME={name}"}
        for process in Path("/proc").iterdir():
            try:
                variables = (process / "environ").read_text(errors="replace").split("\0")
                if ours <= {*variables}:
                    parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                    found |= {int(process.name), *([parent] if _is_step(parent) else [])}
            except (OSError, ValueError):
                continue  # not a process, or it has ended
        return found

    def close(self) -> None:
        """Cancel all jobs and end all daemons."""
        self.ask("scancel", "--me")
        for pid in {pid for name in NODES for pid in self._of_node(name)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()


def _is_step(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")


@dataclass(kw_only=True)
class SlurmRun(Run):
    """A run that Slurm starts, with one rank per node."""

    slurm: Slurm
    steps: int
    ranks: int = len(NODES)
    options: tuple[str, ...] = ("--checkpoint.interval=5",)
    poll_seconds: float = 0.1
    number: str = ""

    def submit(self) -> None:
        """Submit cluster/slurm.sbatch, as users do."""
        arguments = self.arguments(steps=self.steps)
        command = ["sbatch", "--parsable", f"--nodes={self.ranks}"]
        command += [f"--output={self.folder / 'output_0.txt'}"]
        command += [str(ROOT / "cluster" / "slurm.sbatch"), *arguments]
        command += ["--training.callbacks=scripts.campaign:Pace"]
        environ = {**self.slurm.environ, **ENVIRON, "PYTHON": sys.executable, "RANKS_PER_NODE": "1"}
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise CampaignError(f"sbatch ended with {done.returncode}: {done.stderr}")
        self.number = done.stdout.strip()

    def wait_for_steps(self, count: int, *, after: int) -> None:
        """Wait for so many steps since the last resume in `log[after:]`."""
        self.wait_until(lambda: self.has_steps(count, after=after), what=f"{count} steps")

    def show(self) -> str:
        """Return Slurm's description of the job."""
        return self.slurm.ask("scontrol", "show", "job", self.number)

    def check_cpus(self) -> None:
        """Check that the job has all CPUs of its nodes: by default a task gets one."""
        if f"NumCPUs={len(NODES) * CPUS} " not in (shown := self.show()):
            raise CampaignError(f"the job must have {CPUS} CPUs per node:\n{shown}")

    def check_end(self, expected: str) -> None:
        """Wait until the job has ended, and check its state and exit code."""

        def state() -> str:
            shown = self.show()
            found = re.search(r"JobState=(\w+)", shown), re.search(r"ExitCode=(\S+)", shown)
            return " ".join(match[1] for match in found if match)

        self.wait_until(lambda: not state().startswith(("R", "P", "COMPLETING")), what="end")
        if (end := state()) != expected:
            raise CampaignError(f"the job must end as {expected}, got {end}:\n{self.output}")


def ask_to_save(run: SlurmRun) -> None:
    """Ask the job to save and leave, as a scheduler that needs its nodes does."""
    run.slurm.ask("scancel", "--batch", "--signal=USR1", run.number)


def lose_node(run: SlurmRun) -> None:
    """Kill a node, and start it again after Slurm has marked it as down."""
    slurm = run.slurm
    slurm.kill_node(NODES[1])
    run.wait_until(lambda: "down" in slurm.ask("sinfo", "-h", "-o", "%T"), what="node that is down")
    slurm.start_node(NODES[1])


FAULTS = {"the signal": ask_to_save, "the death of a node": lose_node}


def disturb(folder: Path, *, steps: int, faults: Sequence[str] = tuple(FAULTS)) -> str:
    """Disturb a job by each of `faults`, and compare; return a summary."""
    slurm, seconds = Slurm(folder / "slurm"), []
    run = SlurmRun(folder=folder / "job", slurm=slurm, steps=steps)
    try:
        slurm.start()
        wrong = SlurmRun(folder=folder / "wrong", slurm=slurm, steps=-1)
        wrong.submit()
        wrong.check_end("FAILED 2:0")
        run.submit()
        run.wait_for_steps(4, after=0)
        run.check_cpus()
        for name in faults:
            before, at = len(run.log), time.monotonic()
            FAULTS[name](run)
            run.wait_for_steps(4, after=before)
            seconds.append(f"{time.monotonic() - at:.0f} s after {name}")
        (run.results / "fast").touch()
        run.check_end("COMPLETED 0:0")
    finally:
        slurm.close()
    resumed = steps_in(RESUMED, run.log)
    compare_runs(run.train_undisturbed(steps=steps, ranks=run.ranks), run.results)
    if len(resumed) != len(faults):
        raise CampaignError(f"{len(faults)} faults, and the job resumed from {resumed}")
    return (
        f"queued again {len(faults)} times, resumed from steps {resumed}; {steps} steps equal "
        f"those of an undisturbed run; four steps {', '.join(seconds)}"
    )


def missing() -> list[str]:
    """Return the programs of Slurm that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def main(argv: Sequence[str]) -> int:
    """Run the campaign and return the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(argv)
    if names := missing():
        sys.stderr.write(f"Slurm must be installed, {', '.join(names)} are not on the PATH\n")
        return 2
    return run_campaign(lambda options, folder: disturb(folder, steps=options.steps), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
