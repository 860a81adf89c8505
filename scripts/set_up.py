"""Install torchtitan's requirements with uv, or find out whether a Python has them.

    python scripts/set_up.py check [EXTRA]      # exit code 1, and what is missing, if it has not
    python scripts/set_up.py install [EXTRA]    # into the environment of this Python

`run_train.sh` and `run_tests.sh` call it (`env.sh`). Versions come from constraints.txt, so that
all users get the tested ones without a resolver: uv installs them in half a minute, pip in a few
minutes. PyTorch is not among them; pyproject.toml has the supported releases. An installed PyTorch
is kept. Otherwise it comes from

1. the indexes and folders that pip's or uv's configuration names, folders first;
2. PyTorch's own index: the build for this machine's GPU driver, or the CPU build where there is
   none. `UV_TORCH_BACKEND` (`cpu`, `cu130`, ...) chooses another.

Only the standard library is imported before the requirements are there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
PIP_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
"""Settings of pip, which uv does not read, and the corresponding options of uv."""
UV_SOURCES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
"""Variables of uv that name where packages come from."""


def read_requirements(extra: str) -> list[str]:
    """Return the requirements of pyproject.toml, and those of an extra unless it is empty.

    Raises:
        ModuleNotFoundError: A Python 3.10 without tomli.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found, extras = list(project["dependencies"]), [extra] if extra else []
    for name in extras:
        for line in project["optional-dependencies"][name]:
            if line.startswith(f"{project['name']}["):
                extras += line.partition("[")[2].rstrip("]").split(",")
            else:
                found.append(line)
    return found


def find_missing(requirements: Sequence[str]) -> Iterator[str]:
    """Yield missing requirements, and those with a wrong version beside the installed one."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            yield str(requirement)
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield f"{requirement} (it has {installed})"


def read_pip_options() -> list[tuple[str, str]]:
    """Return the package sources of pip's configuration, as options of uv."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, check=True, text=True
    )
    settings: dict[str, str] = {}  # variables are listed first and win over files
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        settings.setdefault(name.rpartition(".")[2], value.strip("'\""))
    return [
        (option, value)
        for name, option in PIP_OPTIONS.items()
        for value in settings.get(name, "").replace("\\n", " ").split()
    ]


def uv_arguments(
    options: Sequence[tuple[str, str]], environ: Mapping[str, str], *, has_torch: bool
) -> list[str]:
    """Return uv's arguments for the package sources of pip and for a fitting PyTorch."""
    arguments = [word for option in options for word in option]
    if any(option in ("--index", "--default-index") for option, _ in options):
        # as pip: the best version of all indexes, not the first index that has the package
        arguments += ["--index-strategy", "unsafe-best-match"]
    elif not has_torch and not any(name in environ for name in ("UV_TORCH_BACKEND", *UV_SOURCES)):
        arguments += ["--torch-backend", "auto"]
    return arguments


def find_uv() -> list[str] | None:
    """Return the command of uv. Install it into this environment if it is missing."""
    if found := shutil.which("uv"):
        return [found]
    if importlib.util.find_spec("uv") is None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        if subprocess.run([*pip, "uv"], check=False).returncode:
            return None
    return [sys.executable, "-m", "uv"]


def install(extra: str) -> int:
    """Install the requirements and this repository; return the exit code."""
    project = f"{ROOT}[{extra}]" if extra else str(ROOT)
    packages = ["packaging", "--constraint", str(CONSTRAINTS), "--editable", project]
    uv = find_uv()
    if uv is None:
        print("uv could not be installed: pip is used, which takes longer", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
        return subprocess.run([*pip, *packages], check=False).returncode
    command = [*uv, "pip", "install", "--python", sys.executable]
    options = read_pip_options()
    folders = [word for option in options if option[0] == "--find-links" for word in option]
    if folders and not has_torch():
        [torch] = [line for line in read_requirements("") if line.startswith("torch>")]
        # if the folder has none that fits this Python, the next command finds one in the indexes
        alone = [*command, "--quiet", "--no-deps", "--no-index", *folders, torch]
        subprocess.run(alone, stderr=subprocess.DEVNULL, check=False)
    found = uv_arguments(options, os.environ, has_torch=has_torch())
    if sys.dont_write_bytecode:  # else each start would compile PyTorch's sources, for ten seconds
        found.append("--compile-bytecode")
    return subprocess.run([*command, *found, *packages], check=False).returncode


def has_torch() -> bool:
    """Return whether this environment has a PyTorch."""
    importlib.invalidate_caches()  # it may have been installed since this process started
    return importlib.util.find_spec("torch") is not None


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    action, extra = argv[0], argv[1] if len(argv) > 1 else ""
    if action == "install":
        return install(extra)
    assert action == "check", action
    try:
        missing = list(find_missing(read_requirements(extra)))
    except ModuleNotFoundError as error:  # tomli or packaging
        missing = [str(error.name)]
    print("\n".join(missing))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
