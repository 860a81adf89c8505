"""Runs that the code before the third house saved: resumed, and started from.

The processor's instructions are pinned (`scripts/golden/ranks.py`), so x86-64 machines with the
torch and libc of the record get its bits. Elsewhere `goldens.py` compares figures to 1e-5.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import goldens
from scripts.golden.jobs import DENSE, EXPERTS, FIXTURES
from tests.checkpoint.test_first_house import check_resumed, check_start
from tests.distributed.rank_pool import RankPool

RUNS = goldens.ROOT / FIXTURES / "second_house"


@pytest.mark.timeout(600)
def test_they_are_resumed_bit_for_bit() -> None:
    """In the layout that saved them, and two ranks as one; the record is the whole run's."""
    check_resumed("second_house", num_jobs=5)


@pytest.mark.parametrize(("run", "settings"), [("dense", DENSE), ("experts", EXPERTS)])
def test_two_ranks_start_from_the_weights_of_one(
    run: str, settings: str, ranks: RankPool, tmp_path: Path
) -> None:
    check_start(RUNS / run, settings, ranks, tmp_path, world=2, data="documents.jsonl")
