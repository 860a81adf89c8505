"""A server of S3 on this machine, and a wire to it that can be cut, for campaigns and tests.

Any server that speaks HTTP on a port will do. moto's, a Python package, keeps objects in its own
memory, so killing it loses them; one that keeps them on disk may be killed. The wire is a relay:
clients know its port alone, so that a server may come back at another one, and faults of the way
need no help of the server: connections cut in the middle, answers of "slow down", narrow bandwidth.
"""

from __future__ import annotations

import asyncio
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.ports import hold_port

BUCKET = "bucket"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY12"
MOTO = f"{shlex.quote(sys.executable)} -m moto.server -H 127.0.0.1 -p {{port}}"
SECONDS_TO_START = 60
BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
CHUNK = 1 << 16


def environ_of(
    port: int, *, key: str = "AKIAIOSFODNN7EXAMPLE", secret: str = SECRET
) -> dict[str, str]:
    """Return the variables by which clients find a server on this machine."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class S3Server:
    """A server that `command` starts, at one port for all of its lives; `{port}` and `{folder}` in
    the command are filled in."""

    def __init__(self, command: str = MOTO, *, folder: Path = Path()) -> None:
        self._place = hold_port()
        self.port: int = self._place.getsockname()[1]
        self._command = shlex.split(command.format(port=self.port, folder=folder))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            OSError: It does not, or has ended.
        """
        self._place.close()
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet)
        deadline = time.monotonic() + SECONDS_TO_START
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=5).close()
                return
            except urllib.error.HTTPError:
                return  # whatever it thinks of us, it answers
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def kill(self) -> None:
        """Kill it as a machine that loses its power does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run moto's server."""
    server = S3Server()
    try:
        server.start()
        yield server
    finally:
        server.kill()


class Wire:
    """Relays connections to a port of this machine, well or badly."""

    def __init__(self, to_port: int, *, seed: int = 0) -> None:
        self.busy_share = 0.0
        """How many connections are answered with "slow down"."""
        self.cut_share = 0.0
        """How many are cut after some bytes of an answer."""
        self.bytes_per_second = float("inf")
        """Of each connection, in each direction."""
        self._to_port, self._is_up, self._draw = to_port, True, random.Random(seed)
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Cut all connections, and take no more of them until `mend`."""
        self._is_up = False
        asyncio.run_coroutine_threadsafe(self._cut_open(), self._loop).result()

    def mend(self) -> None:
        """Relay again."""
        self._is_up = True

    def close(self) -> None:
        """End for good."""
        self.cut()
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _cut_open(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        fate = self._draw.random()
        if not self._is_up:
            answer.transport.abort()
            return
        if fate < self.busy_share:
            with suppress(OSError, asyncio.IncompleteReadError):
                await client.readuntil(b"\r\n\r\n")
                answer.write(BUSY)
                await answer.drain()
            answer.close()
            return
        left = float("inf")
        if fate < self.busy_share + self.cut_share:
            left = self._draw.randrange(1 << 14)
        try:
            server, request = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            answer.transport.abort()
            return
        both = {answer, request}
        self._open |= both
        ways = [
            asyncio.ensure_future(self._pump(client, request, float("inf"))),
            asyncio.ensure_future(self._pump(server, answer, left)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)  # a way that broke is a way that ended
        self._open -= both
        for writer in both:
            writer.transport.abort()

    async def _pump(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, left: float
    ) -> None:
        while left > 0 and (content := await source.read(CHUNK)):
            to.write(content[: int(min(left, len(content)))])
            await to.drain()
            left -= len(content)
            await asyncio.sleep(len(content) / self.bytes_per_second)


@dataclass
class Store:
    """A server that may be killed, the wire to it, and a client that goes around the wire."""

    folder: Path
    command: str | None
    key: str
    secret: str
    server: S3Server = field(init=False)
    wire: Wire = field(init=False)
    client: Any = field(init=False)

    def start(self, *, seed: int) -> None:
        """Start the server, and make the bucket."""
        import boto3

        self.folder.mkdir(parents=True)
        self.server = S3Server(self.command or MOTO, folder=self.folder)
        self.server.start()
        self.wire = Wire(self.server.port, seed=seed)
        self.client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.server.port}",
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket=BUCKET)

    def close(self) -> None:
        """End both."""
        self.wire.close()
        self.server.kill()
