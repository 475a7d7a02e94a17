"""Options of every command that runs programs on real ranks: how messages travel, and when the job is ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from taccl.commands.completion import files, topologies
from taccl.commands.options import Quantity
from taccl.commands.run_devices import DEVICE_TRANSPORTS, HOST_TRANSPORTS

F = TypeVar("F", bound=Callable[..., Any])

TRANSPORTS = ("auto", *HOST_TRANSPORTS, *DEVICE_TRANSPORTS)
DEADLINE_S = 30.0  # default; see bench.patience_s

_OPTIONS = (
    click.option(
        "--profile",
        "--topology",
        "topology",
        metavar="T",
        shell_complete=topologies,
        help="Predict times on this topology; a native file brings its own.",
    ),
    click.option(
        "--accumulate",
        type=click.Choice(("type", "float32")),
        default="type",
        show_default=True,
        help="Reduce float16 and bfloat16 in their own type at every step, or in float32 until the end.",
    ),
    click.option(
        "--transport",
        type=click.Choice(TRANSPORTS),
        default="auto",
        show_default=True,
        help="How messages travel; a forced one fails rather than falls back.",
    ),
    click.option(
        "--buffers",
        type=click.Choice(("private", "shared")),
        default="private",
        show_default=True,
        help="Memory of the collective's buffers: a program's own, or the executor's, which other ranks read.",
    ),
    click.option(
        "--pace/--no-pace",
        default=True,
        show_default=True,
        help="Between nodes keep the program's order of messages, and little of them on its way; --no-pace leaves "
        "them to MPI.",
    ),
    click.option(
        "--turns/--no-turns",
        default=None,
        help="With --pace: messages that share an uplink take the turns that the model of the cluster gives "
        "them, where --profile or a native file has one. Default: they do, unless `taccl choose` wrote into the file "
        "that it is quicker without.",
    ),
    click.option(
        "--codec-links",
        type=click.Choice(("nodes", "all", "planned")),
        help="With --codec: code messages from node to node (the default), all, or those that the file plans.",
    ),
    click.option(
        "--data",
        metavar="FILE",
        shell_complete=files,
        help="Run on the values of a .npy or .safetensors file, or of raw ones of the first type of -d.",
    ),
    click.option(
        "--device",
        type=click.Choice(("auto", "host", "cuda")),
        default="host",
        show_default=True,
        help="Where the buffers are.",
    ),
    click.option(
        "--deadline",
        type=Quantity("s", 0.1, 1e6),
        metavar="S",
        help="Seconds without progress after which the job is ended. Default: 30, or a second for each 5 MB of the "
        "size where that is longer. MPI may take 10 s to start in any case.",
    ),
)


def execution_options(command: F) -> F:
    """Decorate a command with the options of execution."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
