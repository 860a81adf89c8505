"""The campaign's layouts, and its result for layouts that agree, differ and are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import expert_campaign
from torchtitan.tools.compare.compare_layouts import make_plans


@pytest.mark.parametrize("group", [n for n, g in expert_campaign.GROUPS.items() if g.options])
def test_no_layout_of_the_campaign_is_refused(group: str) -> None:
    options = expert_campaign.GROUPS[group].options
    layouts = expert_campaign.GROUPS[group].layouts
    common = [f"--job.config_file={expert_campaign.TOML}", "--model.num_layers=4", *options]
    common.append("--model.name=scripts.expert_campaign:STRONG.qwen3_moe")
    assert len(make_plans(["single", *layouts], common=common)) == 1 + len(layouts)


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.long
def test_a_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = expert_campaign.Group(layouts=("fsdp2,ep2", "fsdp2 --optimizer.weight_decay=0.5"))
    refused = expert_campaign.Group(options=("--model.num_experts=0",), layouts=("fsdp2",))
    monkeypatch.setattr(expert_campaign, "GROUPS", {"right": right, "refused": refused})
    options = ["--steps=1", "--float64", f"--json={tmp_path / 'a.json'}"]
    options.append(f"--training.dataset_cache={tmp_path / 'cache'}")
    assert expert_campaign.main(["qwen3_moe", *options]) == 1
    runs = json.loads((tmp_path / "a.json").read_text())
    assert [(run["verdict"], bool(run["why"])) for run in runs] == [
        ("reference", False),
        ("same", False),
        ("DIVERGES at step 1", True),
        ("FAILED", True),
    ]
    assert runs[1]["gradients"][0]["largest"] < 1e-12
