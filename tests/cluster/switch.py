"""A switch in user space: Ethernet frames between TAP devices, delayed as a layout says.

Run as `python switch.py`, with one JSON object on the first line of stdin; it prints "ready" when the devices
exist and ends when stdin closes, so it never outlives the process that started it.

A frame leaves its node when the uplink's out direction is free, needs the slower of the two uplinks' rates,
and is delivered after the latency. Frames are cut through: out and in are held at the same time, not one
after the other. Queues that are too long lose frames, as switches do, so that TCP learns the rate.
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
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME = 65536
_QUEUE_S = 0.2  # longest queue of a port before it loses frames
_SPIN_S = 0.00006
_OWN_S = 0.000035  # what a frame's way through this process takes by itself, measured with datagrams
_AHEAD_S = 0.01  # how far ahead a node may send: later frames wait in its own kernel


def open_tap(name: str) -> int:
    """A new TAP device in this network namespace; its frames are read and written through the descriptor."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22s", name.encode(), _IFF_TAP | _IFF_NO_PI, b""))
    return tap


def forward(
    taps: list[int], macs: list[bytes], seconds_per_byte: list[float], latency_s: float, unshaped: int
) -> None:
    """Forward until stdin closes. Port `unshaped` (the launcher's) has neither rate nor latency."""
    port_of = dict(zip(macs, range(len(macs)), strict=True))
    out_free = [0.0] * len(taps)
    in_free = [0.0] * len(taps)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, port, frame = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError):  # a full queue loses the frame, as networks do
                os.write(taps[port], frame)
        open_ports = [tap for k, tap in enumerate(taps) if out_free[k] - now < _AHEAD_S]
        wake = [waiting[0][0]] if waiting else []
        wake += [free - _AHEAD_S for free in out_free if free - now >= _AHEAD_S]
        # The last stretch is spun: the kernel wakes a sleeper tens of us late.
        pause = max(0.0, min(wake) - time.monotonic() - _SPIN_S) if wake else 1.0
        ready, _, _ = select.select([0, *open_ports], [], [], pause)
        for descriptor in ready:
            if descriptor == 0:
                if not os.read(0, 1):
                    return
                continue
            src = taps.index(descriptor)
            try:
                frame = os.read(descriptor, _FRAME)
            except BlockingIOError:
                continue
            dst = port_of.get(frame[:6], -1)
            if dst < 0:
                continue
            now = time.monotonic()
            if unshaped in (src, dst):
                due = now
            else:
                start_out = max(now, out_free[src])
                start_in = max(start_out, in_free[dst])
                if start_in - now > _QUEUE_S:
                    continue
                out_free[src] = start_out + len(frame) * seconds_per_byte[src]
                in_free[dst] = start_in + len(frame) * seconds_per_byte[dst]
                due = start_in + len(frame) * max(seconds_per_byte[src], seconds_per_byte[dst]) + latency_s
            count += 1
            heapq.heappush(waiting, (due, count, dst, frame))


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
    )


if __name__ == "__main__":
    main()
