"""Names of other trainers: refused with the key to write here."""

from __future__ import annotations

import pytest

from tests.config.jobs import THEIRS, loaded
from torchtitan.config.schema import keys
from torchtitan.config.unknown import read_answers
from torchtitan.job import Config

assert THEIRS.other_trainers is not None
ANSWERS = read_answers(THEIRS.other_trainers)
KNOWN = {".".join(path) for path in keys(Config)}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_name_is_answered_with_or_without_a_section(name: str) -> None:
    answer = ANSWERS[name].partition(": ")[0]
    *section, last = name.split(".")
    texts = [f"[{'.'.join(section)}]\n{last} = 1" if section else f"{name} = 1"]
    texts += [] if section else [f"[hyperparameters]\n{name} = 1"]
    for text in texts:
        [mistake] = loaded(text).mistakes
        assert f"{last} = 1: " in mistake
        if answer in KNOWN:
            header, _, key = answer.rpartition(".")
            assert f"write [{header}] {key}" in mistake
        else:
            assert answer in mistake
    [mistake] = loaded("", f"--{name}=1").mistakes
    assert mistake.startswith(f"command line: --{name} 1: ")
    assert f"write --{answer}" in mistake or answer not in KNOWN


def test_most_name_a_key() -> None:
    named = [one for one in ANSWERS.values() if one.partition(": ")[0] in KNOWN]
    assert len(named) > 100
    # a misspelt key would be printed as a sentence
    assert all(" " in one for one in {*ANSWERS.values()} - {*named})


def test_dashes_are_read_as_underscores() -> None:
    [mistake] = loaded("", "--learning-rate=1e-4").mistakes
    assert "write --optimizer.lr" in mistake
