"""A switch in user space: Ethernet frames between TAP devices, delayed as a layout says.

Run as `python switch.py`, with one JSON object on the first line of stdin; it prints "ready" when the devices
exist and ends when stdin closes, so it never outlives the process that started it.

A frame leaves its node when the uplink's out direction is free, needs the slower of the two uplinks' rates,
and is delivered after the latency. Frames are cut through: out and in are held at the same time, not one
after the other. Between racks it passes their trunks on its way, one out and one in, and waits at each.
Queues that are too long lose frames, as switches do, so that TCP learns the rate.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOAD = 0x1 | 0x2  # checksums, and the cutting of long TCP frames, are left to the device
_HEAD_BYTES = 10  # struct virtio_net_hdr
_FRAME = 65536 + 64
_BURST = 8  # frames of one port that are read before the others have their turn
_QUEUE_S = 0.2  # longest queue of a port before it loses frames
_SPIN_S = 0.00006
_OWN_S = 0.000035  # what a frame's way through this process takes by itself, measured with datagrams
_AHEAD_S = 0.01  # how far ahead a node may send: later frames wait in its own kernel


def open_tap(name: str) -> int:
    """A new TAP device in this network namespace; each frame that is read or written has HEAD_BYTES of a header."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        tap, _TUNSETIFF, struct.pack("16sH22s", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR, b"")
    )
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _OFFLOAD)
    return tap


def wire_bytes(frame: bytes) -> int:
    """What a frame takes on the wire: a long one stands for several, as a NIC cuts them, each with its headers."""
    headers_bytes, segment_bytes = struct.unpack_from("<HH", frame, 2)
    nbytes = len(frame) - _HEAD_BYTES
    if not segment_bytes or nbytes <= headers_bytes + segment_bytes:
        return nbytes
    return nbytes + (-(-(nbytes - headers_bytes) // segment_bytes) - 1) * headers_bytes


def forward(
    taps: list[int],
    macs: list[bytes],
    seconds_per_byte: list[float],
    latency_s: float,
    unshaped: int,
    rack_of: list[int],
    trunk_seconds_per_byte: list[float],
) -> None:
    """Forward until stdin closes. Port `unshaped` (the launcher's) has neither rate nor latency. rack_of: of each other
    port; empty for a star."""
    port_of = dict(zip(macs, range(len(macs)), strict=True))
    out_free = [0.0] * len(taps)
    # Of the ports that frames go to, [when it is free, seconds for a byte]: of nodes, and of trunks out and in.
    down = [[0.0, seconds] for seconds in seconds_per_byte]
    trunks = [([0.0, seconds], [0.0, seconds]) for seconds in trunk_seconds_per_byte]
    entering: list[tuple[float, int, int, int, int, bytes]] = []  # (when, number, hop, from, to, frame)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    spin_s = min(_SPIN_S, latency_s / 50)
    while True:
        now = time.monotonic()
        # Who comes to a port first has it first: not who was read first, perhaps long before it leaves.
        while entering and entering[0][0] <= now:
            came, number, hop, src, dst, frame = heapq.heappop(entering)
            way = [down[dst]]
            if rack_of and rack_of[src] != rack_of[dst]:
                way = [trunks[rack_of[src]][0], trunks[rack_of[dst]][1], down[dst]]
            port = way[hop]
            start = max(came, port[0])
            if start - came > _QUEUE_S:
                continue
            nbytes = wire_bytes(frame)
            port[0] = start + nbytes * port[1]
            if hop + 1 < len(way):
                heapq.heappush(entering, (start, number, hop + 1, src, dst, frame))
                continue
            slowest = max(seconds_per_byte[src], *(seconds for _, seconds in way))
            heapq.heappush(waiting, (start + nbytes * slowest + latency_s, number, dst, frame))
        while waiting and waiting[0][0] <= now:
            _, _, port, frame = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError):  # a full queue loses the frame, as networks do
                os.write(taps[port], frame)
        latest = now + _AHEAD_S
        open_ports = [0, *(tap for tap, free in zip(taps, out_free, strict=True) if free < latest)]
        # No frame is due before the latency has passed after it entered.
        first = min(
            (events[0][0] + more for events, more in ((entering, latency_s), (waiting, 0.0)) if events),
            default=0.0,
        )
        pause = 1.0
        if first:
            pause = first - time.monotonic() - spin_s
            if len(open_ports) <= len(taps):
                pause = min(pause, min(free for free in out_free if free >= latest) - latest)
        # The last stretch is spun: the kernel wakes a sleeper tens of us late.
        ready, _, _ = select.select(open_ports, [], [], max(0.0, pause))
        for descriptor in ready:
            if descriptor == 0:
                if not os.read(0, 1):
                    return
                continue
            src = taps.index(descriptor)
            for _ in range(_BURST):
                try:
                    frame = os.read(descriptor, _FRAME)
                except BlockingIOError:
                    break
                dst = port_of.get(frame[_HEAD_BYTES : _HEAD_BYTES + 6], -1)
                if dst < 0:
                    continue
                now = time.monotonic()
                count += 1
                if unshaped in (src, dst):
                    heapq.heappush(waiting, (now, count, dst, frame))
                    continue
                start = max(now, out_free[src])
                heapq.heappush(entering, (start, count, 0, src, dst, frame))
                out_free[src] = start + wire_bytes(frame) * seconds_per_byte[src]
                if out_free[src] - now >= _AHEAD_S:
                    break


def main() -> None:
    """Read what to do from stdin and forward."""
    config = json.loads(sys.stdin.readline())
    # Ranks spin while they wait; frames must still be forwarded on time.
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    except PermissionError:
        print("switch: no real-time priority; latencies will be rough", file=sys.stderr)
    ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK: wake within a nanosecond, not 50 us late
    taps = [open_tap(name) for name in config["taps"]]
    print("ready", flush=True)
    forward(
        taps,
        [bytes.fromhex(mac.replace(":", "")) for mac in config["macs"]],
        config["seconds_per_byte"],
        max(0.0, config["latency_s"] - _OWN_S),
        config["unshaped"],
        config["rack_of"],
        config["trunk_seconds_per_byte"],
    )


if __name__ == "__main__":
    main()
