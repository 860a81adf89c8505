"""Collect the wheels that a GPU machine without network lacks, for `scripts/benchmark.py gpu`.

    python scripts/bundle.py wheels
    python -m pip install --no-index --no-deps --target SITE wheels/*.whl  # on that machine

That machine is expected to have torch, numpy, transformers and what these require. The other
requirements of pyproject.toml, and torchao for float8, are downloaded for its Python and Linux on
x86_64. Packages that a benchmark does not import are left out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
THERE = ("torch", "numpy", "safetensors", "huggingface-hub", "filelock", "jinja2")
"""Come with torch and transformers."""
UNUSED = ("tensorboard", "wandb")
PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_24", "manylinux_2_28")
MOST_MIB = 64


def main(argv: Sequence[str]) -> int:
    """Download the wheels; return 1 if they are too large to carry."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="receives the wheels")
    parser.add_argument("--python", default="3.12", help="version there (default 3.12)")
    args = parser.parse_args(argv)
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    words = download_options(args.folder, python=args.python)
    for requirement in bundled(project):
        subprocess.run([sys.executable, "-m", "pip", *words, requirement], check=True)
    size = sum(wheel.stat().st_size for wheel in args.folder.glob("*.whl")) / 2**20
    sys.stdout.write(f"{size:.1f} MiB in {args.folder}\n")
    if size > MOST_MIB:
        sys.stderr.write(f"{args.folder} is larger than {MOST_MIB} MiB\n")
        return 1
    return 0


def bundled(project: Mapping[str, Any]) -> list[str]:
    """Return the requirements of the [project] table that the bundle has."""
    wanted = [*project["dependencies"], *project["optional-dependencies"]["float8"]]
    names = {each: re.split(r"[<>=!;\[ ]", each)[0] for each in wanted}
    return [each for each, name in names.items() if name not in (*THERE, *UNUSED)]


def download_options(folder: Path, *, python: str) -> list[str]:
    """Return the words of `pip download` for one wheel."""
    platforms = [f"--platform={each}_x86_64" for each in PLATFORMS]
    only = ["--no-deps", "--only-binary=:all:", f"--python-version={python}"]
    return ["download", "--quiet", *only, *platforms, f"--dest={folder}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
