"""An S3 server on this machine and a relay in front of it, for campaigns and tests.

Any server that speaks HTTP on a port works. moto's, a Python package, keeps objects in memory, so
that killing it loses them; a server that keeps them on disk may be killed. Clients connect to the
relay, which simulates network faults: dropped connections, "slow down" responses, low bandwidth.
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
KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY12"
MOTO = f"{shlex.quote(sys.executable)} -m moto.server -H 127.0.0.1 -p {{port}}"
SECONDS_TO_START = 60
BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
CHUNK = 1 << 16


def environ_of(port: int, *, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    """Return the environment variables that clients need to find a server on this machine."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class S3Server:
    """A server that keeps its port over restarts.

    Args:
        command: Starts the server. `{port}` and `{folder}` in it are filled in.
        folder: Where the server may keep its objects.
    """

    def __init__(self, command: str = MOTO, *, folder: Path = Path()) -> None:
        self._place = hold_port()
        self.port: int = self._place.getsockname()[1]
        self._command = shlex.split(command.format(port=self.port, folder=folder))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it responds.

        Raises:
            OSError: It does not respond in time, or has ended.
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
                return  # an error status is a response too
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def kill(self) -> None:
        """Kill the server, as a power failure does."""
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


class Relay:
    """Relays connections to a port of this machine, with faults."""

    def __init__(self, to_port: int, *, seed: int = 0) -> None:
        self.busy_share = 0.0
        """Share of connections that get "slow down"."""
        self.cut_share = 0.0
        """Share of connections that are dropped within the response."""
        self.bytes_per_second = float("inf")
        """Limit per connection and direction."""
        self._to_port, self._is_up, self._draw = to_port, True, random.Random(seed)
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    def disconnect(self) -> None:
        """Drop all connections, and refuse further ones until `reconnect`."""
        self._is_up = False
        asyncio.run_coroutine_threadsafe(self._drop_open(), self._loop).result()

    def reconnect(self) -> None:
        """Accept connections again."""
        self._is_up = True

    def close(self) -> None:
        """Stop the relay."""
        self.disconnect()
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _drop_open(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        drawn = self._draw.random()
        if not self._is_up:
            answer.transport.abort()
            return
        if drawn < self.busy_share:
            with suppress(OSError, asyncio.IncompleteReadError):
                await client.readuntil(b"\r\n\r\n")
                answer.write(BUSY)
                await answer.drain()
            answer.close()
            return
        left = float("inf")
        if drawn < self.busy_share + self.cut_share:
            left = self._draw.randrange(1 << 14)
        try:
            server, request = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            answer.transport.abort()
            return
        both = {answer, request}
        self._open |= both
        pumps = [
            asyncio.ensure_future(self._pump(client, request, float("inf"))),
            asyncio.ensure_future(self._pump(server, answer, left)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)  # a dropped connection is no error
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
    """A server that may be killed, a relay in front of it, and a client without the relay."""

    folder: Path
    command: str | None
    key: str
    secret: str
    server: S3Server = field(init=False)
    relay: Relay = field(init=False)
    client: Any = field(init=False)

    def start(self, *, seed: int) -> None:
        """Start the server and the relay, and create the bucket."""
        import boto3

        self.folder.mkdir(parents=True)
        self.server = S3Server(self.command or MOTO, folder=self.folder)
        self.server.start()
        self.relay = Relay(self.server.port, seed=seed)
        self.client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.server.port}",
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket=BUCKET)

    def close(self) -> None:
        """Stop the relay and the server."""
        self.relay.close()
        self.server.kill()
