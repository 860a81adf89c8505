"""A process's place in the job."""

from __future__ import annotations

import pytest

from torchtitan.base.errors import ConfigError
from torchtitan.mesh.process_group import Launch, read_launch


def test_a_process_started_alone_is_rank_0_of_1() -> None:
    assert read_launch({}) == Launch(rank=0, local_rank=0, world_size=1)


def test_torchruns_variables() -> None:
    environ = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"}
    assert read_launch(environ) == Launch(rank=9, local_rank=1, world_size=16)


@pytest.mark.parametrize(
    "environ", [{"RANK": "0"}, {"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}]
)
def test_half_an_environment_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="must all be numbers, or all be unset"):
        read_launch(environ)
