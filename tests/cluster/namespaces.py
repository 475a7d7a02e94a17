"""Nodes as Linux namespaces.

A node is a set of namespaces (network, host name, processes, mounts, shared memory) held open by one process
that is the first of its process namespace and reads a pipe from us. When we end, however we end, the pipe
closes, that process leaves, and the kernel kills everything in the node and takes its devices away. Nothing
can be left behind, so there is nothing to sweep.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from taccl.runtime import mpi

from .layout import Layout

_HERE = Path(__file__).resolve().parent
_SUBNET = "10.77.0.0/24"
_LAUNCHER = "10.77.0.254"
_MTU = 9000


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster."""

    layout: Layout
    holders: tuple[int, ...]  # the process that holds each node
    hub: int  # the process that holds the switch's namespace, where the launcher runs

    def command(self, program: Sequence[str]) -> list[str]:
        """The command line that runs `program` on all ranks, node by node."""
        each = self.layout.ranks_per_node
        hosts = ",".join(f"{self.layout.address(node)}:{each}" for node in range(self.layout.nodes))
        mpiexec, shell = str(Path(sys.prefix) / "bin" / "mpiexec"), str(_HERE / "nsrsh")
        launcher = [mpiexec, "-iface", "ctl0", "-launcher", "ssh", "-launcher-exec", shell, "-hosts", hosts]
        if not _mpich():
            launcher = [
                *(mpiexec, "--prtemca", "plm_ssh_agent", shell, "--prtemca", "prte_if_include", _SUBNET),
                *("--map-by", f"ppr:{each}:node:oversubscribe", "--bind-to", "none", "--host", hosts),
                *(
                    "--mca",
                    "pml",
                    "ob1",
                    "--mca",
                    "btl",
                    "self,sm,tcp",
                    "--mca",
                    "btl_tcp_if_include",
                    "eth0",
                ),
            ]
        inside = ("nsenter", "--target", str(self.hub), "--net", "--uts")
        return [*inside, *launcher, "-n", str(self.layout.ranks), *program]

    def environment(self) -> dict[str, str]:
        """The environment for `command`."""
        return {
            **mpi.launch_environment(),
            # Without this UCX would find shared memory between "nodes": they have one kernel.
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": "eth0",
            "TACCL_CLUSTER_NODES": " ".join(
                f"{self.layout.address(node)}={holder}" for node, holder in enumerate(self.holders)
            ),
        }

    def run(
        self, program: Sequence[str], timeout_s: float, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on all ranks and collect its output; a job that outlives `timeout_s` is killed."""
        return subprocess.run(  # type: ignore[call-overload,no-any-return]
            self.command(program), env=self.environment(), text=True, timeout=timeout_s, **options
        )


def why_not(shaper: str) -> str:
    """Why no cluster can be emulated here; empty when one can."""
    for tool in ("ip", "tc", "unshare", "nsenter", "mount", "hostname", "sysctl"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (packages iproute2, util-linux, mount, hostname and procps)"
    if not (Path(sys.prefix) / "bin" / "mpiexec").exists():
        return "no mpiexec is in this environment"
    with ExitStack() as stack:
        try:
            holder = stack.enter_context(_holder("probe"))
            _ip(holder, "link", "add", "a0", "type", "veth", "peer", "name", "a1")
            if shaper == "tbf":
                _shape(holder, "a0", 10**8, 32_000)
            elif not os.access("/dev/net/tun", os.R_OK | os.W_OK):
                return "/dev/net/tun cannot be opened"
        except (subprocess.CalledProcessError, OSError) as error:
            return reason_of(error)
    return ""


def reason_of(error: subprocess.CalledProcessError | OSError) -> str:
    """What to say of an error while namespaces are made."""
    said = getattr(error, "stderr", "") or str(error)
    return f"the kernel or missing rights do not allow it: {said.strip()}"


def _mpich() -> bool:
    """Whether this environment has MPICH; else it has Open MPI."""
    return (Path(sys.prefix) / "bin" / "mpiexec.hydra").exists()


@contextmanager
def cluster(layout: Layout) -> Iterator[Cluster]:
    """Bring a cluster up, and take it down again whatever happens inside."""
    with ExitStack() as stack:
        hub = stack.enter_context(_holder("hub"))
        holders = [stack.enter_context(_holder(f"cn{node}")) for node in range(layout.nodes)]
        if layout.shaper == "tap":
            _join_by_taps(stack, layout, holders, hub)
        else:
            _join_by_bridge(layout, holders, hub)
        for address, holder in [(layout.address(k), h) for k, h in enumerate(holders)]:
            _ip(holder, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip(hub, "addr", "add", f"{_LAUNCHER}/24", "dev", "ctl0")
        _introduce(layout, holders, hub)
        yield Cluster(layout, tuple(holders), hub)


@contextmanager
def _holder(name: str) -> Iterator[int]:
    """Namespaces of a node; gives the process id that holds them."""
    # A congestion control that remembers bandwidth (BBR) would carry one message's crowd into the next.
    calm = "sysctl -qw net.ipv4.tcp_congestion_control=reno net.ipv4.tcp_slow_start_after_idle=0"
    setup = f"hostname {name} && mount -t tmpfs none /dev/shm && ip link set lo up"
    setup = f"{setup} && {{ {calm} || true; }} && echo ready && exec cat"
    process = subprocess.Popen(
        [
            *(
                "unshare",
                "--net",
                "--uts",
                "--pid",
                "--mount",
                "--ipc",
                "--fork",
                "--kill-child",
                "--mount-proc",
            ),
            *("sh", "-c", setup),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for us; the node leaves when the pipe closes
    )
    assert process.stdin and process.stdout and process.stderr
    try:
        if process.stdout.readline().strip() != "ready":
            raise OSError(process.stderr.read().strip() or "unshare failed")
        yield int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()


def _mac(port: int) -> str:
    return f"02:00:00:00:00:{port + 1:02x}"


def _join_by_bridge(layout: Layout, holders: Sequence[int], hub: int) -> None:
    """A veth from each node to a bridge in the hub, or to that of its rack, which has one to the hub's. Both ends of
    each are shaped: out at the lower one, in at the upper."""
    _ip(hub, "link", "add", "ctl0", "type", "bridge")
    _ip(hub, "link", "set", "ctl0", "address", _mac(layout.nodes), "up")
    # Hosts with containers pass what a bridge carries through their packet filter; a switch has none.
    filters = (
        "nsenter",
        "--target",
        str(hub),
        "--net",
        "sysctl",
        "-qew",
        "net.bridge.bridge-nf-call-iptables=0",
    )
    subprocess.run(
        filters, capture_output=True, check=False
    )  # where it cannot be said, it may not be so either
    # A bucket cuts what is longer than its burst into packets, which costs the cores that ranks need and which
    # network cards do by themselves: TCP is to hand over no more than passes whole.
    whole = ("gso_max_size", str(min(layout.burst_bytes * 7 // 8, 65_536)))
    for rack, rate in enumerate(layout.trunk_bits):
        _ip(hub, "link", "add", f"rack{rack}", "type", "bridge")
        _ip(hub, "link", "set", f"rack{rack}", "up")
        _ip(hub, "link", "add", f"down{rack}", "type", "veth", "peer", "name", f"up{rack}")
        for end, switch in ((f"down{rack}", "ctl0"), (f"up{rack}", f"rack{rack}")):
            _ip(hub, "link", "set", end, "mtu", str(_MTU), *whole, "master", switch, "up")
            _shape(hub, end, rate, layout.burst_bytes)
    for node, holder in enumerate(holders):
        switch = f"rack{layout.rack_of[node]}" if layout.rack_of else "ctl0"
        _ip(hub, "link", "add", f"p{node}", "type", "veth", "peer", "name", "eth0", "netns", str(holder))
        _ip(holder, "link", "set", "eth0", "address", _mac(node), "mtu", str(_MTU), *whole, "up")
        _ip(hub, "link", "set", f"p{node}", "mtu", str(_MTU), *whole, "master", switch, "up")
        _shape(holder, "eth0", layout.rate_bits[node], layout.burst_bytes)
        _shape(hub, f"p{node}", layout.rate_bits[node], layout.burst_bytes)


def _join_by_taps(stack: ExitStack, layout: Layout, holders: Sequence[int], hub: int) -> None:
    """A TAP device in each node and one in the hub, all open in one switch process."""
    tag = f"tt{os.getpid()}"  # devices are born in our own namespace before they move: unique there
    names = [f"{tag}p{port}" for port in range(layout.nodes + 1)]
    if max(map(len, names)) > 15:
        names = [name[2:] for name in names]
    switch = subprocess.Popen(
        [sys.executable, str(_HERE / "switch.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert switch.stdin and switch.stdout

    def stop() -> None:
        assert switch.stdin and switch.stdout
        switch.stdin.close()
        switch.stdout.close()
        switch.kill()
        switch.wait()

    stack.callback(stop)
    config = {
        "taps": names,
        "macs": [_mac(port) for port in range(len(names))],
        "seconds_per_byte": [8 / bits for bits in layout.rate_bits] + [0.0],
        "latency_s": layout.latency_us / 1e6,
        "unshaped": layout.nodes,
        "rack_of": layout.rack_of,
        "trunk_seconds_per_byte": [8 / bits for bits in layout.trunk_bits],
    }
    switch.stdin.write(json.dumps(config) + "\n")
    switch.stdin.flush()
    if switch.stdout.readline().strip() != "ready":
        raise OSError("the user-space switch did not start")
    for port, (name, holder) in enumerate(zip(names, [*holders, hub], strict=True)):
        inner = "ctl0" if holder == hub else "eth0"
        _call("ip", "link", "set", name, "netns", str(holder))
        _ip(holder, "link", "set", name, "name", inner)
        _ip(holder, "link", "set", inner, "address", _mac(port), "mtu", str(_MTU), "txqueuelen", "2000", "up")


def _introduce(layout: Layout, holders: Sequence[int], hub: int) -> None:
    """Permanent neighbour entries: no ARP, whose broadcasts the switch does not carry."""
    ports = [(layout.address(k), holder, "eth0") for k, holder in enumerate(holders)]
    ports.append((_LAUNCHER, hub, "ctl0"))
    for _, holder, device in ports:
        for port, (address, other, _) in enumerate(ports):
            if other != holder:
                _ip(
                    holder,
                    "neigh",
                    "replace",
                    address,
                    "lladdr",
                    _mac(port),
                    "dev",
                    device,
                    "nud",
                    "permanent",
                )


def _shape(holder: int, device: str, rate_bits: int, burst_bytes: int) -> None:
    limits = ("rate", str(rate_bits), "burst", str(burst_bytes), "latency", "100ms")
    _call(
        *("nsenter", "--target", str(holder), "--net"),
        *("tc", "qdisc", "add", "dev", device, "root", "tbf", *limits),
    )


def _ip(holder: int, *words: str) -> None:
    _call("nsenter", "--target", str(holder), "--net", "ip", *words)


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
