"""`python -m tests.cluster run --nodes 2 --ranks 4 --rate 200mbit --latency-us 1000 -- PROGRAM ...`

Brings a cluster up, runs PROGRAM on every rank under mpiexec, takes the cluster down, and exits with the
program's code. `check` says whether clusters can be emulated here. Without root it starts itself again in a
user namespace.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from .layout import layout
from .namespaces import cluster, reason_of, why_not

TIMED_OUT = 124
CANNOT = 77


def main() -> int:
    """The exit code: the program's, 124 when it ran too long, 77 when no cluster can be emulated, 130 interrupted."""
    os.environ["PATH"] += (
        f"{os.pathsep}/usr/sbin{os.pathsep}/sbin"  # where `tc` lies, which not every PATH names
    )
    parser = argparse.ArgumentParser(prog="tests.cluster", description="Emulated clusters on one machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="say whether clusters can be emulated here")
    check.add_argument("--shaper", choices=["tbf", "tap"], default="tbf")
    run = commands.add_parser("run", help="run a program on all ranks of a cluster")
    run.add_argument("--nodes", type=int, default=2)
    run.add_argument("--ranks", type=int, default=4, help="of each node")
    run.add_argument("--rate", default="200mbit", help="of each node's uplink, both ways")
    run.add_argument(
        "--slow", action="append", default=[], metavar="NODE=RATE", help="another rate for a node"
    )
    run.add_argument(
        "--racks", default="", metavar="RACK,...", help="of each node, from 0; default: one switch for all"
    )
    run.add_argument(
        "--trunk",
        action="append",
        default=[],
        metavar="RATE",
        help="of each rack, in order, both ways; the last for all that follow",
    )
    run.add_argument("--latency-us", type=float, default=0.0, help="one way between nodes")
    run.add_argument(
        "--shaper", choices=["tbf", "tap"], default="", help="default: tap with a latency, else tbf"
    )
    run.add_argument("--timeout", type=float, default=300.0, metavar="S")
    run.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if os.geteuid() != 0:
        # Root of a namespace of its own may build devices and shape them.
        again = [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "--net",
            sys.executable,
            "-m",
            "tests.cluster",
        ]
        os.execvp(again[0], again + sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT):  # leave through the context managers
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    if options.command == "check":
        reason = why_not(options.shaper)
        print(reason or "clusters can be emulated here")
        return CANNOT if reason else 0
    program = [word for k, word in enumerate(options.program) if not (k == 0 and word == "--")]
    try:
        words = options.racks.split(",") if options.racks else []
        if not all(word.isdecimal() for word in words):
            parser.error(f"--racks has the number of each node's rack, as 0,0,1,1; {options.racks!r} has not")
        racks = [int(word) for word in words]
        more = (max(racks, default=-1) + 1 - len(options.trunk)) * options.trunk[-1:]
        wanted = layout(
            options.nodes,
            options.ranks,
            options.rate,
            {int(node): rate for node, _, rate in (word.partition("=") for word in options.slow)},
            options.latency_us,
            options.shaper,
            racks,
            [*options.trunk, *more],
        )
    except ValueError as error:
        parser.error(str(error))
    if not program:
        parser.error("a program to run is missing")
    reason = why_not(wanted.shaper)
    if reason:
        print(f"no cluster can be emulated here: {reason}", file=sys.stderr)
        return CANNOT
    beside = Path(sys.prefix) / "bin" / program[0]
    if os.sep not in program[0] and beside.exists():
        program[0] = str(beside)
    with ExitStack() as stack:
        try:
            running = stack.enter_context(cluster(wanted))
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"no cluster can be emulated here: {reason_of(error)}", file=sys.stderr)
            return CANNOT
        try:
            return running.run(program, options.timeout).returncode
        except subprocess.TimeoutExpired:
            print(f"the program ran longer than {options.timeout:g} s and was killed", file=sys.stderr)
            return TIMED_OUT


if __name__ == "__main__":
    sys.exit(main())
