"""A port for ranks to meet at, held until they do."""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """Return a socket that keeps a port of the loopback for rank 0's store, until it is closed.

    Chosen and let go, a port may be taken by a connection of any process before rank 0 listens.
    A bound socket keeps it from those; the store may listen there all the same, since both sides
    share the address: this one from after it was bound, so that no third can.
    """
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return place
