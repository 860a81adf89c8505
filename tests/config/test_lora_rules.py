"""Settings of low-rank factors that nothing would read are refused."""

from __future__ import annotations

import pytest

from torchtitan.base.errors import ConfigError
from torchtitan.job import load_config

HF = ["--checkpoint.enable", "--checkpoint.last_save_in_hf"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lora.alpha=8.0"], "--lora.alpha 8.0: is of low-rank factors, and lora.rank = 0"),
        (["--lora.modules=layers.*"], "lora.rank = 0 makes none"),
        ([*HF, "--lora.save=adapter"], "lora.rank = 0 makes none"),
        (["--lora.rank=2", "--lora.save=adapter"], "which is off"),
        (["--lora.rank=-1"], "--lora.rank"),
    ],
)
def test_what_nothing_reads_is_refused(options: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(options)
    assert said in str(error.value)


def test_what_is_read_is_not() -> None:
    lora = load_config(["--lora.rank=2", "--lora.alpha=8", "--lora.save=adapter", *HF]).lora
    assert (lora.rank, lora.alpha, lora.save) == (2, 8.0, "adapter")
