"""What is asked of the kernel for a TCP connection between two ranks."""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
from pathlib import Path

from taccl.runtime.pace import Pace

UNSENT = 2  # segments that wait in the kernel behind what is on its way
USUAL_WMEM_MAX = 212992  # Linux's own
SO_BUF_LOCK = 72  # since Linux 5.13; 0: the kernel finds the right length again
SO_MAX_PACING_RATE = 47  # bytes in a second
NO_LIMIT = 2**64 - 1  # bytes in a second


def limit_rate(connection: socket.socket, bytes_per_s: int) -> None:
    """Send no faster than that, where the kernel knows how; a connection that is lost stays so."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", bytes_per_s))


@functools.cache
def _wmem_max() -> int:
    """Bytes that a process may ask for as its part of a connection's memory."""
    try:
        return int(Path("/proc/sys/net/core/wmem_max").read_text())
    except (OSError, ValueError):  # some kernels show it to no network namespace but the first
        return USUAL_WMEM_MAX


def keep(connection: socket.socket, pace: Pace, anew: bool) -> None:
    """Let the kernel keep no more segments than are on their way until they have arrived, its own records among them,
    and little behind these, where it has lost its turn.

    Where no process may ask for as many, it finds out itself what is right. anew: another pace was kept before.
    """
    nbytes = pace.under_way_bytes
    allowed, option = _wmem_max(), connection.setsockopt
    if pace.uplinks:
        # Their clocks keep queues short, and confirmations may take longer than is known.
        nbytes = max(nbytes, min(2 * nbytes, 2 * allowed))
    # The connection may be lost, and the kernel may not know the second option.
    with contextlib.suppress(OSError):
        option(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT * pace.segment_bytes)
        if anew or nbytes // 2 <= allowed:
            # It takes twice what it is asked for.
            option(socket.SOL_SOCKET, socket.SO_SNDBUF, min(nbytes // 2, allowed))
        if nbytes // 2 > allowed:
            option(socket.SOL_SOCKET, SO_BUF_LOCK, 0)
