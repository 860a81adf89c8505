"""Text streamed by `datasets`, from files of this machine: the samples of the same text in a store,
in its order, and exact resume."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.helpers import SEQ_LEN, dataset_of, loader_of, rows, training
from tests.naming import naming
from torchtitan.base.errors import ConfigError
from torchtitan.data.custom import build_custom
from torchtitan.data.hub import HubText
from torchtitan.data.loader import MapSamples
from torchtitan.data.tokenizer import ByteTokenizer


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Of which some rows have an empty text."""
    draw = random.Random(0)
    for name in ("a", "b"):
        lines = [json.dumps({"text": "x" * draw.randrange(-20, 80)}) for _ in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [str(tmp_path / f"{name}.jsonl") for name in ("a", "b")]


def stream(tmp_path: Path, **settings: Any) -> MapSamples:
    return build_custom(
        training(
            tmp_path / "cache", dataset="torchtitan.data.hub:HubText", dataset_options=settings
        ),
        tokenizer=ByteTokenizer(),
        seed=0,
        held_out=False,
    )


@pytest.mark.promise("streams")
def test_its_samples_are_those_of_the_text(tmp_path: Path, files: list[str]) -> None:
    stored = dataset_of(tmp_path, dataset_path=files).sources[0]
    streamed = stream(tmp_path, name="json", data_files=tuple(files))
    for i in range(stored.num_samples):
        for key, ids in streamed[i].items():
            assert torch.equal(ids, stored[i][key])
    again = streamed[stored.num_samples]  # of the next pass, behind what is left of this one
    assert len(again["tokens"]) == SEQ_LEN


@pytest.mark.promise("streams")
@pytest.mark.parametrize("before", [1, 7, 20])
def test_it_goes_on_exactly_on_other_ranks(before: int, tmp_path: Path, files: list[str]) -> None:
    settings = {"name": "json", "data_files": tuple(files)}
    straight = loader_of(stream(tmp_path, **settings), batch=4)
    expected = [rows(next(straight)) for _ in range(before + 3)]
    first = loader_of(stream(tmp_path, **settings), batch=2, rank=1, degree=2)
    for _ in range(before):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    then = loader_of(stream(tmp_path, **settings), batch=4)
    then.load_state_dict(state)
    assert [rows(next(then)) for _ in range(3)] == expected[before:]


def hub_text(files: list[str]) -> HubText:
    fixed = {"tokenizer": ByteTokenizer(), "seq_len": SEQ_LEN, "seed": 0, "held_out": False}
    return HubText(**fixed, name="json", data_files=tuple(files))  # type: ignore[arg-type]


def test_a_release_that_resumes_wrongly_is_refused(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.__version__", "5.0.0")
    with pytest.raises(ConfigError, match=naming("dataset_options", "5.0.0")):
        hub_text(files)
