"""Every command in a ```bash block of README.md and docs/ runs, in the order of its page.

They run in a folder for each page that links to the repository, so what they write is thrown away,
and with a home of their own, so that data is tokenised anew. Training commands get a small batch on
top, and few steps where they ask for none, for time's sake; a job for GPUs also gets a small model.
The README's first runs as a user's does; all others by a Python that has torch imported already,
which saves seconds for each process that they start. `run_tests.sh` is what runs this test, and is
left out. The worked changes of docs/extend.md are applied to a copy of the package and trained in
two layouts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.md"))
RUN = [PAGES[0], *(pytest.param(page, marks=pytest.mark.long) for page in PAGES[1:])]
SMALL = " --training.seq_len 32 --training.local_batch_size 2"
SMALL_MODEL = " --model.flavor debugmodel --model.vocab_size 8192"
FOR_GPUS = ("llama3_1b",)
NOT_RUN = ("./scripts/run_tests.sh", "source .venv")


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("   #")[0].strip() for line in lines if line.strip() and line[0] != "#"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    for name in (
        "torchtitan",
        "scripts",
        "examples",
        "train_configs",
        "run_train.sh",
        "pyproject.toml",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    write_command(tmp_path / "bin")
    return tmp_path


def write_command(folder: Path) -> None:
    """Write `torchtitan` as an installation does, for the Python and the package of the caller."""
    folder.mkdir()
    (folder / "torchtitan").write_text('#!/bin/sh\nexec python -m torchtitan "$@"\n')
    (folder / "torchtitan").chmod(0o755)


@pytest.mark.promise("readme")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_commands_run(page: Path, workplace: Path, home: Path, warm_python: Path) -> None:
    environ = {**os.environ, "HOME": str(home), "WANDB_MODE": "offline"}
    few = f" --training.steps {5 if page.stem == 'README' else 20}"
    for number, command in enumerate(commands(page)):
        if command.startswith(NOT_RUN):
            continue
        is_first = page.stem == "README" and number == 0
        python = Path(sys.executable) if is_first else warm_python
        environ["PATH"] = f"{workplace / 'bin'}:{python.parent}:{os.environ['PATH']}"
        if re.search(r"run_train\.sh|torchtitan train", command) and "--help" not in command:
            command, kill, rest = command.partition(" & ")
            command += SMALL if "--training.steps" in command else SMALL + few
            command += SMALL_MODEL * any(job in command for job in FOR_GPUS)
            command += kill + rest
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=workplace,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        is_late = "kill -9" in command  # the run may have ended before
        assert done.returncode == 0 or is_late, (
            f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )


@pytest.mark.promise("readme")
def test_the_first_two_commands_of_the_readme() -> None:
    assert commands(ROOT / "README.md")[:2] == ["./run_train.sh", "./scripts/run_tests.sh"]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, *BENCHMARKS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\((?!http)([^)]+)", page.read_text()):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{page.name} links to {target}"
            if anchor:
                assert anchor in anchors(file), f"{page.name} links to {target}"


def changes() -> list[tuple[str, str]]:
    """Return each worked change of docs/extend.md, a diff, and the command that trains it."""
    page = (ROOT / "docs" / "extend.md").read_text()
    return re.findall(r"^```diff\n(.*?)^```\n\n```text\n(.*?)\n```", page, re.DOTALL | re.MULTILINE)


def apply_change(diff: str, folder: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "torchtitan", folder / "torchtitan", ignore=ignore)
    command = ["git", "apply", "-p0", "-"]
    done = subprocess.run(command, input=diff, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_worked_changes_apply(tmp_path: Path) -> None:
    diffs = [diff for diff, _ in changes()]
    assert len(diffs) == 4
    for number, diff in enumerate(diffs):
        apply_change(diff, tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(4))
def test_worked_changes_train(number: int, tmp_path: Path) -> None:
    diff, command = changes()[number]
    apply_change(diff, tmp_path)
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    write_command(tmp_path / "bin")
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": path}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" same") == 1


def test_the_site_lists_every_page() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/]+\.md", str(yaml.safe_load(text)["nav"])))
    generated = {f"reference/{name}.md" for name in ("settings", "verbs", "python")}
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert listed == pages | generated | {"contributing.md"}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    settings = (tmp_path / "reference" / "settings.html").read_text()
    assert 'id="optimizer.lr"' in settings
