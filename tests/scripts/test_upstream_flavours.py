"""Which of torchtitan's integration tests are refused here; all others are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.upstream_flavours import FLAVOURS, options, prepare
from torchtitan.tools.config import main
from torchtitan.tools.plan.command import main as plan

REFUSED = {
    "2d_asynctp_compile": "enable_async_tensor_parallel",
    "cpu_offload+opt_in_bwd+TP+DP+CP": "early_step_in_backward",
    "float8_emulation": "enable_fsdp_float8_all_gather",
    "deepseek_v3_pp+fsdp+tp+ep+etp": "expert_tensor_parallel_degree",
    "qwen3_fsdp+tp+ep+etp": "expert_tensor_parallel_degree",
    "llama4_pp+fsdp+tp+ep+compile": "model.name",
    "gpt_oss_fsdp+tp+ep+compile": "model.name",
}


@pytest.mark.long
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `config`, which checks what a start would, but for files and folders."""
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert len(FLAVOURS) == 52
    refused = {}
    for name, (ranks, *commands) in FLAVOURS.items():
        for command in commands:
            script, _, rest = command.partition(" ")
            job = ["--job.config_file=base.toml", f"--world_size={ranks}"]
            if script == "estimate":
                assert plan(["memory", *job, *options(rest)]) == 0
            elif script != "generate" and main([*job, *options(command)]):
                refused[name] = capsys.readouterr().err
    assert refused.keys() == REFUSED.keys()
    assert all(key in refused[name] for name, key in REFUSED.items())
