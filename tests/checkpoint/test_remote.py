"""Runs whose checkpoints lie in an object store: what is committed, kept, resumed from and refused.

The oracle is a run of the same job that saves to a folder: every state must be equal, bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint import stores
from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.naming import naming
from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.checkpoint import objects
from torchtitan.checkpoint.remote import RemoteCheckpoints
from torchtitan.checkpoint.remote import find_steps as find_stored
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.storage import find_steps
from torchtitan.job import load_config
from torchtitan.trainer import Trainer

URL = "s3://bucket/run"
ALONE = "faulty://bucket/run"


@pytest.fixture(scope="module")
def server() -> Iterator[stores.S3Server]:
    with stores.s3_server("bucket") as server:
        yield server


def with_environ(
    environ: Mapping[str, str],
    own_disks: bool,
    function: Callable[[list[str]], Any],
    job: list[str],
) -> Any:
    """Run a job's function on a rank that finds the server; with `own_disks` in a folder that no
    other rank sees."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        if own_disks:
            job = [*job, f"--job.dump_folder={_folder_of(job)}-{dist.get_rank()}"]
        with jobs.listening() as lines:
            return function(job), lines


def train(job: list[str]) -> str:
    """Run a job to its end; return the hash of its state."""
    run = jobs.start(job)
    trainer = Trainer(run)
    trainer.train()
    trainer.close()
    return jobs.hash_state(run)


def _folder_of(job: list[str]) -> str:
    return next(word for word in job if word.startswith("--job.dump_folder=")).partition("=")[2]


class Runs:
    """Runs jobs whose checkpoints lie in the server's bucket."""

    def __init__(self, ranks: RankPool, server: stores.S3Server, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self.environ = stores.environ_of(server.port)

    def job(self, steps: int, *words: str, name: str = "run") -> list[str]:
        job = jobs.write_job(self._folder, name=name)
        job += ["--checkpoint.interval=2", f"--training.steps={steps}"]
        return [*job, *(f"--checkpoint.{word}" for word in words)]

    def run(self, *words: str, steps: int, world: int = 1, own_disks: bool = False) -> Any:
        """Train; return the last state's hash, and what rank 0 logged."""
        job = self.job(steps, f"folder={URL}", *words)
        results = self._ranks.run(with_environ, self.environ, own_disks, train, job, world=world)
        return results[0]

    def undisturbed(self, *, steps: int, world: int = 1) -> str:
        job = self.job(steps, name="undisturbed")
        return self._ranks.run(jobs.train, job, world=world)[0].state_hash


@pytest.fixture
def runs(ranks: RankPool, server: stores.S3Server, tmp_path: Path) -> Runs:
    store = open_store()
    store.remove(store.list_sizes(""))  # of the test before
    return Runs(ranks, server, tmp_path)


def open_store(url: str = URL) -> objects.ObjectStore:
    return objects.ObjectStore(url, key="checkpoint.folder", patience_seconds=5)


@pytest.mark.parametrize(
    ("world", "own_disks", "mode"),
    [(1, False, "disabled"), (2, False, "async"), (2, True, "disabled")],
)
def test_a_run_resumes_from_the_store_alone(
    world: int, own_disks: bool, mode: str, runs: Runs, tmp_path: Path
) -> None:
    mode = f"async_mode={mode}"
    _, lines = runs.run(mode, "keep_latest_k=2", steps=5, world=world, own_disks=own_disks)
    assert [line for line in lines if line.startswith("Uploaded")][-1].startswith(
        f"Uploaded {URL}/step-5: "
    )
    store = open_store()
    assert find_stored(store) == [4, 5]
    assert not store.list_sizes("step-2")
    names = [f"run-{rank}" for rank in range(world)] if own_disks else ["run"]
    folders = [tmp_path / name for name in names]
    for folder in folders:
        assert find_steps(folder / "checkpoint") == [5]
        shutil.rmtree(folder)
    state, lines = runs.run(mode, steps=8, world=world, own_disks=own_disks)
    assert any(line.startswith(f"Fetching {URL}/step-5 into") for line in lines)
    assert state == runs.undisturbed(steps=8, world=world)


def test_the_last_step_is_exported_to_the_store(runs: Runs, tmp_path: Path) -> None:
    runs.run("last_save_in_hf=true", steps=2, world=2)
    folder = tmp_path / "run" / "checkpoint" / "export" / "step-2"
    store = open_store()
    assert "config.json" in os.listdir(folder)
    for path in folder.iterdir():
        assert store.read(f"export/step-2/{path.name}") == path.read_bytes()


def test_a_restart_fetches_only_what_the_disk_lost(runs: Runs, tmp_path: Path) -> None:
    runs.run(steps=4)
    _, lines = runs.run(steps=6)
    assert not any(line.startswith("Fetching") for line in lines)
    step = tmp_path / "run" / "checkpoint" / "step-6"
    (step / "optimizer" / "__0_0.distcp").write_bytes(b"damaged")
    (step / "model" / "__0_0.distcp").unlink()
    state, lines = runs.run(steps=8)
    assert any(line.startswith("Fetching") for line in lines)
    assert state == runs.undisturbed(steps=8)


@pytest.mark.parametrize(("world", "own_disks"), [(1, False), (2, True)])
def test_an_upload_that_did_not_end_is_ended(world: int, own_disks: bool, runs: Runs) -> None:
    runs.run(steps=4, world=world, own_disks=own_disks)
    store = open_store()
    store.remove(["step-4/manifest.json", "step-4/model/__0_0.distcp"])
    assert find_stored(store) == [2]
    state, lines = runs.run(steps=6, world=world, own_disks=own_disks)
    assert any(f"{URL}/step-4" in line for line in lines)
    [line] = [line for line in lines if line.startswith(f"Uploaded {URL}/step-4")]
    assert ": 1 of " in line
    assert find_stored(store) == [2, 4, 6]
    assert state == runs.undisturbed(steps=6, world=world)


def test_an_upload_that_nobody_can_end_is_removed(runs: Runs, tmp_path: Path) -> None:
    runs.run(steps=4)
    store = open_store()
    store.remove(["step-4/manifest.json"])
    shutil.rmtree(tmp_path / "run")
    state, lines = runs.run("interval=3", steps=6)
    assert any(line.startswith(f"Fetching {URL}/step-2") for line in lines)
    assert store.list_sizes("step-4") == {}
    assert find_stored(store) == [2, 3, 6]
    assert state == runs.undisturbed(steps=6)


def test_a_damaged_step_is_passed_over_and_set_aside(runs: Runs, tmp_path: Path) -> None:
    runs.run(steps=4)
    store = open_store()
    content = store.read("step-4/model/__0_0.distcp")
    assert content is not None
    store.write("step-4/model/__0_0.distcp", content[:-1] + b"x")
    shutil.rmtree(tmp_path / "run")
    _, lines = runs.run("interval=3", steps=3)
    assert any("step-4" in line and "damaged" in line for line in lines)
    assert find_stored(store) == [2, 3]
    assert store.size("step-4/manifest.json.aside")
    runs.run("interval=3", steps=3)
    assert find_stored(store) == [2, 3]


def test_a_run_starts_from_another_in_a_store(runs: Runs, ranks: RankPool, tmp_path: Path) -> None:
    through, _ = runs.run(steps=6)
    (tmp_path / "other").mkdir()
    for url, words in ((f"{URL}/step-4", ()), (URL, ("load_step=4",))):
        words = (f"initial_load_path={url}", "initial_load_model_only=false", *words)
        job = runs.job(6, *words, name="other")
        [(state, _)] = ranks.run(with_environ, runs.environ, False, train, job, world=1)
        assert state == through
        shutil.rmtree(tmp_path / "other")


def test_two_runs_do_not_share_a_store(runs: Runs, ranks: RankPool) -> None:
    job = runs.job(4, f"folder={URL}")
    [(message, _)] = ranks.run(with_environ, runs.environ, False, taken_over, job, world=1)
    assert naming("process 7", "elsewhere").match(message)


def taken_over(job: list[str]) -> str:
    """Run a job whose store another process takes after its first save."""
    push, sent = RemoteCheckpoints.push, []

    def push_and_lose(self: RemoteCheckpoints, name: str) -> None:
        push(self, name)
        if not sent:
            open_store().write(".owner", b"abc process 7 on host elsewhere")
        sent.append(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteCheckpoints, "push", push_and_lose)
        return jobs.failure(job)


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


def refused_apart(store: str, job: list[str]) -> str:
    """Start a job on a rank with disks of its own; `store` is a folder on one of them."""
    rank = dist.get_rank()
    words = [f"--checkpoint.folder=file://{store}-{rank}"] if store else []
    return jobs.refusal([*job, *words, f"--job.dump_folder={_folder_of(job)}-{rank}"])


@pytest.mark.parametrize("has_store", [True, False])
def test_ranks_that_do_not_share_a_place_are_refused(
    has_store: bool, ranks: RankPool, tmp_path: Path
) -> None:
    store, job = str(tmp_path / "store") if has_store else "", jobs.write_job(tmp_path)
    for message in ranks.run(refused_apart, store, job, world=2):
        assert "checkpoint.folder" in message
        assert str(tmp_path) in message


def commit_as_files_come(folder: Path) -> list[list[int]]:
    """Commit a step without its file, with a part of it, and with all of it; return the steps that
    the store then has."""
    manifest = json.dumps({"files": {"a": {"size": 3, "xxh3_128": "0" * 32}}}).encode()
    found = []
    with stores.faulty_store():
        store, how = open_store(ALONE), {"settings": CheckpointConfig(), "key": "folder"}
        remote = RemoteCheckpoints(ALONE, folder=folder, group=dist.group.WORLD, **how)
        remote.pull_newest()
        for content in (None, b"ab", b"abc"):
            if content is not None:
                store.write("step-1/a", content)
            if content == b"abc":
                remote._commit("step-1", manifest)
            else:
                with pytest.raises(CheckpointError, match=naming("step-1", "a")):
                    remote._commit("step-1", manifest)
            found.append(find_stored(store))
    return found


def test_what_is_not_there_is_not_committed(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(commit_as_files_come, tmp_path, world=1) == [[[], [], [1]]]


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/run", "s3://bucket/run?token=secret"])
@pytest.mark.parametrize("key", ["folder", "initial_load_path"])
def test_credentials_in_a_url_are_refused_unseen(key: str, url: str) -> None:
    with pytest.raises(ConfigError, match=key) as error:
        load_config(["--checkpoint.enable", f"--checkpoint.{key}={url}"])
    assert "secret" not in str(error.value)
