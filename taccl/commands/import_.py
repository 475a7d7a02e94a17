"""`taccl import`: another tool's description of a machine as a profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import files
from taccl.commands.options import write_output
from taccl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from fractions import Fraction

    from taccl.profiles.importers.machine import Imported

_MOST_NODES = 4096


@click.group("import")
def command() -> None:
    """Turn another tool's description of a machine into a profile.

    What such a description lacks (latencies, often rates) is assumed; the profile's `source` says what. To
    measure instead, use `taccl profile`.
    """


def _common(function: Callable[..., None]) -> Callable[..., None]:
    """The argument and options that all importers share."""
    options: list[Any] = [
        click.argument("file", type=click.Path(dir_okay=False)),
        click.option(
            "-o", "--output", default="-", show_default=True, metavar="PROFILE", shell_complete=files,
            help="Profile to write (YAML); - is standard output.",
        ),
        click.option(
            "--nodes", type=click.IntRange(1, _MOST_NODES), default=1, show_default=True,
            help="How many such machines the cluster has.",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


@command.command("nccl")
@_common
def import_nccl(file: str, output: str, nodes: int) -> None:
    """NCCL's or RCCL's topology XML.

    Any program that uses NCCL writes it when NCCL_TOPO_DUMP_FILE=topology.xml is set.
    """
    from taccl.profiles.importers.nccl_xml import MAX_BYTES, read_nccl_xml
    from taccl.profiles.yaml_reader import read_text

    _write(read_nccl_xml(read_text(file, 2 * MAX_BYTES), file, nodes), output)


@command.command("nvidia-smi")
@_common
@click.option("--nvlink", metavar="RATE", help="Rate of one NVLink each way, e.g. 25GB/s (default: assumed).")
@click.option("--pcie", metavar="RATE", help="Rate of PCIe each way, e.g. 24GB/s (default: assumed).")
@click.option("--nic", metavar="RATE", help="Rate of a NIC, e.g. 200Gbit/s (default: assumed).")
def import_nvidia_smi(
    file: str, output: str, nodes: int, nvlink: str | None, pcie: str | None, nic: str | None
) -> None:
    """The matrix of `nvidia-smi topo -m`.

    It gives the classes of links and no rates: those are assumed, unless you give them.
    """
    from taccl.profiles.importers.nvidia_smi import MAX_BYTES, read_nvidia_smi
    from taccl.profiles.yaml_reader import read_text

    imported = read_nvidia_smi(
        read_text(file, 2 * MAX_BYTES),
        file,
        nodes,
        nvlink_gb_per_s=_rate("--nvlink", nvlink),
        pcie_gb_per_s=_rate("--pcie", pcie),
        nic_gb_per_s=_rate("--nic", nic),
    )
    _write(imported, output)


@command.command("taccl")
@_common
@click.option(
    "--chunk-bytes", default="1MB", show_default=True, metavar="SIZE",
    help="The chunk size that the file's costs are for.",
)  # fmt: skip
@click.option(
    "--scale", default="1", show_default=True, metavar="NUMBER",
    help="What the file's costs were multiplied by, to survive rounding.",
)  # fmt: skip
@click.option(
    "--layout", type=click.Choice(["ndv2", "dgx2", "hub-and-spoke", "custom"]),
    help="The topology that TACCL was called with (default: told from the file).",
)  # fmt: skip
def import_taccl(
    file: str, output: str, nodes: int, chunk_bytes: str, scale: str, layout: str | None
) -> None:
    """TACCL's topology JSON.

    Its costs are for one chunk, often scaled; say both: its examples for 1 KB need --chunk-bytes 1KB
    --scale 100, those for 1 MB neither.
    """
    from taccl.profiles.importers.taccl_json import read_taccl_json
    from taccl.profiles.yaml_reader import read_text

    size = _quantity("--chunk-bytes", chunk_bytes, "bytes")
    if size.denominator != 1:
        raise UsageError(f"--chunk-bytes: {chunk_bytes} is not a whole number of bytes")
    imported = read_taccl_json(
        read_text(file), file, nodes, size.numerator, _quantity("--scale", scale, ""), layout or ""
    )
    _write(imported, output)


def _rate(option: str, text: str | None) -> Fraction | None:
    """GB/s of a rate given on the command line."""
    if text is None:
        return None
    from fractions import Fraction

    us_per_mb = _quantity(option, text, "us/MB")
    if not Fraction(1, 10**6) <= us_per_mb <= 10**9:
        raise UsageError(f"{option}: {text} must be from 1 kB/s to 10^9 GB/s")
    return 1000 / us_per_mb


def _quantity(option: str, text: str, unit: str) -> Fraction:
    from taccl.profiles.quantity import quantity

    try:
        value = quantity(text, unit)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error
    if not 0 < value <= 10**15:
        raise UsageError(f"{option}: {text} must be above 0 and at most 10^15")
    return value


def _write(imported: Imported, output: str) -> None:
    for note in imported.notes:
        click.echo(f"taccl: {note}", err=True)
    write_output(output, imported.text)
    if output != "-":
        topology = imported.topology
        summary = f"{topology.ranks} ranks, {len(topology.links)} links, {len(topology.ports)} ports"
        click.echo(f"taccl: wrote {output}: {summary}", err=True)
