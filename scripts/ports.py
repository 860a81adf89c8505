"""A free port where ranks connect, reserved until they do."""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """Return a socket that reserves a port of the loopback interface until it is closed.

    A free port that is not reserved may be taken by any process before rank 0 listens on it. With
    SO_REUSEADDR on both sockets the store of rank 0 can listen on a bound port; it is set here only
    after binding, so that no other process can bind the port too.
    """
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return place
