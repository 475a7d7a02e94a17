"""What the TCP connections of this process have moved, whoever made them.

A long message, or a collective of the MPI library, is one call that says nothing until it is over. Where its bytes go
over TCP, as they do between hosts without a faster network, the kernel counts them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

# struct tcp_info of linux/tcp.h: 8 bytes, 24 numbers of 32 bits, two rates, then bytes that the peer has confirmed and
# bytes received, of 64 bits each.
COUNTS_AT = 120
INFO_BYTES = COUNTS_AT + 16
LEAST_BYTES_PER_S = 8 << 10  # of something that goes on; a frame now and then is none


class Moving:
    """Whether bytes go on moving: as many as that on average since they last did. moved: in all."""

    def __init__(self, now_s: float, moved: int) -> None:
        self.begin(now_s, moved)

    def begin(self, now_s: float, moved: int) -> None:
        """What moved before does not count."""
        self._since_s, self._moved = now_s, moved

    def goes_on(self, now_s: float, moved: int) -> bool:
        """Whether they do, up to now."""
        if moved - self._moved < max(1, LEAST_BYTES_PER_S * (now_s - self._since_s)):
            return False
        self.begin(now_s, moved)
        return True


class Connections:
    """What the TCP connections of this process have moved since they were first looked at, and before."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}  # by the kernel's name
        self._moved = 0

    def moved_bytes(self) -> int:
        """Bytes received and bytes sent that the peer's kernel has confirmed; 0 where the system does not tell.

        What a connection had moved when it was last looked at stays in it when the connection has been closed.
        """
        counts: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for opened in os.listdir("/proc/self/fd"):
                counts |= _moved(int(opened))
        self._moved += sum(max(0, count - self._counts.get(name, 0)) for name, count in counts.items())
        self._counts |= counts  # of one that cannot be looked at now, too
        return self._moved


def _moved(fd: int) -> dict[str, int]:
    """The kernel's name of a file and its bytes; nothing for anything else than a TCP connection."""
    with contextlib.suppress(OSError):  # closed by now, or not TCP
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.startswith("socket:"):
            blocking, changes = os.get_blocking(fd), socket.getdefaulttimeout() is not None
            with socket.socket(fileno=os.dup(fd)) as connection:
                if changes:  # a default timeout makes every new socket one that does not block
                    os.set_blocking(fd, blocking)
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
                if len(info) == INFO_BYTES:
                    return {name: sum(struct.unpack_from("QQ", info, COUNTS_AT))}
    return {}
