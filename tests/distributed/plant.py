"""A plugin of pytest: the bug of mutants.py that PLANT names, in the tests and in their ranks."""

from __future__ import annotations

import os

from tests.distributed import rank_pool
from tests.distributed.mutants import MUTANTS

# ranks are copies of this process, with the bug
rank_pool.STARTED_BY, rank_pool.start_server = "fork", lambda: None
if name := os.environ["PLANT"]:
    planted = MUTANTS[name].planted()
    planted.__enter__()
