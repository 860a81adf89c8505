"""Write one HTML file about one or more runs.

    torchtitan report outputs/a outputs/b --out report.html

The file shows the curves of all logged figures, with starts, changed settings and spikes, and of
each run its model, data, layout and events. It needs no network, and runs no code of the runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan.base.errors import ConfigError, printable
from torchtitan.base.files import replace_text
from torchtitan.base.urls import local_path
from torchtitan.tools.verbs import build_parser, report_errors


@report_errors
def main(argv: Sequence[str]) -> int:
    """Write the page and return 0; return 2 for a user's mistake."""
    parser = build_parser("report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=local_path, default=Path("report.html"), help="file to write")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    if not out.name or out.is_dir():
        parser.error(f"--out must be a file, got {out}")
    from torchtitan.tools.report.page import build_page
    from torchtitan.tools.report.read import name_runs, read_run

    runs = [read_run(path, name=name) for name, path in name_runs(arguments.runs).items()]
    page = build_page(runs)
    try:
        replace_text(out, page)
    except OSError as error:
        raise ConfigError(f"--out must be a writable file, got {out}: {error.strerror}") from error
    names = printable(", ".join(run.name for run in runs))
    sys.stdout.write(f"{out}: {names}, {len(page.encode()) / 2**20:.2f} MiB\n")
    return 0
