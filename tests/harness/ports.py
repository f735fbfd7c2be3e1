"""Ports that tests give to commands, which bind them later."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port that nobody listens on, and that no socket is given meanwhile that asked for any.

    Those come from 32768 on (Linux) or higher; tests beside this one ask for many.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(15000, 32000)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
