"""Weights into a model that is not quite the one they came from: by pattern, and never silently."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.jobs import refusal
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_intentions import (
    CONTINUE,
    EVERYTHING,
    FINETUNE,
    Beginning,
    begin,
    elsewhere,
    excluding,
)
from tests.jobs import frozen, pipeline
from tests.naming import naming

pytestmark = pytest.mark.slow

IN_A_LAYER = 9
LAYERS = "--model.num_layers="


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 3 steps."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(jobs.train, [*jobs.write_job(folder), "--training.steps=3"], world=2)
    return folder / "run"


@pytest.fixture(scope="module")
def old(saved: Path, ranks: RankPool) -> Beginning:
    """What that run left."""
    [found] = ranks.run(begin, [*jobs.write_job(saved.parent)], world=1)
    assert isinstance(found, Beginning)
    return found


@pytest.fixture
def job(saved: Path, tmp_path: Path) -> list[str]:
    """A job that begins with the weights of that run, in a folder of its own."""
    return [*jobs.write_job(tmp_path, cache=saved.parent / "cache"), FINETUNE, elsewhere(saved)]


@pytest.mark.promise("mistakes")
@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        (
            [LAYERS + "3"],
            ["30 tensors", "9 missing: 'layers.2.attention.wk.weight'; ", " ..."],
        ),
        (
            ["--model.vocab_size=300", LAYERS + "1"],
            [
                "9 unexpected: 'layers.1.attention.wk.weight'; ",
                "2 of another shape or type: 'output.weight' has shape [263, 32], not [300, 32]; "
                "'tok_embeddings.weight' has shape [263, 32], not [300, 32]\n",
            ],
        ),
    ],
)
def test_every_name_that_does_not_fit_is_counted_in_one_message(
    sizes: list[str], parts: list[str], job: list[str], ranks: RankPool
) -> None:
    for message in ranks.run(refusal, [*job, *sizes], world=2):
        assert all(part in message for part in parts), message
        assert "checkpoint.exclude_from_loading" in message


def test_another_type_is_named(job: list[str], ranks: RankPool) -> None:
    [message] = ranks.run(refusal, [*job, "--training.dtype=bfloat16"], world=1)
    name = "'layers.0.attention.wk.weight'"
    assert naming(21, name, "torch.float32", "torch.bfloat16").match(message)


def test_an_optimizer_of_another_kind_is_left_out_by_name(job: list[str], ranks: RankPool) -> None:
    sgd = [*job, CONTINUE, EVERYTHING, "--optimizer.name=SGD", "--optimizer.momentum=0.9"]
    [message] = ranks.run(refusal, sgd, world=1)
    assert "21 missing: " in message
    assert "unexpected: " in message
    assert "checkpoint.exclude_from_loading" in message
    [begun] = ranks.run(begin, [*sgd, excluding("optimizer")], world=1)
    assert begun.step == 3


@pytest.mark.promise("partial-loading")
def test_a_new_head_by_pattern(old: Beginning, job: list[str], ranks: RankPool) -> None:
    larger = "--model.vocab_size=300"
    fresh_job = [argument for argument in job if "initial_load_path" not in argument][:-1]
    [fresh] = ranks.run(begin, [*fresh_job, larger], world=1)
    by_pattern = [*job, larger, excluding("output.*", "tok_*")]
    for begun in ranks.run(begin, by_pattern, world=2):
        for name, value in begun.model.items():
            replaced = name in ("output.weight", "tok_embeddings.weight")
            assert value.equal((fresh if replaced else old).model[name]), name


@pytest.mark.promise("partial-loading")
@pytest.mark.parametrize("num_layers", [1, 3])
def test_more_or_fewer_layers_by_pattern(
    num_layers: int, old: Beginning, job: list[str], ranks: RankPool
) -> None:
    """A pattern leaves out a parameter with its optimizer state, here or there."""
    part = [*job, CONTINUE, EVERYTHING, excluding(f"layers.{min(num_layers, 2)}.*")]
    [begun] = ranks.run(begin, [*part, f"{LAYERS}{num_layers}"], world=1)
    common = begun.model.keys() & old.model.keys()
    assert len(common) == 3 + IN_A_LAYER * min(num_layers, 2)
    assert len(begun.model) == 3 + IN_A_LAYER * num_layers
    assert all(begun.model[name].equal(old.model[name]) for name in common)
    for name, value in begun.optimizer.items():
        assert value.equal(old.optimizer[name]) if name in old.optimizer else not value.any()
    assert begun.step == 3


@pytest.mark.promise("partial-loading")
@pytest.mark.parametrize("pattern", ["*norm.weight", "optimizer.norm.*"])
def test_a_pattern_excludes_weights_with_their_state_or_state_alone(
    pattern: str, old: Beginning, job: list[str], ranks: RankPool
) -> None:
    part = [*job, CONTINUE, EVERYTHING, excluding(pattern)]
    begun = ranks.run(begin, part, world=2)[0]
    dropped = {name for name in old.model if fnmatchcase(name, pattern)}
    left_out = dropped or {"norm.weight"}
    for name, value in begun.model.items():
        assert value.equal(old.model[name]) == (name not in dropped)
    for name, value in begun.optimizer.items():
        is_left_out = name.rpartition(".")[0] in left_out
        assert not value.any() if is_left_out else value.equal(old.optimizer[name])


ADAPT = ("--lora.rank=2", "--lora.modules=*.wq", excluding("*.lora_?"))


@pytest.mark.promise("partial-loading")
@pytest.mark.parametrize(
    ("then", "now", "num_fresh", "num_unread"),
    [
        ((frozen("[!o]*"),), (frozen("output.*"),), 20, 1),
        ((), ADAPT, 4, 21),
    ],
    ids=["others", "adapters"],
)
def test_a_continued_run_may_train_other_parameters(
    then: tuple[str, ...],
    now: tuple[str, ...],
    num_fresh: int,
    num_unread: int,
    saved: Path,
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    """State of both is kept, other state is fresh."""
    cache = saved.parent / "cache"
    first = [*jobs.write_job(tmp_path, cache=cache), *then, "--training.steps=1"]
    ranks.run(jobs.train, first, world=1)
    [old] = ranks.run(begin, first, world=1)
    job = [*jobs.write_job(tmp_path, name="new", cache=cache), *now]
    job += [CONTINUE, EVERYTHING, elsewhere(tmp_path / "run")]
    begun = ranks.run(begin, job, world=2)[0]
    assert all(begun.model[name].equal(value) for name, value in old.model.items())
    before, after = ({n.rpartition(".")[0] for n in x.optimizer} for x in (old, begun))
    assert (len(after - before), len(before - after)) == (num_fresh, num_unread)
    for name, value in begun.optimizer.items():
        assert value.equal(old.optimizer[name]) if name in old.optimizer else not value.any()


@pytest.mark.promise("partial-loading")
@pytest.mark.parametrize("layout", [(), pipeline("1F1B")], ids=["fsdp 2", "pp 2"])
def test_a_pattern_counts_on_all_ranks_together(
    layout: tuple[str, ...], job: list[str], ranks: RankPool
) -> None:
    job += layout
    for message in ranks.run(refusal, [*job, excluding("outptu.*", "norm.*")], world=2):
        assert naming("checkpoint.exclude_from_loading", "'outptu.*'", "optimizer").match(message)
    for message in ranks.run(refusal, [*job, LAYERS + "3"], world=2):
        assert "9 missing: 'layers.2.attention.wk.weight'" in message
