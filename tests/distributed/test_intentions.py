"""What a start takes from a checkpoint, and what it refuses: modes, components, patterns."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.naming import naming
from torchtitan.checkpoint.checksums import read_manifest
from torchtitan.checkpoint.state import model_tensors, optimizer_tensors
from torchtitan.checkpoint.storage import find_steps
from torchtitan.trainer import Run

CONTINUE = "--checkpoint.mode=continue"
FINETUNE = "--checkpoint.mode=finetune"
EVERYTHING = "--checkpoint.initial_load_model_only=false"
RATE = "--optimizer.lr=0.01"
LAYERS = "--model.num_layers="
ROWS = "--model.vocab_size=300"
MODEL_ONLY = {"optimizer", "dataloader", "train_state"}
"""What stays fresh."""


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


def job_for(saved: Path, folder: Path, source: str) -> list[str]:
    """Return the arguments of a job that starts from what the saved run left: in its own folder, or
    at a path below the run's."""
    job = jobs.write_job(folder, cache=saved.parent / "cache")
    if source == "own":
        shutil.copytree(saved, folder / "run")
        return job
    return job if source == "nothing" else [*job, elsewhere(saved / source)]


@pytest.fixture(scope="module")
def whole(saved: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    """What that run left, all of it."""
    job = job_for(saved, tmp_path_factory.mktemp("whole"), "own")
    [found] = ranks.run(begin, job, world=1)
    assert isinstance(found, Beginning)
    return found


@pytest.fixture(scope="module")
def fresh(saved: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    """The beginning of a run that has nothing to load."""
    job = job_for(saved, tmp_path_factory.mktemp("fresh"), "nothing")
    [found] = ranks.run(begin, job, world=1)
    assert isinstance(found, Beginning)
    return found


# --- components

# where from, how, and what stays fresh
TAKES: dict[str, tuple[str, tuple[str, ...], set[str]]] = {
    "recover": ("own", (), set()),
    "recover from elsewhere": ("", (EVERYTHING,), set()),
    "continue": ("own", (CONTINUE, RATE, "--lr_scheduler.warmup_steps=0"), set()),
    "continue with other data": (
        "own",
        (CONTINUE, "--training.seq_len=16", excluding("dataloader")),
        {"dataloader"},
    ),
    **{
        f"continue without {name}": ("", (CONTINUE, EVERYTHING, excluding(name), RATE), {name})
        for name in ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
    },
    "finetune": ("", (FINETUNE, RATE), MODEL_ONLY),
    "finetune from an export": ("checkpoint/export", (FINETUNE,), MODEL_ONLY),
    "weights of a folder": ("checkpoint", (RATE,), MODEL_ONLY),
    "weights of a step": ("checkpoint/step-4", (RATE,), MODEL_ONLY),
}


@pytest.mark.promise("intentions", "partial-loading")
@pytest.mark.parametrize("name", TAKES)
def test_a_start_takes(
    name: str, saved: Path, whole: Beginning, fresh: Beginning, ranks: RankPool, tmp_path: Path
) -> None:
    source, options, left_out = TAKES[name]
    [now] = ranks.run(begin, [*job_for(saved, tmp_path, source), *options], world=1)
    parts = ("model", "optimizer", "dataloader", "train_state")
    wanted = {part: fresh if part in left_out else whole for part in parts}
    assert equal(now.model, wanted["model"].model)
    assert equal(now.optimizer, wanted["optimizer"].optimizer)
    assert now.position == wanted["dataloader"].position
    assert now.step == wanted["train_state"].step
    assert now.tokens_seen == wanted["train_state"].tokens_seen
    if left_out in (set(), MODEL_ONLY):
        assert torch.equal(now.rng, wanted["train_state"].rng)
    assert (whole.step, whole.tokens_seen, whole.position) == (4, 4 * 8 * 32, 32)
    assert not equal(whole.model, fresh.model)


REFUSED: list[tuple[str, tuple[str, ...], tuple[object, ...]]] = [
    (
        "own",
        ("--optimizer.lr=0.5",),
        ("optimizer.lr", 0.0008, 0.5, "checkpoint/step-4", "continue", "job.dump_folder"),
    ),
    ("", (EVERYTHING, "--optimizer.lr=0.5"), ("optimizer.lr", 0.0008, 0.5)),
    ("own", ("--debug.seed=7",), ("debug.seed", 0, 7)),
    ("own", ("--training.global_batch_size=-1",), ("training.global_batch_size", 8, 4)),
    ("own", (CONTINUE, excluding("train_state")), ("step 0", "job.dump_folder")),
    ("own", (CONTINUE, "--training.seq_len=16"), ('["dataloader"]', "seq_len")),
    ("own", (CONTINUE, "--training.dataset=synthetic"), ('["dataloader"]', "masked labels")),
    ("checkpoint/export", (EVERYTHING,), ("optimizer", "initial_load_model_only = true")),
    ("", (FINETUNE, LAYERS + "3"), (30, "9 missing", "'layers.2.attention.wk.weight'")),
    ("", (FINETUNE, ROWS, LAYERS + "1"), ("9 unexpected", "2 of", "[263, 32]", "[300, 32]")),
    ("", (FINETUNE, "--training.dtype=bfloat16"), (21, "torch.float32", "torch.bfloat16")),
    ("", (CONTINUE, EVERYTHING, "--optimizer.name=SGD"), ("unexpected", "exclude_from_loading")),
    ("", (FINETUNE, excluding("outptu.*", "norm.*")), ("exclude_from_loading", "'outptu.*'")),
    ("nothing", (CONTINUE,), ("checkpoint.mode", "continue")),
    ("nothing", (FINETUNE, elsewhere(Path("nowhere"))), ("nowhere",)),
    ("nothing", (CONTINUE, elsewhere(Path("tests"))), ("initial_load_model_only",)),
]


@pytest.mark.promise("intentions", "mistakes", "other-data")
@pytest.mark.slow(gate=["own-options0-values0", "own-options5-values5"])
@pytest.mark.parametrize(("source", "options", "values"), REFUSED)
def test_a_start_refuses(
    source: str,
    options: tuple[str, ...],
    values: tuple[object, ...],
    saved: Path,
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    for message in ranks.run(jobs.refusal, [*job_for(saved, tmp_path, source), *options], world=2):
        assert naming(*values).match(message), message


# sizes and how, patterns of weights with their state, patterns of state alone
PATTERNS: dict[str, tuple[tuple[str, ...], list[str], list[str]]] = {
    "a new head": ((ROWS,), ["output.*", "tok_*"], []),
    "fewer layers": ((LAYERS + "1",), ["layers.1.*"], []),
    "more layers": ((LAYERS + "3",), ["layers.2.*"], []),
    "weights": ((), ["*norm.weight"], []),
    "state": ((), [], ["optimizer.norm.*"]),
    "adapters": (("--lora.rank=2", "--lora.modules=*.wq"), ["*.lora_?"], []),
}


@pytest.mark.promise("partial-loading")
@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_leaves_out(
    name: str, saved: Path, whole: Beginning, ranks: RankPool, tmp_path: Path
) -> None:
    """A parameter with its optimizer state, or state alone; all else is loaded, on two ranks."""
    sizes, weights, states = PATTERNS[name]
    (tmp_path / "new").mkdir()
    new = [*job_for(saved, tmp_path / "new", "nothing"), *sizes]
    [initial] = ranks.run(begin, new, world=1)
    job = [*job_for(saved, tmp_path, ""), *sizes, CONTINUE, EVERYTHING]
    now = ranks.run(begin, [*job, excluding(*weights, *states)], world=2)[0]

    def left_out(name: str, patterns: list[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    for parameter, value in now.model.items():
        is_new = left_out(parameter, weights) or parameter not in whole.model
        assert value.equal((initial if is_new else whole).model[parameter]), parameter
    for key, value in now.optimizer.items():
        parameter = key.rpartition(".")[0]
        is_new = left_out(parameter, weights) or left_out(f"optimizer.{parameter}", states)
        is_new = is_new or key not in whole.optimizer
        assert not value.any() if is_new else value.equal(whole.optimizer[key]), key
    assert now.step == 4


# --- one start after another


@pytest.mark.promise("learning-rate")
@pytest.mark.slow
def test_continue_plans_the_rate_anew(saved: Path, ranks: RankPool, tmp_path: Path) -> None:
    """20 linear steps from 0.01 to 0 after the last, 4 of them done."""
    job = [*job_for(saved, tmp_path, "own"), CONTINUE, RATE, "--lr_scheduler.warmup_steps=0"]
    [result] = ranks.run(jobs.train, [*job, "--training.steps=5"], world=1)
    assert result.rows[-1]["lr"] == 0.008


@pytest.mark.promise("partial-loading")
@pytest.mark.slow
def test_what_is_left_out_is_left_out_once(saved: Path, ranks: RankPool, tmp_path: Path) -> None:
    job = [*job_for(saved, tmp_path, "own"), CONTINUE, RATE, excluding("output.*", "dataloader")]
    [begun] = ranks.run(begin, job, world=1)
    assert (begun.step, begun.position) == (4, 0)
    [trained] = ranks.run(jobs.train, [*job, "--training.steps=6"], world=1)
    for options in ((), ("--optimizer.lr=0.02",)):  # a restart; other settings, the same exclusion
        [again] = ranks.run(begin, [*job, *options], world=1)
        assert (again.step, again.position) == (6, 16)
        assert equal(again.model, trained.final)
    [new_head] = ranks.run(begin, [*job[:-1], excluding("output.*")], world=1)  # another wish
    assert equal(new_head.model, trained.final, but="output.")


@pytest.mark.promise("intentions", "other-data")
def test_the_same_data_in_another_place_are_the_same(ranks: RankPool, tmp_path: Path) -> None:
    """What counts is their fingerprint, not their path."""
    paths = [tmp_path / name for name in ("a.txt", "moved.txt", "other.txt")]
    for path, word in zip(paths, ("world", "world", "there"), strict=True):
        path.write_text(f"hello {word} " * 200)
    job = [*jobs.write_job(tmp_path), "--training.dataset=files"]
    first, moved, other = ([*job, f"--training.dataset_path={path}"] for path in paths)
    ranks.run(jobs.train, [*first, "--training.steps=2"], world=1)
    [begun] = ranks.run(begin, moved, world=1)
    assert begun.step == 2
    [message] = ranks.run(jobs.refusal, other, world=1)
    assert naming("data", "job.dump_folder").match(message)


@pytest.mark.promise("one-run-per-folder")
def test_results_without_a_checkpoint_are_protected(ranks: RankPool, tmp_path: Path) -> None:
    job = [*jobs.write_job(tmp_path), "--training.steps=2", "--checkpoint.enable=false"]
    ranks.run(jobs.train, job, world=1)
    for more in ([], ["--checkpoint.enable=true"]):
        [message] = ranks.run(jobs.refusal, [*job, "--optimizer.lr=0.5", *more], world=1)
        assert naming("optimizer.lr", 0.0008, 0.5).match(message)


def test_the_checkpoint_is_asked_and_not_the_last_start(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """A start that died before it saved leaves its settings, but no training."""
    job = job_for(saved, tmp_path, "own")
    toml = tmp_path / "run" / "config.toml"
    toml.write_text(toml.read_text().replace("lr = 0.0008", "lr = 0.5"))
    assert ranks.run(jobs.refusal, job, world=1) == ["no error"]


@pytest.mark.promise("intentions")
def test_an_own_checkpoint_comes_before_the_path(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    job = [*job_for(saved, tmp_path, ""), FINETUNE, excluding("output.*"), RATE]
    [trained] = ranks.run(jobs.train, [*job, "--training.steps=2"], world=1)
    [again] = ranks.run(begin, job, world=1)
    assert (again.step, again.position) == (2, 16)
    assert equal(again.model, trained.final)  # the new head too


@pytest.mark.promise("learning-rate")
@pytest.mark.slow
def test_the_last_checkpoint_is_full_and_a_finished_run_goes_on(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """The curve of the rate is pinned: to the last digit that of one long run."""
    folder = saved / "checkpoint"
    assert find_steps(folder) == find_steps(folder / "export") == [4]
    assert read_manifest(folder / "export" / "step-4")["components"] == ["model"]
    job = [*job_for(saved, tmp_path, "own"), "--training.steps=8"]
    [longer] = ranks.run(jobs.train, job, world=1)
    job = [*jobs.write_job(tmp_path, name="whole"), "--training.steps=8"]
    [through] = ranks.run(jobs.train, job, world=1)
    assert [r["lr"] for r in longer.rows] == [r["lr"] for r in through.rows]
    assert longer.state_hash == through.state_hash


@pytest.mark.promise("flipped-byte")
def test_damage_is_passed_over_unless_asked_for(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    job = job_for(saved, tmp_path, "own")
    ranks.run(jobs.train, [*job, "--training.steps=6"], world=1)
    damaged = tmp_path / "run" / "checkpoint" / "step-6"
    [file] = (damaged / "model").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert [b.step for b in ranks.run(begin, job, world=1)] == [4]
    for source in (damaged, damaged / "model"):
        other = [*job, elsewhere(source), f"--job.dump_folder={tmp_path / 'other'}"]
        [message] = ranks.run(jobs.refusal, other, world=1)
        assert naming(damaged, file.relative_to(damaged)).match(message)
    unverified = "--checkpoint.verify_on_load=false"
    assert [b.step for b in ranks.run(begin, [*job, unverified], world=1)] == [6]


def test_a_step_under_the_name_of_another_is_refused(
    saved: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """It would train from another step than all that looks at names believes."""
    job = [*job_for(saved, tmp_path, "own"), "--checkpoint.verify_on_load=false"]
    folder = tmp_path / "run" / "checkpoint"
    (folder / "step-4").rename(folder / "step-40")
    other = (FINETUNE, elsewhere(folder / "step-40"), f"--job.dump_folder={tmp_path / 'other'}")
    for options in ((), other):
        for message in ranks.run(jobs.refusal, [*job, *options], world=2):
            assert naming("step-40", "step 4").match(message)
