"""Runs whose checkpoints lie in an object store: what is committed, kept, resumed from and refused.

The store is a folder, file://...; test_objects.py speaks with a server of S3.

The oracle is a run of the same job that saves to a folder: every state must be equal, bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint import stores
from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.naming import naming
from torchtitan.base.errors import ConfigError
from torchtitan.checkpoint import remote
from torchtitan.checkpoint.checksums import read_manifest, seal
from torchtitan.checkpoint.remote import RemoteCheckpoints, Store
from torchtitan.checkpoint.storage import find_steps
from torchtitan.job import load_config

pytestmark = pytest.mark.slow

ALONE = "faulty://bucket/run"


def apart(own_disks: bool, function: Callable[[list[str]], Any], job: list[str]) -> Any:
    """Run a job's function on a rank; with `own_disks` in a folder that no other rank sees."""
    if own_disks:
        job = [*job, f"--job.dump_folder={_folder_of(job)}-{dist.get_rank()}"]
    with jobs.listening() as lines:
        return function(job), lines


def train(job: list[str]) -> list[str]:
    """Run a job to its end; return the hash of its state after each step."""
    return jobs.after_each_step(job, jobs.hash_state)


def _folder_of(job: list[str]) -> str:
    return next(word for word in job if word.startswith("--job.dump_folder=")).partition("=")[2]


class Runs:
    """Runs jobs whose checkpoints lie in a store."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self.url = f"file://{folder}/store"
        self.store = open_store(self.url)

    def job(self, steps: int, *words: str, name: str = "run") -> list[str]:
        job = jobs.write_job(self._folder, name=name)
        job += ["--checkpoint.interval=1", f"--training.steps={steps}"]
        return [*job, *(f"--checkpoint.{word}" for word in words)]

    def run(self, *words: str, steps: int, world: int = 1, own_disks: bool = False) -> Any:
        """Train; return the hash of each step's state, and what rank 0 logged."""
        job = self.job(steps, f"folder={self.url}", *words)
        return self._ranks.run(apart, own_disks, train, job, world=world)[0]


@pytest.fixture(scope="module")
def undisturbed(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """The states of a run that saves to a folder, on one rank and on two, step by step."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {
        world: ranks.run(
            train, [*jobs.write_job(folder, name=str(world)), "--training.steps=4"], world=world
        )[0]
        for world in (1, 2)
    }


@pytest.fixture
def runs(ranks: RankPool, tmp_path: Path) -> Runs:
    return Runs(ranks, tmp_path)


def open_store(url: str) -> Store:
    return Store(url, key="checkpoint.folder", timeout_seconds=5)


def inside(store: Store, step: str) -> str:
    """Return the folder of the attempt that was committed."""
    manifest = json.loads(store.read(f"{step}/manifest.json") or b"")
    return f"{step}/{manifest['checksum']}"


def find_stored(store: Store) -> list[int]:
    """Return the committed steps."""
    return [step for step, is_committed in remote.find_steps(store.list()).items() if is_committed]


@pytest.mark.promise("kill-upload")
@pytest.mark.slow(gate=["True-disabled"])
@pytest.mark.parametrize(("own_disks", "mode"), [(False, "async"), (True, "disabled")])
def test_a_run_resumes_from_the_store_alone(
    own_disks: bool, mode: str, runs: Runs, undisturbed: dict[int, list[str]], tmp_path: Path
) -> None:
    """Two ranks; the last step's weights are exported to the store too."""
    mode = f"async_mode={mode}"
    _, lines = runs.run(mode, "keep_latest_k=2", steps=3, world=2, own_disks=own_disks)
    assert [line for line in lines if line.startswith("Saved")][-1] == f"Saved {runs.url}/step-3"
    store = runs.store
    assert find_stored(store) == [2, 3]
    assert not store.list("step-1")
    folders = [tmp_path / name for name in (["run-0", "run-1"] if own_disks else ["run"])]
    for folder in folders:
        assert find_steps(folder / "checkpoint") == [3]
        shutil.rmtree(folder)
    export = [] if own_disks else ["last_save_in_hf=true"]  # which needs a folder of all ranks
    states, lines = runs.run(mode, *export, steps=4, world=2, own_disks=own_disks)
    assert any(line.startswith(f"Fetching {runs.url}/step-3 into") for line in lines)
    assert states == undisturbed[2][3:]
    if export:
        folder = tmp_path / "run" / "checkpoint" / "export" / "step-4"
        assert "config.json" in os.listdir(folder)
        for path in folder.iterdir():
            assert store.read(f"export/step-4/{path.name}") == path.read_bytes()


@pytest.mark.promise("kill-upload")
def test_an_upload_that_did_not_end_is_ended(runs: Runs, undisturbed: dict[int, list[str]]) -> None:
    on_two: dict[str, Any] = {"world": 2, "own_disks": True}
    runs.run(steps=2, **on_two)
    store = runs.store
    store.remove(["step-2/manifest.json", f"{inside(store, 'step-2')}/model/__0_0.distcp"])
    assert find_stored(store) == [1]
    states, lines = runs.run(steps=3, **on_two)
    assert any(f"{runs.url}/step-2" in line for line in lines)
    assert len({name.split("/")[1] for name in store.list("step-2")}) == 2  # manifest, attempt
    assert find_stored(store) == [1, 2, 3]
    assert states == undisturbed[2][2:3]


@pytest.mark.promise("kill-upload")
def test_a_damaged_step_is_passed_over_and_set_aside(runs: Runs, tmp_path: Path) -> None:
    runs.run(steps=2)
    store = runs.store
    file = f"{inside(store, 'step-2')}/model/__0_0.distcp"
    content = store.read(file)
    assert content is not None
    store.write(file, content[:-1] + b"x")
    shutil.rmtree(tmp_path / "run")
    _, lines = runs.run("interval=3", steps=3)
    assert any("step-2" in line and "damaged" in line for line in lines)
    assert find_stored(store) == [1, 3]
    assert store.read("step-2/manifest.json.damaged")
    runs.run("interval=3", steps=3)
    assert find_stored(store) == [1, 3]


@pytest.mark.promise("kill-upload")
def test_a_store_of_damaged_steps_stays_as_it_is(
    runs: Runs, ranks: RankPool, tmp_path: Path
) -> None:
    """A start that found none would begin anew in the folder of a run."""
    runs.run(steps=1)
    file = f"{inside(runs.store, 'step-1')}/model/__0_0.distcp"
    runs.store.write(file, b"")
    shutil.rmtree(tmp_path / "run")
    before = runs.store.list()
    for _ in range(2):
        [message] = ranks.run(jobs.refusal, runs.job(2, f"folder={runs.url}"), world=1)
        assert naming("step-1", runs.url).match(message)
    assert runs.store.list().keys() == before.keys()


@pytest.mark.promise("kill-upload")
def test_a_kill_while_a_damaged_step_is_replaced(
    runs: Runs, undisturbed: dict[int, list[str]], tmp_path: Path
) -> None:
    runs.run(steps=2)
    store, local = runs.store, tmp_path / "run" / "checkpoint" / "step-2"
    damaged = inside(store, "step-2")
    store.write(f"{damaged}/model/__0_0.distcp", b"")
    # trained anew after a start from step 1: the same states, at another time
    manifest = {**read_manifest(local), "time": "later"}
    del manifest["checksum"]
    (local / "manifest.json").write_bytes(seal(manifest))
    states, lines = runs.run(steps=3)
    assert any("step-2" in line and "damaged" in line for line in lines)
    assert states == undisturbed[1][2:3]  # only step 3
    assert find_stored(store) == [1, 2, 3]
    assert inside(store, "step-2") != damaged


@pytest.mark.promise("kill-upload", "resume-elsewhere")
def test_disks_of_their_own_resume_in_another_layout(runs: Runs, tmp_path: Path) -> None:
    runs.run(steps=2, world=2, own_disks=True)
    for rank in range(2):
        shutil.rmtree(tmp_path / f"run-{rank}")
    states, lines = runs.run(steps=3, world=4, own_disks=True)
    assert any(line.startswith("Resumed from") and "step-2" in line for line in lines)
    assert len(states) == 1
    assert find_stored(runs.store) == [1, 2, 3]


@pytest.mark.promise("kill-upload")
def test_two_runs_do_not_share_a_store(runs: Runs, ranks: RankPool) -> None:
    job = runs.job(2, f"folder={runs.url}")
    [message] = ranks.run(taken_over, runs.url, job, world=1)
    assert naming("process 7", "elsewhere").match(message)


def taken_over(url: str, job: list[str]) -> str:
    """Run a job whose store another process takes after its first save."""
    push, sent = RemoteCheckpoints.push, []

    def push_and_lose(self: RemoteCheckpoints, name: str) -> None:
        push(self, name)
        if not sent:
            open_store(url).write(".owner", b"abc process 7 on host elsewhere")
        sent.append(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteCheckpoints, "push", push_and_lose)
        return jobs.failure(job)


@pytest.mark.promise("kill-upload")
def test_no_manifest_before_all_files(ranks: RankPool, tmp_path: Path) -> None:
    job = [*jobs.write_job(tmp_path), f"--checkpoint.folder={ALONE}", "--training.steps=2"]
    [(order, message)] = ranks.run(order_of_writes, job, world=1)
    assert order[-1] == "step-2/manifest.json"
    assert len(order) == 10 + 1
    assert "503" in message


def order_of_writes(job: list[str]) -> tuple[list[str], str]:
    """Return the order of writes of a save, and how a run ends whose store takes no weights."""
    order: list[str] = []

    def note(request: str, path: str) -> None:
        if request == "write" and not path.endswith(".owner"):
            order.append(path.partition("/run/")[2])

    def refuse(request: str, path: str) -> None:
        if request == "write" and path.endswith(".distcp"):
            raise OSError("503")
        assert not path.endswith("manifest.json") or request != "write"

    with stores.faulty_store() as store:
        store.before = staticmethod(note)
        jobs.train(job)
        store.heal()
        shutil.rmtree(_folder_of(job))
        store.before = staticmethod(refuse)
        message = jobs.failure([*job, "--checkpoint.upload_timeout_seconds=1"])
        return order, message


@pytest.mark.promise("object-stores")
@pytest.mark.parametrize("url", ["s3://key:secret@bucket/run", "s3://bucket/run?token=secret"])
@pytest.mark.parametrize("key", ["folder", "initial_load_path"])
def test_credentials_in_a_url_are_refused_unseen(key: str, url: str) -> None:
    with pytest.raises(ConfigError, match=key) as error:
        load_config(["--checkpoint.enable", f"--checkpoint.{key}={url}"])
    assert "secret" not in str(error.value)
