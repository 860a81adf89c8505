"""Answers to the harness against its own class for `transformers`, on the same weights."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from tests.tools.evaluate.helpers import numbers_of, write_model, write_tasks
from torchtitan.base.errors import ConfigError, UserError
from torchtitan.tools.evaluate.harness import Adapter, find_tasks, run_tasks
from torchtitan.tools.evaluate.model import open_subject

NAMES = ("choose", "roll", "write")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "with begin token"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_model(folder, begins=request.param)


@pytest.fixture(scope="module")
def their_class() -> type[Any]:
    """It imports accelerate, which a model that is already built has no use for."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("accelerate") is None:
            stub = ModuleType("accelerate")
            names = ("Accelerator", "InitProcessGroupKwargs", "find_executable_batch_size")
            stub.__dict__.update(dict.fromkeys(names))
            utils = ModuleType("accelerate.utils")
            utils.__dict__.update(get_max_memory=None)
            patch.setitem(sys.modules, "accelerate", stub)
            patch.setitem(sys.modules, "accelerate.utils", utils)
        from lm_eval.models.huggingface import HFLM
    return HFLM


def ours(folder: Path, *, chats: bool = False, max_length: int = 64) -> Adapter:
    subject = open_subject(folder, device=torch.device("cpu"), chats=chats)
    options = {"first_id": subject.first_id, "max_length": max_length, "chats": chats}
    return Adapter(subject.generator, batch_size=3, **options)


def theirs(of: type[Any], model: tuple[Path, PreTrainedModel], *, max_length: int = 64) -> Any:
    folder, reference = model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return of(reference, tokenizer=tokenizer, max_length=max_length, batch_size=4)


def run(lm: Any, folder: Path, *, chats: bool = False, **settings: Any) -> dict[str, Any]:
    manager = find_tasks(NAMES, include_path=write_tasks(folder / "tasks"))
    given = {"num_fewshot": None, "limit": None, **settings}
    return run_tasks(lm, NAMES, task_manager=manager, apply_chat_template=chats, **given)


@pytest.mark.parametrize(
    "settings", [{}, {"num_fewshot": 1, "limit": 6}, {"chats": True, "num_fewshot": 1}]
)
@pytest.mark.long
def test_scores_are_those_of_transformers(model, their_class, tmp_path, settings):
    """Most texts with examples before them are longer than what the model is given."""
    chats = settings.get("chats", False)
    found = run(ours(model[0], chats=chats), tmp_path, **settings)
    expected = run(theirs(their_class, model), tmp_path, **settings)
    assert set(found) == set(NAMES)
    for name in NAMES:
        assert numbers_of(found[name]) == pytest.approx(numbers_of(expected[name]), rel=1e-4)
        assert numbers_of(found[name])
        assert found[name]["num_examples"] == settings.get("limit", 12)


class Request:
    """What a model is asked; the harness's own has more that says nothing here."""

    def __init__(self, *args: Any) -> None:
        self.args, self.task_name = args, "test"


def test_each_answer_is_that_of_transformers(model, their_class):
    """Not only means: empty contexts, spaces at the end, contexts that are too long, greedy ones,
    answers that share their question."""
    adapter, reference = ours(model[0], max_length=40), theirs(their_class, model, max_length=40)
    context = "the user and then the assistant says "
    [greedy] = reference.generate_until([Request(context, {"max_gen_toks": 2, "until": []})])
    answers = ("nothing more", " nothing more", " n", " z", greedy)
    pairs = [("", "the user"), (context * 9, "naïve \U0001f600 text")]
    requests = [Request(*pair) for pair in (*pairs, *((context, text) for text in answers))]
    found, expected = (lm.loglikelihood(requests) for lm in (adapter, reference))
    for (score, is_greedy), (their_score, theirs_is_greedy) in zip(found, expected, strict=True):
        assert score == pytest.approx(their_score, rel=1e-5)
        assert is_greedy == theirs_is_greedy
    texts = [Request(text) for text in ("x", context, context * 9)]
    rolled = [lm.loglikelihood_rolling(texts) for lm in (adapter, reference)]
    assert rolled[0] == pytest.approx(rolled[1], rel=1e-5)
    # until one of several texts, of one that is asked for twice
    asked = [
        Request(text, {"until": until, "max_gen_toks": 16, "do_sample": False})
        for text in ("a", context, context * 9)
        for until in ([], "e", ["q", "and", "z"])
    ]
    asked.append(asked[0])
    assert adapter.generate_until(asked) == reference.generate_until(asked)


@pytest.mark.parametrize(
    ("method", "args", "named"),
    [
        ("generate_until", ("a", {"max_gen_toks": 64}), "max_gen_toks 64"),
        ("generate_until", ("a", {"max_gen_toks": 4, "num_beams": 4}), "num_beams"),
        ("loglikelihood", ("a", "b" * 100), "--seq_len"),
        ("loglikelihood", ("a", ""), "got 0"),
    ],
)
def test_requests_that_are_refused(model, method, args, named):
    with pytest.raises(ConfigError, match=named):
        getattr(ours(model[0]), method)([Request(*args)])


def test_logits_that_are_no_numbers_are_refused(model):
    adapter = ours(model[0])
    with torch.no_grad():
        adapter._generator.model.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="--dtype float32"):
        adapter.loglikelihood([Request("a", "b")])
