"""Networks between nodes that an MPI library uses directly, beside or below the TCP that every cluster has."""

from __future__ import annotations

from pathlib import Path

# Kinds of devices under /sys/class. "infiniband" has all that speak verbs: InfiniBand, RoCE, Omni-Path, AWS's EFA.
CLASSES = {"infiniband": "RDMA", "cxi": "Slingshot"}


def direct(root: Path = Path("/sys/class")) -> str:
    """Names of this node's devices for such networks; "" where it has none."""
    found = []
    for name, kind in CLASSES.items():
        try:
            devices = sorted(entry.name for entry in (root / name).iterdir())
        except OSError:  # there are none
            continue
        found += [f"{device} ({kind})" for device in devices]
    return ", ".join(found)
