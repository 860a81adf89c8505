"""The launch files: what they start understands its arguments, and Slurm runs its own.

Their command lines are run here on processes of this machine, with a small job in place of theirs.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.ports import hold_port
from tests.distributed.jobs import read_rows, write_job
from tests.jobs import UNSAVED
from torchtitan.config.settings import parse
from torchtitan.job import load_job

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "cluster"
SECONDS = 300


def documents(name: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((CLUSTER / name).read_text())]


def kubernetes_command() -> list[str]:
    container = documents("kubernetes.yaml")[1]["spec"]["template"]["spec"]["containers"][0]
    return [*container["command"], *container["args"]]


def kubeflow_command() -> list[str]:
    trainer = documents("kubeflow.yaml")[0]["spec"]["trainer"]
    return [*trainer["command"], *trainer["args"]]


def skypilot_command() -> list[str]:
    [task] = documents("skypilot.yaml")
    last = task["run"].replace("\\\n", " ").strip().splitlines()[-1]
    return shlex.split(last.replace("$BUCKET", task["envs"]["BUCKET"]))


@pytest.mark.parametrize("command", [kubernetes_command, kubeflow_command, skypilot_command])
def test_the_settings_are_the_trainers(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command()
    assert words[:3] == ["python", "-m", "torchtitan.launch"]
    monkeypatch.chdir(ROOT)  # as in the image
    job = load_job(words[words.index("torchtitan.train") + 1 :])
    assert job.config.checkpoint.enable  # or a restart would begin anew


@pytest.mark.promise("cluster")
def test_the_schema_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    service, job, policy = documents("kubernetes.yaml")
    for document in (service, job, policy):
        validator.validate(document, "1.33", strict=True)
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"]
    assert f"--nnodes={spec['completions']}" in kubernetes_command()
    name = job["metadata"]["name"]
    own_pods = {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["selector"] == own_pods
    assert policy["spec"]["podSelector"] == {"matchLabels": own_pods}
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": own_pods}}]}]
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert f"--master_addr={name}-0.{service['metadata']['name']}" in kubernetes_command()
    [container] = spec["template"]["spec"]["containers"]
    rules = spec["podFailurePolicy"]["rules"]
    by_code = {rule["action"]: rule["onExitCodes"] for rule in rules if "onExitCodes" in rule}
    assert {action: codes["values"] for action, codes in by_code.items()} == {
        "FailJob": [2, 3],
        "Ignore": [4],
    }
    assert {codes["containerName"] for codes in by_code.values()} == {container["name"]}


@pytest.mark.promise("cluster")
@pytest.mark.long
def test_the_pods_of_kubernetes_meet(tmp_path: Path) -> None:
    """Two nodes with a rank each, on a small job."""
    place = hold_port()
    changed = {
        "--nproc_per_node": "1",
        "--master_addr": "127.0.0.1",
        "--master_port": str(place.getsockname()[1]),
    }
    words = kubernetes_command()
    words = words[1 : words.index("torchtitan.train") + 1]
    assert "--node_rank=$(JOB_COMPLETION_INDEX)" in words
    job = [*write_job(tmp_path), UNSAVED, "--training.steps=2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    nodes = []
    for number in ("0", "1"):
        values = {**changed, "--node_rank": number}
        names = ((word.partition("=")[0], word) for word in words)
        command = [f"{name}={values[name]}" if name in values else word for name, word in names]
        nodes.append(subprocess.Popen([sys.executable, *command, *job], env=environ, cwd=ROOT))
    try:
        assert [node.wait(SECONDS) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.terminate()
        place.close()
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [1, 2]


LAUNCHER = """#!/bin/bash
trap 'code=$ASKED' USR1
echo "$*" >> started
for _ in {1..100}; do [[ -n ${code:-} || -f go ]] && break; sleep 0.1; done
exit "${code:-$ENDS}"
"""


@pytest.mark.promise("signals", "cluster")
@pytest.mark.parametrize(
    ("variables", "is_asked", "code", "num_started", "is_queued"),
    [
        ({"ENDS": "0"}, False, 0, 1, False),
        ({"ENDS": "2"}, False, 2, 1, False),
        ({"ENDS": "4"}, False, 4, 1, True),
        ({"ENDS": "4", "SLURM_RESTART_COUNT": "1", "MAX_REQUEUES": "2"}, False, 4, 1, True),
        ({"ENDS": "4", "SLURM_RESTART_COUNT": "2", "MAX_REQUEUES": "2"}, False, 4, 1, False),
        ({"ENDS": "0", "ASKED": "4"}, True, 4, 1, True),
        ({"ENDS": "0", "CHECK": "1"}, False, 0, 2, False),
        ({"ENDS": "2", "CHECK": "1"}, False, 2, 1, False),
        ({"ENDS": "0", "CHECK": "1"}, True, 4, 1, True),  # while it is checked
    ],
)
def test_code_4_alone_queues_the_job_again(
    variables: dict[str, str],
    is_asked: bool,
    code: int,
    num_started: int,
    is_queued: bool,
    tmp_path: Path,
) -> None:
    """With launchers in place of srun, that end as they are told, or when they are asked to."""
    control = "#!/bin/bash\n[[ $1 == requeue ]] && touch queued || echo host\n"
    python = '#!/bin/bash\n[[ ! -f queued ]] && echo "$*" > named\n'
    for name, text in (("scontrol", control), ("srun", LAUNCHER), ("python", python)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "host", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    batch = subprocess.Popen(
        ["bash", str(CLUSTER / "slurm.sbatch"), "--training.steps=3"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "RANKS_PER_NODE": "8", **job, **variables},
        cwd=tmp_path,
    )
    try:
        if is_asked:
            deadline = time.monotonic() + SECONDS
            while not (tmp_path / "started").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            batch.send_signal(signal.SIGUSR1)
        if not is_asked or "CHECK" in variables:
            (tmp_path / "go").touch()
        assert batch.wait(SECONDS) == code
    finally:
        batch.kill()
    started = (tmp_path / "started").read_text().splitlines()
    assert len(started) == num_started
    assert (tmp_path / "queued").exists() == is_queued
    if code == 4 and not is_asked:  # before the next start, which removes the records
        named = (tmp_path / "named").read_text()
        assert named == "-m torchtitan hang --training.steps=3\n"
    else:
        assert not (tmp_path / "named").exists()
    assert "--rdzv_endpoint host:20007" in started[0]
    verbs = ["check", "train"] if "CHECK" in variables else ["train"]
    for line, verb in zip(started, verbs[:num_started], strict=True):
        assert line.endswith(f" -m torchtitan {verb} --training.steps=3")


def test_the_image_has_what_the_installation_needs() -> None:
    """What the build reads is copied before it, and the extras exist."""
    project = parse((ROOT / "pyproject.toml").read_text(), origin="pyproject.toml")
    before, install = (ROOT / "cluster/docker/Dockerfile").read_text().split("RUN pip install")[:2]
    copied = {
        word for line in before.splitlines() if line.startswith("COPY") for word in line.split()
    }
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["force-include"], "torchtitan", "pyproject.toml"} <= copied
    [extras] = re.findall(r"ARG EXTRAS=(\S+)", before)
    assert {*extras.split(",")} <= project["project"]["optional-dependencies"].keys()
    assert "EXTRAS" in install
