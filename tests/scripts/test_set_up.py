"""What `use_python` installs, from where, and when it installs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import set_up

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.promise("readme")
def test_every_requirement_but_pytorch_has_a_tested_version() -> None:
    lines = (REPOSITORY / "scripts" / "constraints.txt").read_text().splitlines()
    pinned: dict[str, list[str]] = {}
    for requirement in map(Requirement, (line for line in lines if not line.startswith("#"))):
        [pin] = requirement.specifier
        pinned.setdefault(requirement.name, []).append(pin.version)
    assert "torch" not in pinned
    extras = ("dev", "float8", "data", "s3", "gcs", "eval", "bench", "notebook")
    for line in {line for extra in extras for line in set_up.read_requirements(extra)}:
        wanted = Requirement(line)
        if wanted.name not in ("torch", "tomli"):  # Python has the latter's successor from 3.11 on
            assert all(map(wanted.specifier.contains, pinned[wanted.name.lower()])), line


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    """A repository with nothing but the set-up, and a `uv` that writes down its arguments."""
    (tmp_path / "scripts").mkdir()
    for name in ("env.sh", "set_up.py", "constraints.txt"):
        shutil.copy(REPOSITORY / "scripts" / name, tmp_path / "scripts")
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexit ${{UV_EXIT:-0}}\n')
    uv.chmod(0o755)
    return tmp_path


def use_python(shell: Path, python: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            "bash",
            "-euc",
            "source scripts/env.sh; use_python; python -c 'import sys; print(sys.prefix)'",
        ],
        cwd=shell,
        env={
            "PATH": f"{python.parent}:{shell / 'bin'}:/usr/bin:/bin",
            "PIP_CONFIG_FILE": os.devnull,
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.promise("readme")
def test_a_python_that_has_all_is_used(shell: Path) -> None:
    done = use_python(shell, Path(sys.executable))
    assert (done.returncode, done.stdout.strip()) == (0, sys.prefix)
    assert not (shell / ".venv").exists()


@pytest.mark.promise("readme")
@pytest.mark.slow
def test_a_python_without_packages_is_left_alone(shell: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", shell / "empty"], check=True)
    python = shell / "empty" / "bin" / "python3"
    failed = use_python(shell, python, UV_EXIT="1", PYTHONDONTWRITEBYTECODE="1")
    assert failed.returncode == 2
    assert "UV_DEFAULT_INDEX" in failed.stderr
    done = use_python(shell, python, PYTHONDONTWRITEBYTECODE="")
    assert (done.returncode, done.stdout.strip()) == (0, str(shell / ".venv"))
    assert str(python) in done.stderr
    *_, without, call = [line.split() for line in (shell / "calls").read_text().splitlines()]
    assert ("--compile-bytecode" in without, "--compile-bytecode" in call) == (True, False)
    assert call[:4] == ["pip", "install", "--python", str(shell / ".venv" / "bin" / "python")]
    assert str(shell / "scripts" / "constraints.txt") in call
    assert call[-1] == str(shell)
