"""Addresses by which ranks of other nodes may reach this one."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from taccl.errors import UsageError

INTERFACES = "TACCL_INTERFACES"  # names of network interfaces, or beginnings of names, separated by commas
MOST = 8  # addresses of a rank
RECORD_BYTES = 18  # 16 of the address (IPv4 mapped into IPv6), the bits of its network, whether there is one

_SIOCGIFADDR, _SIOCGIFNETMASK, _SIOCGIFFLAGS = 0x8915, 0x891B, 0x8913
_UP, _LOOPBACK = 0x1, 0x8
_GLOBAL = 0  # scope of an IPv6 address

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Place:
    """An address and the length of its network's prefix."""

    address: Address
    prefix: int

    def near(self, other: Place) -> bool:
        """Whether the other one lies in its network."""
        if self.address.version != other.address.version:
            return False
        network = ipaddress.ip_network((self.address, self.prefix), strict=False)
        return other.address in network


def places(chosen: str | None = None) -> list[Place]:
    """This node's addresses, IPv4 first, the loopback last: ranks that look like other nodes may share its network.

    chosen: as the variable TACCL_INTERFACES, which is taken where it is None; "" for all. Raises UsageError where none
    of the interfaces that it names has an address.
    """
    wanted = [
        word.strip() for word in (os.environ.get(INTERFACES, "") if chosen is None else chosen).split(",")
    ]
    wanted = [word for word in wanted if word]
    names = [name for _, name in socket.if_nameindex()]
    kept = [name for name in names if not wanted or any(name.startswith(word) for word in wanted)]
    found = [*_ipv4(kept), *_ipv6(kept)]
    if wanted and not found:
        raise UsageError(
            f"{INTERFACES}={','.join(wanted)}: no such network interface with an address is up; there are "
            f"{', '.join(names)}"
        )
    inside = [place for place in found if place.address.is_loopback]
    return ([place for place in found if place not in inside] + inside)[:MOST]


def _ipv4(names: Sequence[str]) -> list[Place]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:

        def told(request: int, name: str) -> bytes:
            return fcntl.ioctl(ask, request, struct.pack("256s", name.encode()[:15]))

        for name in names:
            try:
                (flags,) = struct.unpack_from("H", told(_SIOCGIFFLAGS, name), 16)
                address, mask = (told(request, name)[20:24] for request in (_SIOCGIFADDR, _SIOCGIFNETMASK))
            except OSError:  # it has no IPv4 address
                continue
            if flags & _UP:
                bits = int.from_bytes(mask, "big").bit_count()
                found.append(Place(ipaddress.IPv4Address(address), bits))
    return found


def _ipv6(names: Sequence[str]) -> list[Place]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # this kernel has no IPv6
        return []
    found = []
    for line in lines:
        digits, _, prefix, scope, _, name = line.split()
        if name in names and int(scope, 16) == _GLOBAL:
            found.append(Place(ipaddress.IPv6Address(bytes.fromhex(digits)), int(prefix, 16)))
    return found


def pack(found: Sequence[Place]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """(MOST * RECORD_BYTES,) for the other ranks."""
    words = b"".join(_mapped(p.address).packed + bytes((p.prefix, 1)) for p in found)
    return np.frombuffer(words.ljust(MOST * RECORD_BYTES, b"\0"), np.uint8)


def unpack(words: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> list[Place]:
    """What another rank has packed."""
    records = words.reshape(MOST, RECORD_BYTES)
    found = []
    for record in records[records[:, -1] == 1]:
        address: Address = ipaddress.IPv6Address(record[:16].tobytes())
        address = getattr(address, "ipv4_mapped", None) or address
        found.append(Place(address, int(record[16])))
    return found


def _mapped(address: Address) -> ipaddress.IPv6Address:
    if isinstance(address, ipaddress.IPv6Address):
        return address
    return ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + address.packed)


def in_order(theirs: Sequence[Place], mine: Sequence[Place]) -> list[Place]:
    """A peer's addresses as they are tried: first those in a network of ours, the loopback last."""

    def rank(place: Place) -> int:
        if place.address.is_loopback:
            return 2
        return 0 if any(own.near(place) for own in mine if not own.address.is_loopback) else 1

    return sorted(theirs, key=rank)
