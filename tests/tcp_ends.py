"""A TCP connection on this machine, for tests of what ranks do with one."""

import socket


def connected():
    """Both ends of a TCP connection, as ranks have them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ends
