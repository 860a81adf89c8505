"""On one machine nothing listens beyond the loopback interface."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed import jobs

LISTENS = "0A"
LOOPBACK = {socket.inet_pton(socket.AF_INET6, text) for text in ("::1", "::ffff:127.0.0.1")}


def listening() -> dict[str, bytes]:
    """Return the address of each listening socket of this machine, by inode."""
    addresses = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            words = local.split(":")[0]
            parts = [int(words[i : i + 8], 16) for i in range(0, len(words), 8)]
            packed = struct.pack(f"={len(parts)}I", *parts)
            if state == LISTENS:
                addresses[inode] = packed
    return addresses


def processes(parent: int) -> list[int]:
    """Return a process and all its descendants."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *(pid for child in children for pid in processes(int(child)))]


def sockets(pid: int) -> set[str]:
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
    return {link[8:-1] for link in links if link.startswith("socket:[")}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ranks", [1, 2])
def test_only_loopback_is_listened_on(ranks: int, tmp_path: Path) -> None:
    launcher = ["-m", "torchtitan.launch", "--standalone", f"--nproc_per_node={ranks}"]
    start = [*launcher, "-m", "torchtitan.train"] if ranks > 1 else ["-m", "torchtitan.train"]
    job = [
        *jobs.write_job(tmp_path),
        "--training.steps=100000",
        "--lr_scheduler.total_steps=100000",
    ]
    environ = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, *start, *job], env=environ)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "metrics.jsonl").is_file() and run.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert run.poll() is None
        ours = set[str]().union(*map(sockets, processes(run.pid)))
        addresses = [address for inode, address in listening().items() if inode in ours]
        assert addresses  # gloo listens
        for address in addresses:
            assert address in LOOPBACK or address == socket.inet_aton("127.0.0.1"), address
    finally:
        run.terminate()
        run.wait(60)
