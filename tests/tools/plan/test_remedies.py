"""A job that does not fit gets remedies, each with the memory that it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools.plan.jobs import planned
from tests.tools.plan.test_traffic import PP2
from torchtitan.base.device import GIB
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.command import main
from torchtitan.tools.plan.devices import ALLOWANCE
from torchtitan.tools.plan.records import rehearse_rank
from torchtitan.tools.plan.remedies import propose

LARGE = [
    *("--model.dim=1024", "--model.hidden_dim=2816", "--model.num_layers=8"),
    *("--model.vocab_size=1024", "--training.seq_len=1024", "--training.local_batch_size=4"),
]
"""Large enough that memory is more than small change."""
REMEDY = re.compile(r"^ +([\d.]+) +[\d.e-]+-[\d.e-]+  (yes|no) +(--.*)$", re.MULTILINE)


@pytest.mark.long
def test_a_remedy_needs_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, world=1)
    job = [
        "memory",
        "--world_size=4",
        "--gpus_per_node=4",
        f"--job.config_file={tmp_path}/job.toml",
    ]
    job += [*LARGE, PP2]
    assert main(job) == 0
    text = capsys.readouterr().out
    assert "fits: " in text
    assert not REMEDY.findall(text)
    reserved = re.search(r"reserved by torch +([\d.]+) GiB", text)
    assert reserved is not None
    small = f"--memory_gib={ALLOWANCE / GIB + 0.75 * float(reserved[1]):.3f}"
    assert main([*job, small]) == 0
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    remedies = REMEDY.findall(text)
    sizes = {fits: [size for size, said, _ in remedies if said == fits] for fits in ("yes", "no")}
    assert max(map(float, sizes["yes"])) <= min(map(float, sizes["no"] or ["inf"]))
    size, _, options = next(remedy for remedy in remedies if remedy[1] == "yes")
    assert main([*job, small, *options.split()]) == 0
    text = capsys.readouterr().out
    assert "fits: " in text
    needed = re.findall(r"([\d.]+) GiB", text[text.index("\nneeded") :].splitlines()[1])
    assert max(map(float, needed)) == pytest.approx(float(size), abs=0.06)


def test_remedies_lower_what_the_job_has(tmp_path: Path) -> None:
    """Settings that need least already are not proposed; the samples of a step are kept."""
    job = planned(
        tmp_path,
        *("--activation_checkpoint.mode=full", "--training.enable_cpu_offload"),
        *("--training.loss_chunks=4", "--parallelism.data_parallel_replicate_degree=2"),
        *("--parallelism.fsdp_reshard_after_forward=never", "--training.local_batch_size=6"),
        world=4,
    )
    shard = "--parallelism.data_parallel_shard_degree=-1"
    samples = "--training.global_batch_size=24"
    alone = [
        f"--training.local_batch_size=3 {samples}",
        "--parallelism.fsdp_reshard_after_forward=always",
        "--training.loss_chunks=16",
    ]
    assert [str(remedy) for remedy in propose(job)] == [
        *alone,
        " ".join(alone),
        f"--parallelism.tensor_parallel_degree=2 {shard} {samples}",
        f"--parallelism.data_parallel_replicate_degree=1 {shard} {samples}",
        f"--world_size=8 {shard}",
    ]


def test_experts_are_shared_by_more_ranks(tmp_path: Path) -> None:
    """Also where each rank has all of them; and that does lower the memory."""
    experts = ("--model.name=qwen3_moe", "--model.expert_hidden_dim=4096")
    degree = "--parallelism.expert_parallel_degree"
    for now in (1, 2):
        job = planned(tmp_path, *experts, f"{degree}={now}", world=8)
        said = [str(remedy) for remedy in propose(job)]
        assert [one.split()[0] for one in said if degree in one] == [f"{degree}={2 * now}"]
    assert not [one for one in propose(planned(tmp_path)) if degree in str(one)]
    needed = [
        replay(rehearse_rank(planned(tmp_path, *experts, f"{degree}={n}", world=4), 0)).needed
        for n in (1, 2)
    ]
    assert needed[1] < needed[0]
