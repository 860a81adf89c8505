"""Recover, continue, finetune: what each takes from a checkpoint, and what each refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.naming import naming
from torchtitan.checkpoint.checksums import read_manifest, seal, write_bytes
from torchtitan.checkpoint.state import model_tensors, optimizer_tensors
from torchtitan.checkpoint.storage import find_steps
from torchtitan.trainer import Run, Trainer

CONTINUE = "--checkpoint.mode=continue"
FINETUNE = "--checkpoint.mode=finetune"
EVERYTHING = "--checkpoint.initial_load_model_only=false"
WAYS_ON = ("checkpoint/step-4", "checkpoint.mode continue", "job.dump_folder")


def excluding(*names: str) -> str:
    return f"--checkpoint.exclude_from_loading={json.dumps(names)}"


def elsewhere(path: Path) -> str:
    return f"--checkpoint.initial_load_path={path}"


@dataclass(frozen=True)
class Beginning:
    """A run as it stands before a step."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    step: int
    tokens_seen: int
    position: int
    rng: Tensor


def begin(job: list[str]) -> Beginning:
    return standing(jobs.start(job))


def standing(run: Run) -> Beginning:
    return Beginning(
        model={n: jobs.full(t) for n, t in model_tensors(run.model).items()},
        optimizer={n: jobs.full(t) for n, t in optimizer_tensors(run.model, run.optimizer).items()},
        step=run.progress.step,
        tokens_seen=run.progress.tokens_seen,
        position=run.loader.position,
        rng=torch.get_rng_state(),
    )


def equal(a: dict[str, Tensor], b: dict[str, Tensor], *, but: str = "nothing") -> bool:
    return all(torch.equal(a[n], b[n]) != n.startswith(but) for n in a) and a.keys() == b.keys()


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 4 steps, which no test writes to."""
    folder = tmp_path_factory.mktemp("saved")
    job = [*jobs.write_job(folder), "--training.steps=4", "--checkpoint.last_save_model_only=true"]
    ranks.run(jobs.train, job, world=1)
    return folder / "run"


def copy_of(saved: Path, folder: Path) -> list[str]:
    """Return the arguments of a job whose folder holds what the saved run left."""
    shutil.copytree(saved, folder / "run")
    return jobs.write_job(folder, cache=saved.parent / "cache")


@pytest.fixture(scope="module")
def whole(saved: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    """What that run left, all of it."""
    [found] = ranks.run(begin, copy_of(saved, tmp_path_factory.mktemp("whole")), world=1)
    assert isinstance(found, Beginning)
    return found


@pytest.fixture(scope="module")
def fresh(saved: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    """The beginning of a run that has nothing to load."""
    job = jobs.write_job(tmp_path_factory.mktemp("fresh"), cache=saved.parent / "cache")
    [found] = ranks.run(begin, job, world=1)
    assert isinstance(found, Beginning)
    return found


@pytest.mark.promise("intentions")
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--optimizer.lr=0.5"], ["\n  optimizer.lr: stored 0.0008, now 0.5\n", *WAYS_ON]),
        (["--debug.seed=7"], ["debug.seed: stored 0, now 7"]),
        (["--lr_scheduler.total_steps=40"], ["lr_scheduler.total_steps: stored 20, now 40"]),
        (["--training.global_batch_size=16"], ["training.global_batch_size: stored 8, now 16"]),
        (
            ["--training.global_batch_size=-1"],
            ["training.global_batch_size: stored 8, now 2 (2 on each of 1 ranks)"],
        ),
        ([CONTINUE, excluding("train_state")], ["restarts at step 0", "job.dump_folder"]),
    ],
)
def test_another_training_is_refused_with_both_values_and_the_ways_on(
    options: list[str], parts: list[str], saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    job = copy_of(saved, tmp_path)
    [message] = ranks.run(jobs.refusal, [*job, *options], world=1)
    assert all(part in message for part in parts), message


@pytest.mark.slow
def test_the_batch_that_ranks_make_is_compared(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Nothing in the settings differs, but twice the ranks make twice the batch."""
    cache = saved.parent / "cache"
    job = [*jobs.write_job(tmp_path, cache=cache), "--training.global_batch_size=-1"]
    ranks.run(jobs.train, [*job, "--training.steps=1"], world=2)
    for message in ranks.run(jobs.refusal, job, world=4):
        assert naming("training.global_batch_size", 4, 8, 2).match(message)
    half = [*job, "--training.local_batch_size=1"]
    assert ranks.run(jobs.refusal, half, world=4) == ["no error"] * 4


def test_the_checkpoint_is_asked_and_not_the_last_start(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """A start that died before it saved leaves its settings, but no training."""
    job = copy_of(saved, tmp_path)
    toml = tmp_path / "run" / "config.toml"
    toml.write_text(toml.read_text().replace("lr = 0.0008", "lr = 0.5"))
    assert ranks.run(jobs.refusal, job, world=1) == ["no error"]


@pytest.mark.promise("one-run-per-folder")
def test_results_without_a_checkpoint_are_protected(ranks: RankPool, tmp_path: Path) -> None:
    job = [*jobs.write_job(tmp_path), "--training.steps=2", "--checkpoint.enable=false"]
    ranks.run(jobs.train, job, world=1)
    for more in ([], ["--checkpoint.enable=true"]):
        [message] = ranks.run(jobs.refusal, [*job, "--optimizer.lr=0.5", *more], world=1)
        assert naming("optimizer.lr", 0.0008, 0.5).match(message)
        assert "continue" not in message


def test_a_run_that_ended_before_its_first_step_may_be_started_anew(
    ranks: RankPool, tmp_path: Path
) -> None:
    job = jobs.write_job(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    (tmp_path / "run/config.toml").write_text("[optimizer]\nlr = 0.5\n")
    assert ranks.run(jobs.refusal, job, world=1) == ["no error"]


def first_rates(job: list[str]) -> list[float]:
    """Train one step; return the rate that the optimizer used in it."""
    run = jobs.start(job)
    used: list[float] = []
    correct = run.optimizer.step

    def step() -> None:
        used.extend(group["lr"] for group in run.optimizer.param_groups)
        correct()

    run.optimizer.step = step  # type: ignore[method-assign,assignment]
    Trainer(run).train()
    return used


@pytest.mark.promise("intentions", "learning-rate")
@pytest.mark.slow
def test_continue_takes_all_and_plans_the_rate_anew(
    saved: Path, whole: Beginning, ranks: RankPool, tmp_path: Path
) -> None:
    job = copy_of(saved, tmp_path)
    new = [*job, CONTINUE, "--optimizer.lr=0.01", "--lr_scheduler.warmup_steps=0"]
    [now] = ranks.run(begin, new, world=1)
    assert equal(now.model, whole.model)
    assert equal(now.optimizer, whole.optimizer)
    assert (now.step, now.tokens_seen, now.position) == (4, 4 * 8 * 32, 32)
    assert torch.equal(now.rng, whole.rng)
    [lines] = ranks.run(jobs.logged, new, world=1)
    # 5 of 5 warmup steps to 0.0008; 20 linear steps from 0.01 to 0 after the last, 4 of them done
    assert any(map(naming("optimizer.lr", 0.0008, 0.01).match, lines))
    rates = ranks.run(first_rates, [*new, "--training.steps=5"], world=1)
    assert set(rates[0]) == {0.008}


@pytest.mark.promise("partial-loading")
def test_a_continued_run_is_recovered_by_its_own_command(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """What is left out is left out once, not again at each restart."""
    job = [*copy_of(saved, tmp_path), CONTINUE, excluding("dataloader"), "--optimizer.lr=0.01"]
    [begun] = ranks.run(begin, job, world=1)
    assert (begun.step, begun.position) == (4, 0)
    ranks.run(jobs.train, [*job, "--training.steps=6"], world=1)
    [restarted] = ranks.run(begin, job, world=1)
    assert (restarted.step, restarted.position) == (6, 16)
    # the weights from which a run began need not be taken out of its settings
    [changed] = ranks.run(begin, [*job, elsewhere(tmp_path), "--optimizer.lr=0.02"], world=1)
    assert changed.step == 6


@pytest.mark.promise("partial-loading")
@pytest.mark.slow
def test_what_was_left_out_once_is_not_left_out_of_what_was_trained_since(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """A job that is continued once more, under yet other settings but the same exclusion."""
    job = [*copy_of(saved, tmp_path), CONTINUE, excluding("output.*", "dataloader")]
    [trained] = ranks.run(jobs.train, [*job, "--training.steps=6"], world=1)
    [again] = ranks.run(begin, [*job, "--optimizer.lr=0.01"], world=1)
    assert (again.step, again.position) == (6, 16)
    assert equal(again.model, trained.final)
    [other_data] = ranks.run(begin, [*job, "--training.seq_len=16"], world=1)
    assert (other_data.step, other_data.position) == (6, 0)
    assert equal(other_data.model, trained.final)
    only_head = [*job[:-1], excluding("output.*")]  # another wish, which holds
    [new_head] = ranks.run(begin, only_head, world=1)
    assert (new_head.step, new_head.position) == (6, 16)
    assert equal(new_head.model, trained.final, but="output.")


@pytest.mark.promise("intentions", "other-data")
def test_the_same_data_in_another_place_are_the_same(ranks: RankPool, tmp_path: Path) -> None:
    """What counts is their fingerprint, not their path."""
    (tmp_path / "a.txt").write_text("hello world " * 200)
    (tmp_path / "moved").mkdir()
    shutil.copy(tmp_path / "a.txt", tmp_path / "moved" / "a.txt")
    (tmp_path / "other.txt").write_text("hello there " * 200)
    job = [*jobs.write_job(tmp_path), "--training.dataset=files"]
    ranks.run(jobs.train, [*job, at(tmp_path / "a.txt"), "--training.steps=2"], world=1)
    [begun] = ranks.run(begin, [*job, at(tmp_path / "moved" / "a.txt")], world=1)
    assert begun.step == 2
    [message] = ranks.run(jobs.refusal, [*job, at(tmp_path / "other.txt")], world=1)
    assert naming("data", "job.dump_folder").match(message)


def at(path: Path) -> str:
    return f"--training.dataset_path={path}"


@pytest.mark.promise("intentions")
@pytest.mark.parametrize("override", ["--training.seq_len=16", "--training.dataset=synthetic"])
def test_a_position_in_other_data_cannot_be_kept(
    override: str, saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    job = [*copy_of(saved, tmp_path), CONTINUE, override]
    [message] = ranks.run(jobs.refusal, job, world=1)
    assert 'exclude_from_loading = ["dataloader"]' in message
    assert override.rpartition(".")[2].split("=")[0] in message or "masked labels" in message
    [begun] = ranks.run(begin, [*job, excluding("dataloader")], world=1)
    assert (begun.step, begun.position) == (4, 0)


COMPONENTS = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")


def begin_and_log(job: list[str]) -> tuple[Beginning, list[str]]:
    with jobs.listening() as lines:
        return begin(job), lines


@pytest.mark.promise("partial-loading")
@pytest.mark.parametrize("left_out", COMPONENTS)
def test_each_component_can_be_left_out(
    left_out: str,
    saved: Path,
    whole: Beginning,
    fresh: Beginning,
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    job = [*jobs.write_job(tmp_path, cache=saved.parent / "cache"), elsewhere(saved)]
    job += [CONTINUE, EVERYTHING, excluding(left_out), "--optimizer.lr=0.01"]
    [(part, _lines)] = ranks.run(begin_and_log, job, world=1)
    expected = {name: fresh if name == left_out else whole for name in COMPONENTS}
    # the rate is a function of the settings: what is left out is the comparison with the old plan
    assert equal(part.model, expected["model"].model)
    assert equal(part.optimizer, expected["optimizer"].optimizer)
    assert part.position == expected["dataloader"].position
    assert part.step == expected["train_state"].step
    assert part.tokens_seen == expected["train_state"].tokens_seen
    assert not equal(whole.model, fresh.model)


@pytest.mark.promise("intentions")
@pytest.mark.parametrize(
    ("mode", "place"),
    [
        (FINETUNE, ""),
        (FINETUNE, "checkpoint/export"),
        ("--checkpoint.mode=recover", "checkpoint"),
        ("--checkpoint.mode=recover", "checkpoint/step-4"),
    ],
)
def test_finetune_takes_the_weights_alone(
    mode: str,
    place: str,
    saved: Path,
    whole: Beginning,
    fresh: Beginning,
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    job = jobs.write_job(tmp_path, cache=saved.parent / "cache")
    [tuned] = ranks.run(
        begin, [*job, mode, elsewhere(saved / place), "--optimizer.lr=1e-5"], world=1
    )
    assert equal(tuned.model, whole.model)
    assert equal(tuned.optimizer, fresh.optimizer)
    assert (tuned.step, tuned.tokens_seen, tuned.position) == (0, 0, 0)
    assert torch.equal(tuned.rng, fresh.rng)


def test_a_complete_draft_is_finished_in_the_own_folder_alone(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Another run may be alive, and about to rename it."""
    job = copy_of(saved, tmp_path)
    folder = tmp_path / "run" / "checkpoint"
    (folder / "step-4").rename(folder / ".step-4.tmp")
    other = jobs.write_job(tmp_path, name="tuned", cache=saved.parent / "cache")
    [message] = ranks.run(jobs.refusal, [*other, FINETUNE, elsewhere(tmp_path / "run")], world=1)
    assert str(tmp_path / "run") in message
    assert (folder / ".step-4.tmp").is_dir()
    assert [b.step for b in ranks.run(begin, job, world=1)] == [4]
    assert find_steps(folder) == [4]


@pytest.mark.promise("intentions")
def test_an_own_checkpoint_comes_before_the_path(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    cache = saved.parent / "cache"
    job = [*jobs.write_job(tmp_path, cache=cache), FINETUNE, elsewhere(saved)]
    job += [excluding("output.*"), "--optimizer.lr=0.01"]
    ranks.run(jobs.train, [*job, "--training.steps=2"], world=1)
    [lines] = ranks.run(jobs.logged, job, world=1)
    assert any(line.startswith("checkpoint.initial_load_path is not read") for line in lines)
    [trained] = ranks.run(jobs.train, [*job, "--training.steps=2"], world=1)
    [again] = ranks.run(begin, job, world=1)
    assert (again.step, again.position) == (2, 16)
    assert equal(again.model, trained.final)  # the new head too


@pytest.mark.promise("intentions")
def test_recover_from_elsewhere_holds_the_settings_too(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    cache = saved.parent / "cache"
    job = [*jobs.write_job(tmp_path, name="fork", cache=cache), elsewhere(saved), EVERYTHING]
    [message] = ranks.run(jobs.refusal, [*job, "--optimizer.lr=0.5"], world=1)
    assert naming("optimizer.lr", 0.0008, 0.5).match(message)
    [forked] = ranks.run(begin, job, world=1)
    assert (forked.step, forked.position) == (4, 32)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ([CONTINUE], ["checkpoint.mode", "continue", "has none"]),
        (
            [FINETUNE, elsewhere(Path("nowhere"))],
            ["nowhere holds no"],
        ),
        ([FINETUNE, elsewhere(Path("tests"))], ["tests holds no"]),
        ([CONTINUE, elsewhere(Path("tests"))], ["initial_load_model_only", '"finetune"']),
    ],
)
def test_a_source_that_is_not_there(
    options: list[str], parts: list[str], ranks: RankPool, tmp_path: Path
) -> None:
    for message in ranks.run(jobs.refusal, [*jobs.write_job(tmp_path), *options], world=2):
        assert all(part in message for part in parts)


def test_the_export_is_no_full_checkpoint_and_says_so(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path), elsewhere(saved / "checkpoint" / "export"), EVERYTHING]
    [message] = ranks.run(jobs.refusal, job, world=1)
    assert "optimizer, lr_scheduler, dataloader, train_state" in message
    assert "initial_load_model_only = true" in message


@pytest.mark.promise("learning-rate")
@pytest.mark.slow
def test_the_last_checkpoint_is_full_and_a_finished_run_goes_on(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """The curve of the rate is pinned: to the last digit that of one long run."""
    folder = saved / "checkpoint"
    assert find_steps(folder) == find_steps(folder / "export") == [4]
    assert read_manifest(folder / "export" / "step-4")["components"] == ["model"]
    job = [*copy_of(saved, tmp_path), "--checkpoint.last_save_model_only=true"]
    [longer] = ranks.run(jobs.train, [*job, "--training.steps=8"], world=1)
    whole = [*jobs.write_job(tmp_path, name="whole"), "--training.steps=8"]
    [through] = ranks.run(jobs.train, whole, world=1)
    assert [r["lr"] for r in longer.rows] == [r["lr"] for r in through.rows]
    assert longer.state_hash == through.state_hash
    assert find_steps(tmp_path / "run" / "checkpoint" / "export") == [4, 8]


@pytest.mark.promise("flipped-byte")
def test_damage_is_passed_over_unless_asked_for(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    job = copy_of(saved, tmp_path)
    ranks.run(jobs.train, [*job, "--training.steps=6"], world=1)
    damaged = tmp_path / "run" / "checkpoint" / "step-6"
    [file] = (damaged / "model").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert [b.step for b in ranks.run(begin, job, world=1)] == [4]
    named = [elsewhere(damaged), f"--job.dump_folder={tmp_path / 'other'}"]
    [message] = ranks.run(jobs.refusal, [*job, *named], world=1)
    assert naming(damaged, file.relative_to(damaged)).match(message)
    unverified = "--checkpoint.verify_on_load=false"
    assert [b.step for b in ranks.run(begin, [*job, unverified], world=1)] == [6]


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("manifest.json", "layout", {"dp_shard": "x"}),
        ("manifest.json", "layout", {"warp": 2}),
        ("train_state/state.json", "step", "x"),
        ("dataloader/state.json", "position", None),
    ],
)
def test_values_of_another_kind_are_refused_by_name(
    file: str, key: str, value: object, saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    job = copy_of(saved, tmp_path)
    path = tmp_path / "run" / "checkpoint" / "step-4" / file
    content = {**json.loads(path.read_text()), key: value}
    content.pop("checksum", None)
    write_bytes(path, seal(content))
    [message] = ranks.run(jobs.refusal, [*job, "--checkpoint.verify_on_load=false"], world=1)
    assert naming(path.name, key, value).match(message)


@pytest.mark.parametrize("verify", ["true", "false"])
def test_a_step_under_the_name_of_another_is_refused(
    verify: str, saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """It would train from another step than all that looks at names believes."""
    job = [*copy_of(saved, tmp_path), f"--checkpoint.verify_on_load={verify}"]
    folder = tmp_path / "run" / "checkpoint"
    (folder / "step-4").rename(folder / "step-40")
    elsewhere_too = elsewhere(folder / "step-40"), f"--job.dump_folder={tmp_path / 'other'}"
    for options in ((), (FINETUNE, *elsewhere_too)):
        for message in ranks.run(jobs.refusal, [*job, *options], world=2):
            assert naming("step-40", "step 4").match(message)
    (folder / "step-40").rename(tmp_path / "best")  # a name that says no step
    named = [*job, elsewhere(tmp_path / "best")]
    assert ranks.run(jobs.refusal, named, world=1) == ["no error"]
