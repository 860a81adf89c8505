"""Submit cluster/slurm.sbatch to a real Slurm on this machine, disturb the job, and compare.

    python scripts/slurm_campaign.py

Slurm's own daemons (Debian: slurmctld, slurmd, slurm-client) run here with a configuration and
folders of their own: a controller and two nodes, each a slurmd. A job with a mistake must end in
its code, 2, and not be queued again. A small job of one rank a node is asked to save and leave
(`scancel --batch --signal USR1`), and must be queued again and resume; then a node dies with all of
its processes, Slurm must find that out, queue the job again, and the run must resume once the node
is back. At the end every logged loss and every tensor must be those of a run that nobody disturbed.
Exit code 0 if all of that holds, 1 if not, 2 without Slurm. The daemons need the rights of root.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # works without being installed

from scripts.crash_campaign import RESUMED, STEP, TINY, CampaignError, compare_runs
from scripts.ports import hold_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
MACHINE = socket.gethostname()
CPUS = min(2, os.cpu_count() or 1)
"""CPUs of a node; more than one where there are, to see that a job gets them all."""
NODES = (MACHINE, f"{MACHINE}-b")
"""The first of them in the alphabet is where the ranks meet: that name is looked up."""
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
NODE = "NodeName={name} NodeHostname={machine} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}\n"


class Pace:
    """A callback that holds steps up, so that no run is over before it is disturbed."""

    def on_step(self, step: int, row: object) -> None:
        """Wait a little."""
        time.sleep(0.3)


@dataclass
class Slurm:
    """A controller and two nodes on this machine."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Start all daemons, and wait until the nodes are idle."""
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
        self.wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == "idle 2", "idle nodes")

    @property
    def configuration(self) -> Path:
        """The file that all of Slurm's programs read."""
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
        """Return what one of Slurm's programs says; nothing while the controller starts."""
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip()

    def wait_until(self, holds: Callable[[], bool], what: str, *, seconds: float = 120) -> None:
        """Wait for something.

        Raises:
            CampaignError: It has not come in time.
        """
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline or self.daemons["slurmctld"].poll() is not None:
                logs = "\n".join(p.read_text()[-1500:] for p in self.folder.glob("*.log"))
                raise CampaignError(f"no {what} within {seconds:.0f} s\n{logs}")
            time.sleep(0.1)

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon, its steps and all their processes, as a loss of power does."""
        pids = {self.daemons[name].pid, *self._of_node(name)}
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemons[name].wait()

    def _of_node(self, name: str) -> set[int]:
        """Return the processes of this Slurm's jobs on a node, and the daemon of each step."""
        found: set[int] = set()
        ours = {f"SLURM_CONF={self.configuration}", f"SLURMD_NODENAME={name}"}
        for process in Path("/proc").iterdir():
            try:
                variables = (process / "environ").read_text(errors="replace").split("\0")
                if ours <= {*variables}:
                    parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                    found |= {int(process.name), *([parent] if _is_step(parent) else [])}
            except (OSError, ValueError):
                continue  # no process, or one that has ended meanwhile
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


@dataclass
class Job:
    """A job of Slurm that trains in `folder`."""

    slurm: Slurm
    folder: Path
    steps: int
    number: str = ""

    def settings(self, results: Path) -> list[str]:
        """Return the arguments of the trainer."""
        return [
            f"--job.config_file={self.folder / 'job.toml'}",
            f"--job.dump_folder={results}",
            f"--training.dataset_cache={self.folder / 'cache'}",
            f"--training.steps={self.steps}",
            "--checkpoint.interval=5",
            "--lr_scheduler.total_steps=1000000",
            "--training.callbacks=scripts.slurm_campaign:Pace",
        ]

    def submit(self) -> None:
        """Submit the file that users do."""
        self.folder.mkdir(parents=True)
        (self.folder / "job.toml").write_text(TINY)
        environ = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = ["sbatch", "--parsable", "--nodes=2", f"--output={self.output}"]
        command += [str(ROOT / "cluster" / "slurm.sbatch"), *self.settings(self.folder / "run")]
        done = subprocess.run(
            command,
            env={**self.slurm.environ, **environ, "RANKS_PER_NODE": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise CampaignError(f"sbatch ended with {done.returncode}: {done.stderr}")
        self.number = done.stdout.strip()

    @property
    def output(self) -> Path:
        """What the batch script and its steps say."""
        return self.folder / "output.txt"

    @property
    def log(self) -> str:
        """The log of rank 0, all lives."""
        path = self.folder / "run" / "logs" / "rank_0.log"
        return path.read_text() if path.is_file() else ""

    def wait_for_steps(self, count: int, *, after: int) -> None:
        """Wait for so many steps in the part of the log behind `after`, since it last resumed."""

        def have_come() -> bool:
            life = self.log[after:]
            ends = [found.end() for found in RESUMED.finditer(life)]
            begins = ends[-1] if ends else 0 if after == 0 else len(life)
            return len(STEP.findall(life[begins:])) >= count

        try:
            self.slurm.wait_until(have_come, "step", seconds=240)
        except CampaignError as error:
            raise CampaignError(f"{error}\n{self.output.read_text()[-3000:]}") from error

    def check_cpus(self) -> None:
        """Check that the job has all CPUs of its nodes: Slurm gives a task one of them."""
        said = self.slurm.ask("scontrol", "show", "job", self.number)
        if f"NumCPUs={len(NODES) * CPUS} " not in said:
            raise CampaignError(f"the job should have {CPUS} CPUs per node:\n{said}")

    def wait_for_end(self) -> str:
        """Wait until Slurm has ended the job; return its state and exit code."""

        def state() -> str:
            said = self.slurm.ask("scontrol", "show", "job", self.number)
            found = re.search(r"JobState=(\w+)", said), re.search(r"ExitCode=(\S+)", said)
            return " ".join(match[1] for match in found if match)

        self.slurm.wait_until(lambda: not state().startswith(("R", "P", "COMPLETING")), "end")
        return state()


def ask_to_save(slurm: Slurm, job: Job) -> None:
    """Do as a scheduler that wants the nodes for another job."""
    slurm.ask("scancel", "--batch", "--signal=USR1", job.number)


def lose_node(slurm: Slurm, job: Job) -> None:
    """Kill a node, and start it again once Slurm has found out."""
    slurm.kill_node(NODES[1])
    slurm.wait_until(lambda: "down" in slurm.ask("sinfo", "-h", "-o", "%T"), "node that is down")
    slurm.start_node(NODES[1])


FAULTS = {"the signal": ask_to_save, "the death of a node": lose_node}


def campaign(folder: Path, *, steps: int, faults: Sequence[str] = tuple(FAULTS)) -> str:
    """Disturb a job, and compare; return what came of it."""
    slurm, seconds = Slurm(folder / "slurm"), []
    try:
        slurm.start()
        wrong = Job(slurm, folder / "wrong", -1)
        wrong.submit()
        if (end := wrong.wait_for_end()) != "FAILED 2:0":
            raise CampaignError(f"a job with a mistake ended as {end}")
        job = Job(slurm, folder / "job", steps)
        job.submit()
        job.wait_for_steps(4, after=0)
        job.check_cpus()
        for fault in faults:
            before, at = len(job.log), time.monotonic()
            FAULTS[fault](slurm, job)
            job.wait_for_steps(4, after=before)
            seconds.append(f"{time.monotonic() - at:.0f} s after {fault}")
        end = job.wait_for_end()
        if end != "COMPLETED 0:0":
            raise CampaignError(f"the job ended as {end}:\n{job.output.read_text()[-3000:]}")
    finally:
        slurm.close()
    resumed = [int(step) for step in RESUMED.findall(job.log)]
    compare(job, folder / "undisturbed")
    if len(resumed) != len(faults):
        raise CampaignError(f"{len(faults)} faults, and the job resumed from {resumed}")
    return (
        f"queued again {len(faults)} times, resumed from steps {resumed}; {steps} steps equal an "
        f"undisturbed run's; four steps {', '.join(seconds)}"
    )


def compare(job: Job, undisturbed: Path) -> None:
    """Train the same without Slurm, and compare figures and states."""
    command = [sys.executable, "-m", "torchtitan.launch", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "torchtitan.train", *job.settings(undisturbed)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=300)
    compare_runs(undisturbed, job.folder / "run")


def missing() -> list[str]:
    """Return which of Slurm's programs are not here."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def main(argv: Sequence[str]) -> int:
    """Run the campaign; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(argv)
    if names := missing():
        sys.stderr.write(f"Slurm must be installed, {', '.join(names)} are not on the PATH\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(campaign(Path(folder), steps=options.steps))
        except CampaignError as error:
            sys.stderr.write(f"failed: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
