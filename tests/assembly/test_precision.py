"""In which type a job computes when the machine is to say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.models.fake_group import fake_group
from torchtitan.job import Config, load_config
from torchtitan.parallel import precision


def resolved(config: Config) -> tuple[Config, str]:
    training, reason = precision.resolve_precision(
        config.training, uses_float8=False, device_type="cpu"
    )
    return replace(config, training=training), reason


def settled(
    monkeypatch: pytest.MonkeyPatch, *options: str, has: bool, others_lacking: int = 0
) -> tuple[str, str]:
    """The type and the reason, on one of two ranks."""
    monkeypatch.setattr(precision, "has_bfloat16", lambda kind: has)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(others_lacking))
    with fake_group(rank=0, world_size=2):
        config, reason = resolved(load_config(options))
    return config.training.mixed_precision_param, reason


def test_bfloat16_where_all_devices_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled(monkeypatch, has=True)[0] == "bfloat16"


@pytest.mark.parametrize(
    ("has", "others", "ranks"), [(False, 1, "all"), (False, 0, "1 of 2"), (True, 1, "1 of 2")]
)
def test_one_rank_without_it_makes_all_compute_in_float32(
    has: bool, others: int, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, reason = settled(monkeypatch, has=has, others_lacking=others)
    assert kind == "float32"
    assert ranks in reason
