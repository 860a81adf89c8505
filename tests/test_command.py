"""`torchtitan VERB`: each verb leads to a command, and a mistake costs no import of torch."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from torchtitan.__main__ import VERBS, main

ROOT = Path(__file__).parent.parent
NO_TORCH = "import sys; sys.modules['torch'] = None; from torchtitan.__main__ import run; "


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where importing torch would fail."""
    script = f"{NO_TORCH}sys.argv[1:] = {list(arguments)}; run()"
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_verbs_are_listed_without_torch() -> None:
    for arguments in ([], ["--help"]):
        done = run(*arguments)
        assert done.returncode == 0, done.stderr
        listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
        assert listed == [*VERBS]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["evalute"], "evaluate"), (["train"], "--job.config_file"), (["config", "--a.b"], "a.b")],
)
def test_a_mistake_is_one_message_with_code_2(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "train"])
def test_a_verb_takes_arguments_and_tells_about_itself(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [parameter] = inspect.signature(import_module(VERBS[verb][0]).main).parameters.values()
    assert parameter.name in ("argv", "arguments")
    try:
        code = main([verb, "--help"])
    except SystemExit as end:  # argparse
        code = end.code
    assert code in (0, None)
    assert f"torchtitan {verb}" in capsys.readouterr().out
