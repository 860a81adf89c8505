"""Bounds of a step against sums done by hand, and what the commands say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.tools.plan.jobs import planned, recorded
from tests.tools.plan.test_traffic import BLOCK, EMBEDDING, FP32, HEAD, KV, B, C, F, H, L, S, V
from torchtitan.parallel.pipeline.schedules import compute_table
from torchtitan.tools.plan.command import main
from torchtitan.tools.plan.devices import DEVICES, Share
from torchtitan.tools.plan.rehearse import rehearse
from torchtitan.tools.plan.schedule import Costs, simulate
from torchtitan.tools.plan.step import EXPOSED, time_step
from torchtitan.tools.plan.tape import Entry, Piece, Record

pytestmark = pytest.mark.slow

DEVICE = replace(
    DEVICES["H100"],
    products=Share(worst=0.6, best=0.85),
    attention=Share(worst=0.3, best=0.55),
    passes=Share(worst=0.6, best=0.9),
    launch=Share(worst=10e-6, best=4e-6),
)
MULTIPLIED = L * (2 * C * C + 2 * C * (C // H * KV) + 3 * C * F) + V * C


def products(record: Record, *, of_attention: bool) -> int:
    return sum(
        entry.size
        for entry in record.entries
        if entry.event == "product" and ("attention" in entry.where[0]) == of_attention
    )


def test_products_are_those_of_the_convention() -> None:
    """6 per weight and token; causal attention is half of 12 H D S, and its backward
    multiplies the scores once more."""
    record = recorded()
    assert products(record, of_attention=False) == 6 * MULTIPLIED * B * S
    assert products(record, of_attention=True) == B * L * (2 + 5) * C * S * S


def test_ranks_share_the_products() -> None:
    for name in ("tensor", "context"):
        setting = f"--parallelism.{name}_parallel_degree=2"
        record = recorded(setting, world=2)
        assert products(record, of_attention=False) == 6 * MULTIPLIED * B * S / 2


def test_full_recomputation_multiplies_blocks_once_more() -> None:
    record = recorded("--activation_checkpoint.mode=full")
    in_blocks = MULTIPLIED - V * C
    left_out = L * C * F  # a block's last product is not needed again
    expected = 6 * MULTIPLIED + 2 * (in_blocks - left_out)
    assert products(record, of_attention=False) == expected * B * S


def test_each_resource_by_hand(tmp_path: Path) -> None:
    """A record made up: each time is a size over a peak, and the shares bound it."""
    job = replace(planned(tmp_path, world=4), device=DEVICE)
    device = DEVICE
    entries = [
        Entry("product", 10**15, ("aten::mm", "", "128x64 64x192")),
        Entry("product", 10**12, ("aten::flash_attention", "", "")),
        Entry("pass", 10**9, ("aten::mul", "")),
        Entry("message", 10**9, ("fsdp", "allgather_base", "")),
        Entry("message", 10**9, ("tp", "all_reduce", "")),
    ]
    found = time_step(job, [Record(entries, [Piece(0, "forward", 0)])])
    filled = 192 / 256  # the second tile is half empty
    products = 1e15 / device.flops / filled
    assert found.resources["products"] == pytest.approx((products / 0.6, products / 0.85))
    attention = 1e12 / device.flops
    assert found.resources["attention"] == pytest.approx((attention / 0.3, attention / 0.55))
    passes = 1e9 / device.bandwidth
    assert found.resources["passes"] == pytest.approx((passes / 0.6, passes / 0.9))
    # fsdp over two machines of two: half of the tensor through two adapters
    gather = 1e9 / 2 / 2 / device.network
    expected = gather / 0.5 + 30e-6, gather / 0.85 + 8e-6
    assert found.resources["overlapped"] == pytest.approx(expected)
    assert found.resources["waits"] == (0.0, 0.0)  # tp has one rank here
    assert found.resources["host"] == pytest.approx((5 * 10e-6, 5 * 4e-6))
    in_turn = [
        sum(found.resources[name][n] for name in ("products", "attention", "passes"))
        for n in (0, 1)
    ]
    assert found.worst == pytest.approx(in_turn[0] + expected[0] * EXPOSED)
    assert found.best == pytest.approx(max(in_turn[1], expected[1]))
    assert found.binds == "products"
    assert found.mfu[1] == pytest.approx(100 * job.model_flops / found.best / device.flops / 4)


@pytest.mark.parametrize(("world", "waits"), [(1, True), (4, False)])
def test_offloading_by_hand(world: int, waits: bool, tmp_path: Path) -> None:
    """Both directions at once beside computing, at best; unsharded, computing waits for weights.
    The update's passes go over the host's memory, and so does what the host adds up."""
    job = planned(tmp_path, "--training.enable_cpu_offload", world=world)
    device = replace(DEVICE, links=Share(worst=0.1, best=0.1))  # those between GPUs
    entries = [
        Entry("product", 10**12, ("aten::mm", "", "128x64 64x128")),
        Entry("copy", 4 * 10**9, ("to device", "")),
        Entry("copy", 10**9, ("to host", "")),
        Entry("pass", 10**9, ("aten::add_", ""), pool="host"),
        Entry("pass", 10**9, ("aten::_fused_adamw_", "")),
    ]
    record = Record(entries, [Piece(0, "forward", 0), Piece(4, "update", None)])
    found = time_step(replace(job, device=device), [record])
    on_host = 1e9 / 10e9, 1e9 / 75e9
    assert found.resources["offload"] == pytest.approx([2 * time for time in on_host])
    assert found.resources["passes"] == (0.0, 0.0)
    to_device, to_host = ([n * 1e9 / 64e9 / share for share in (0.5, 0.85)] for n in (4, 1))
    assert found.resources["to device"] == pytest.approx(to_device)
    assert found.resources["to host"] == pytest.approx(to_host)
    product = [1e12 / device.flops / share for share in (0.6, 0.85)]
    worst = product[0] + to_device[0] + to_host[0] + 2 * on_host[0]
    assert found.worst == pytest.approx(worst)
    if waits:
        forward = product[1] + on_host[1] + to_device[1]
    else:
        forward = max(product[1] + on_host[1], to_device[1], to_host[1])
    assert found.best == pytest.approx(forward + on_host[1])


REPLICATED = ("--parallelism.data_parallel_replicate_degree=2",)
UNSHARDED = (*REPLICATED, "--parallelism.data_parallel_shard_degree=1")
TWICE = "--training.global_batch_size"


@pytest.mark.parametrize(
    ("world", "settings", "sharded", "times_to_host"),
    [
        (4, REPLICATED, 2, 1),
        (1, ("--training.mixed_precision_param=float32",), 1, 1),
        # three accumulated: each one's gradients leave, but with copies of weights the sum
        (1, (f"{TWICE}={3 * B}",), 1, 3),
        (4, (f"{TWICE}={3 * 4 * B}",), 4, 3),
        (2, (*UNSHARDED, f"{TWICE}={3 * 2 * B}"), 1, 1),
    ],
)
def test_offloaded_copies(
    world: int, settings: Sequence[str], sharded: int, times_to_host: int, tmp_path: Path
) -> None:
    """A rank's part of the weights comes for each forward, and for each backward but for the
    embedding, the last block and the head; that of the gradients leaves. All is float32."""
    arguments = ("--training.enable_cpu_offload", *settings)
    job, record = planned(tmp_path, *arguments, world=world), recorded(*arguments, world=world)
    found = time_step(job, [record])
    blocks = [FP32 * n / sharded for n in (EMBEDDING, HEAD, BLOCK)]
    forward = blocks[0] + blocks[1] + L * blocks[2]
    backward = (L - 1) * blocks[2]
    rate = job.device.to_host * 0.5
    times = job.layout.accumulation
    assert found.resources["to device"][0] == pytest.approx(times * (forward + backward) / rate)
    assert found.resources["to host"][0] == pytest.approx(times_to_host * forward / rate)
    added = sum(e.size for e in record.entries if e.event == "pass" and e.pool == "host")
    updates = (7 + 2) * forward  # clipping too; the norm alone only reads
    added_up = (job.shortened.layout.accumulation - 1) * 3 * forward if times_to_host > 1 else 0
    assert added == pytest.approx(updates + added_up, rel=0.01)


def test_nothing_is_copied_without_offloading(tmp_path: Path) -> None:
    job = planned(tmp_path, world=1)
    record = recorded()
    assert {e.pool for e in record.entries if e.event in ("copy", "pass")} == {"compute"}
    found = time_step(job, [record])
    for name in ("to device", "to host", "offload"):
        assert found.resources[name] == (0.0, 0.0)


def test_the_bubble_is_the_schedules(tmp_path: Path) -> None:
    """1F1B over p ranks and m microbatches idles (p-1)/m of what a rank computes."""
    settings = [
        "--parallelism.pipeline_parallel_degree=2",
        "--training.local_batch_size=16",
        "--parallelism.pipeline_parallel_schedule=1F1B",
    ]
    job = planned(tmp_path, *settings, world=2)
    assert job.shortened.layout.pipeline is not None
    num = len(job.shortened.layout.pipeline.table[0]) // 2
    assert num < 16  # fewer are rehearsed, and multiplied
    assert job.shortened.microbatches == 16 / num
    records = [
        rehearse(job.shortened.config, layout=job.shortened.layout, rank=rank) for rank in (0, 1)
    ]
    found = time_step(job, records)
    table = compute_table("1F1B", pp=2, stages_per_rank=1, num_microbatches=16)
    timeline = simulate(table, costs=Costs())
    share = found.resources["bubble"][1] / (found.best - found.resources["bubble"][1])
    assert share == pytest.approx(timeline.total_bubble, rel=0.05)  # the update has none


STAGES = pytest.param(
    ["--parallelism.pipeline_parallel_degree=2"],
    12,
    marks=pytest.mark.skipif(
        TorchVersion(torch.__version__) < (2, 12), reason="it warms up by a message"
    ),
)


@pytest.mark.parametrize(("settings", "batch"), [([], 24), STAGES])
def test_fewer_microbatches_have_the_peak_and_the_counts_of_all(
    settings: Sequence[str], batch: int, tmp_path: Path
) -> None:
    """The same job, of three accumulation steps, rehearsed as it is."""
    from torchtitan.tools.plan.account import replay
    from torchtitan.tools.plan.traffic import count_traffic

    accumulated = (f"--training.global_batch_size={batch}", "--training.local_batch_size=4")
    job = planned(tmp_path, *settings, *accumulated, world=2)
    short = job.shortened
    assert short.microbatches > 1
    whole = replace(job, shortened=replace(short, layout=job.layout, microbatches=1.0, passes=1.0))
    few = rehearse(short.config, layout=short.layout, rank=0)
    every = rehearse(job.config, layout=job.layout, rank=0)
    peaks = [replay(record).active for record in (few, every)]
    # the batches themselves are all there from the beginning: tokens and labels, int64
    assert 0 <= peaks[1] - peaks[0] <= job.layout.accumulation * 2 * 4 * S * 8
    rows = count_traffic(job, few, by_module=False), count_traffic(whole, every, by_module=False)
    for counted, expected in zip(*rows, strict=True):
        assert (counted.axis, counted.collective) == (expected.axis, expected.collective)
        assert (counted.calls, counted.size) == pytest.approx((expected.calls, expected.size))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["--optimizer.name=Muon"], "[optimizer] name"),
        (
            ["--compile.enable", "--activation_checkpoint.mode=memory_budget"],
            "[activation_checkpoint] mode",
        ),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(
    settings: Sequence[str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tmp_path, world=1)  # writes the file
    job = ["--world_size=4", f"--job.config_file={tmp_path / 'job.toml'}", *settings]
    assert main(["memory", *job]) == 2
    assert key in capsys.readouterr().err


@pytest.mark.parametrize("command", ["memory", "traffic", "step"])
def test_commands(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, world=2)  # writes the file
    is_staged = command == "memory"  # ranks of a pipeline have processes of their own
    code = main(
        [
            *(command, "--world_size=4"),
            f"--job.config_file={tmp_path / 'job.toml'}",
            f"--parallelism.pipeline_parallel_degree={1 + is_staged}",
        ]
    )
    out = capsys.readouterr().out
    assert code == 0
    dims = "pp 2 x dp_shard 2" if is_staged else "dp_shard 4"
    assert f"llama3 tiny8 on 4 x H100: {dims}; 8 x 64 tokens per rank" in out
    expected = {
        "memory": ["fits: H100 has 79.1 GiB", "pp 0", "pp 1", "optimizer", "2 GiB"],
        "traffic": ["GiB of a rank in a step", "reduce-scatter", "fsdp"],
        "step": ["what binds: host", "overlapped"],
    }[command]
    assert [text for text in expected if text not in out] == []


def test_a_job_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path)  # writes the file
    job = [f"--job.config_file={tmp_path / 'job.toml'}", "--training.loss_chunks=1"]
    job += ["--model.num_layers=1", "--world_size=1", "--memory_gib=2"]
    assert main(["memory", *job]) == 0
    text = capsys.readouterr().out
    assert "DOES NOT FIT: H100 has 2.0 GiB" in text
    assert "no layout of 1 x H100 with 8 samples per step fits" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world_size=0"], "got 0"),
        (["--world_size=4", "--device=H10"], "H10"),
        (["--world_size=3", "--parallelism.tensor_parallel_degree=2"], "tensor_parallel_degree"),
        (["--world_size=4", "--training.step=3"], "steps"),
    ],
)
def test_refusals(
    arguments: Sequence[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tmp_path, world=2)
    code = main(["memory", f"--job.config_file={tmp_path / 'job.toml'}", *arguments])
    assert code == 2
    assert message in capsys.readouterr().err
