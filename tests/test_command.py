"""`torchtitan VERB`: each verb leads to a command, and a mistake costs no import of torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import torchtitan
from torchtitan.tools.command import VERBS

ROOT = Path(__file__).parent.parent
NO_TORCH = "import sys; sys.modules['torch'] = None; from torchtitan.tools.command import run; "


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
    [(["evalute"], "evaluate"), (["train"], "debug_model"), (["config", "--a.b"], "a.b")],
)
def test_a_mistake_is_one_message_with_code_2(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_number_of_ranks_is_one_or_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in ("0", "-1", "two", "²"):
        monkeypatch.setenv("NGPU", ranks)
        done = run("train", "debug_model")
        assert done.returncode == 2
        assert "NGPU" in done.stderr
        assert ranks in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_verb_may_have_no_output(closed: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m torchtitan"
    tokenizer = f"tokenizer {tmp_path}/t --vocab_size 300 {__file__}"
    for verb, code in ((tokenizer, 0), ("config", 0), ("", 0), ("report nowhere", 2)):
        words = f"{command} {verb} {closed}"
        done = subprocess.run(words, shell=True, cwd=ROOT, stderr=subprocess.PIPE, check=False)
        assert done.returncode == code, verb
        assert b"Traceback" not in done.stderr
    assert (tmp_path / "t" / "tokenizer.json").is_file()


HELP = """
import sys
sys.modules["torch"] = None
from torchtitan.tools.command import main
for words in sys.argv[1:]:
    print(f"=== {words}")
    try:
        code = main([*words.split(), "--help"])
    except SystemExit as end:
        code = end.code
    assert not code, (words, code)
"""


def test_help_needs_no_torch() -> None:
    given = [*VERBS, "convert to-hf", "convert from-hf", "plan layout"]
    done = subprocess.run(
        [sys.executable, "-c", HELP, *given], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for words, text in zip(given, done.stdout.split("=== ")[1:], strict=True):
        assert f"torchtitan {words}" in text or f"torchtitan.{words}" in text


def test_versions_are_the_same_in_all_files() -> None:
    def read(name: str, pattern: str) -> list[str]:
        return re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)

    assert read("CITATION.cff", r"^version: (.*)$") == [torchtitan.__version__]
    ruff = read(".pre-commit-config.yaml", r"^ +rev: v(.*)$")
    assert read("scripts/constraints.txt", r"^ruff==(.*)$") == ruff
    for workflow in (ROOT / ".github").rglob("*.yml"):
        assert yaml.safe_load(workflow.read_text())["name"]
