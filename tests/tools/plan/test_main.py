"""The command: its text, its pictures, its refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from torchtitan.parallel.pipeline.schedules import compute_table
from torchtitan.tools.plan import command
from torchtitan.tools.plan.command import main
from torchtitan.tools.plan.schedule import Costs, draw, simulate

ZBV = ["--schedule", "ZBVZeroBubble", "--pp", "4", "--stages", "8", "--microbatches", "8"]


def run(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> tuple[int, str, str]:
    code = main(["schedule", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_text_of_a_small_pipeline() -> None:
    table = compute_table("1F1B", pp=2, stages_per_rank=1, num_microbatches=2)
    timeline = simulate(table, costs=Costs())
    assert draw(timeline, num_slots=9, width=100).splitlines() == [
        "rank 0  F0 F1 ......B0--- ...B1--- ",
        "rank 1  ...F0 B0--- F1 B1--- ......",
    ]
    # wide lines are broken: three slots of three characters behind the name of the rank
    assert draw(timeline, num_slots=9, width=17).split("\n\n")[0].splitlines() == [
        "rank 0  F0 F1 ...",
        "rank 1  ...F0 B0-",
    ]


def test_a_later_stage_in_small_letters() -> None:
    table = compute_table("ZBVZeroBubble", pp=1, stages_per_rank=2, num_microbatches=1)
    timeline = simulate(table, costs=Costs())
    assert draw(timeline, num_slots=6, width=80) == "rank 0  F0 f0 i0 w0 I0 W0 "


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, ZBV)
    assert code == 0
    assert (
        "ZBVZeroBubble, 4 ranks, 8 stages, 8 microbatches: bubble 6.2%, peak activations 4" in out
    )
    assert out.count("    48        3    6.25%") == 4
    dearer = run(capsys, [*ZBV, "--backward_input", "2", "--transfer", "0.5"])[1]
    assert "in all 51 " in out
    assert "in all 51 " not in dearer


@pytest.mark.parametrize(("name", "stages"), [("1F1B", 4), ("ZBVZeroBubble", 8)])
def test_the_usual_stages(name: str, stages: int, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--schedule", name, "--pp", "4", "--microbatches", "8"]
    assert run(capsys, arguments)[1].startswith(f"{name}, 4 ranks, {stages} stages, 8 micro")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["--schedule", "--microbatches", "--pp"]),
        (["--schedule", "ZBV", *ZBV[2:]], ["'ZBV'", "ZBVZeroBubble"]),
        ([*ZBV[:2], "--pp", "4", "--stages", "9", *ZBV[6:]], ["--stages", "got 9"]),
        ([*ZBV[:2], "--pp", "0", *ZBV[6:]], ["--pp", "0"]),
        ([*ZBV, "--forward", "0"], ["--forward", "got 0"]),
        ([*ZBV, "--transfer=-1"], ["--transfer", "got -1"]),
    ],
)
def test_refusals(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, arguments)
    assert (code, out) == (2, "")
    assert [part for part in parts if part not in err] == []


@pytest.mark.parametrize("name", ["gpus", "num_gpus", "nproc_per_node", "world-size"])
def test_a_name_of_another_program_leads_to_world_size(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", f"--{name}", "64"]) == 2
    error = capsys.readouterr().err
    assert f"--{name}" in error
    assert "--world_size" in error


@pytest.mark.parametrize("verb", [[], ["layout"]])
def test_help_needs_no_torch(verb: list[str]) -> None:
    code = (
        "import sys\nfrom torchtitan.tools.plan.command import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n"
        "    sys.exit(end.code or 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code, *verb, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--job.config_file" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_keeps_what_was_found(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)

    def answer(*_: object) -> Iterator[str]:
        yield "a row\n"
        os.kill(os.getpid(), number)
        yield "never"

    monkeypatch.setattr(command, "_answer", answer)
    with pytest.raises(SystemExit) as ended:
        main(["layout"])
    assert ended.value.code == 128 + number
    assert capsys.readouterr().out == "a row\n"
    assert signal.getsignal(number) == before
