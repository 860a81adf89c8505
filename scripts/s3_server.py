"""moto's S3 server on this machine, for chaos.py and tests. It keeps objects in memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scripts.ports import hold_port

BUCKET = "bucket"
KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY12"
SECONDS_TO_START = 60


def environ_of(port: int) -> dict[str, str]:
    """Return the environment variables that clients need to find a server on this machine."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class S3Server:
    """A server that keeps its port over restarts."""

    def __init__(self) -> None:
        self._place = hold_port()
        self.port: int = self._place.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it responds.

        Raises:
            OSError: It does not respond in time, or has ended.
        """
        self._place.close()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
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
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let all requests hang until `go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Answer requests again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        """Return a client of boto3."""
        import boto3

        environ = environ_of(self.port)
        return boto3.client(
            "s3",
            endpoint_url=environ["AWS_ENDPOINT_URL"],
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=environ["AWS_DEFAULT_REGION"],
        )

    def empty_bucket(self) -> None:
        """Delete all objects, and create the bucket."""
        url = f"http://127.0.0.1:{self.port}/moto-api/reset"
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60).close()
        self.client().create_bucket(Bucket=BUCKET)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run the server."""
    server = S3Server()
    try:
        server.start()
        yield server
    finally:
        server.kill()
