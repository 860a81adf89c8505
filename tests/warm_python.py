"""A Python that has imported torch already: the same command in a fraction of a second.

A test that starts commands pays seconds of imports for each process that they start. `start` gives
the path of a `python` that hands its arguments, folder, environment and standard streams to a
server, which has the imports done and forks: the child runs the module, script or code as a fresh
interpreter would, down to its exit code. Signals are passed on; who kills the command kills the
child. What belongs to a process's own start or end (import time, signals to a process group) is
tested with the real interpreter.

The child's `sys.executable` is this Python too, so that ranks of a launcher are forks as well.
"""

from __future__ import annotations

import array
import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
job = dict(argv=sys.argv[1:], cwd=os.getcwd(), environ=dict(os.environ), executable={me!r})
streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
message = json.dumps(job).encode()
server.sendmsg([len(message).to_bytes(8, "little")], streams)
server.sendall(message)

def pass_on(number, _):
    try:
        server.sendall(bytes([number]))
    except ConnectionError:  # what runs has just ended; its status is on the way
        pass

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, pass_on)
answer = server.recv(4)
status = int.from_bytes(answer, "little") if answer else 256  # the server is gone: as exit code 1
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""


def start(folder: Path) -> tuple[Path, subprocess.Popen[bytes]]:
    """Start a server; return its python, `folder`/bin/python, and the server's process.

    The server ends when its standard input is closed, with the test process at the latest.
    """
    binary, address = folder / "bin" / "python", str(folder / "socket")
    binary.parent.mkdir(parents=True)
    binary.write_text(CLIENT.format(python=sys.executable, address=address, me=str(binary)))
    binary.chmod(0o755)
    (folder / "bin" / "python3").symlink_to(binary)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm_python", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return binary, server


def serve(address: str) -> dict[str, Any]:
    """Answer until standard input is closed; return, in a new process each, what is to run."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a child that has ended leaves no zombie
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _handle(client)
        client.close()


def _handle(client: socket.socket) -> dict[str, Any]:
    """Fork the process that runs the command, and stay between it and the one who asked."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, ancillary, _, _ = client.recvmsg(8, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    streams = array.array("i")
    streams.frombytes(ancillary[0][2])
    message, length = b"", int.from_bytes(size, "little")
    while len(message) < length:  # a signal may follow
        message += client.recv(length - len(message))
    process = os.fork()
    if process == 0:
        client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return json.loads(message)
    for stream in [0, 1, 2, *streams]:
        os.close(stream)
    ended = os.pidfd_open(process)
    while True:
        ready, _, _ = select.select([client, ended], [], [])
        if ended in ready:
            _, status = os.waitpid(process, 0)
            client.sendall(status.to_bytes(4, "little"))
            os._exit(0)
        signals = client.recv(1)
        os.kill(process, signals[0] if signals else signal.SIGKILL)


def run(job: dict[str, Any]) -> None:
    """Do in this new process what `python argv...` does: -m module, -c code, or a script."""
    argv = job["argv"]
    if argv[0] == "-u":
        argv = argv[1:]
        sys.stdout.reconfigure(write_through=True)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environ"])
    sys.executable, tempfile.tempdir = job["executable"], None
    if threads := os.environ.get("OMP_NUM_THREADS"):  # read when torch was imported, long ago
        torch.set_num_threads(int(threads))
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], job["cwd"]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] in ("-", "-c"):
        code = sys.stdin.read() if argv[0] == "-" else argv[1]
        sys.argv, sys.path[0] = [argv[0], *argv[1 if argv[0] == "-" else 2 :]], ""
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


def end(job: dict[str, Any]) -> None:
    """Run, and end as an interpreter does that leaves its modules to the system.

    Taking torch's modules apart costs more than most commands. Uncaught errors go the usual way.
    """
    code = 0
    try:
        run(job)
    except SystemExit as wish:
        if not isinstance(wish.code, int | None):
            raise
        code = wish.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import tiktoken  # noqa: F401
    import torch
    import torch.distributed.run
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    import torchtitan.build  # noqa: F401

    # the name of an event that nobody records: found by looking through all modules, 18 times
    dynamic_rendezvous.get_method_name = lambda: "rendezvous"  # type: ignore[assignment]
    gc.freeze()
    end(serve(sys.argv[1]))
