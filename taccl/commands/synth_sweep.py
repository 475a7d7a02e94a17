"""`taccl synth --sweep`: one collective over many sizes, a program for each range of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.options import check_folder, print_json, write_output
from taccl.errors import UsageError

if TYPE_CHECKING:
    from taccl.produce import Order
    from taccl.synth.request import Progress


def run_sweep(
    order: Order,
    sizes: str,
    folder: str | None,
    as_json: bool,
    on_progress: Callable[[Progress], None] | None,
    should_stop: Callable[[], bool],
) -> None:
    """Sweep, write the programs into a folder if one is named, and print the table or the JSON document."""
    from taccl.cluster_file import size_name
    from taccl.sweep import document, sizes_of, sweep

    if folder == "-":
        raise UsageError("--sweep makes several files: -o names a folder for them")
    if folder is not None and Path(folder).suffix in (".xml", ".json"):
        raise UsageError(f"--sweep makes several files: -o names a folder for them, not the file {folder}")
    wanted = sizes_of(sizes)
    if folder is not None:
        check_folder(Path(folder))

    def announce(size: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"taccl: {order.collective} of {size_name(size)}", err=True)

    found = sweep(order, wanted, announce, on_progress, should_stop)
    paths: list[str] = []
    if folder is not None:
        from taccl.synth.msccl_xml import write_xml

        for member in found.members:
            path = str(Path(folder) / f"{order.collective}-{size_name(member.made_for_bytes)}.xml")
            write_output(path, write_xml(member.program()))
            paths.append(path)
        older = sorted({str(p) for p in Path(folder).glob(f"{order.collective}-*.xml")} - set(paths))
        if older:
            what = (
                "was not written by this call, and its sizes"
                if len(older) == 1
                else ("were not written by this call, and their sizes")
            )
            click.echo(
                f"taccl: warning: {', '.join(older)} {what} may overlap with those of what was: remove what is out "
                "of date",
                err=True,
            )
    for warning in sorted({w for member in found.members for w in member.product.warnings}):
        click.echo(f"taccl: warning: {warning}", err=True)
    if as_json:
        print_json(document(found, paths))
    else:
        click.echo(_table(document(found, paths)))


def _table(found: dict[str, Any]) -> str:
    from taccl.synth.gap import gap_text

    lines = [f"{'size (bytes)':>14} {'time (us)':>12} {'bound (us)':>12} {'gap':>9}  algorithm"]
    for point in found["sizes"]:
        lines.append(
            f"{point['size_bytes']:>14} {point['time_us']:>12.3f} {point['lower_bound_us']:>12.3f} "
            f"{gap_text(point['gap']):>9}  {point['algorithm']}"
        )
    lines.append("")
    lines.append(
        f"{'algorithm':>14} {'from (bytes)':>14} {'to (bytes)':>14} {'made for':>14}  engine, chunks per block"
    )
    for number, entry in enumerate(found["algorithms"]):
        written = f", {entry['path']}" if entry["path"] else ""
        lines.append(
            f"{number:>14} {entry['min_bytes']:>14} {entry['max_bytes']:>14} {entry['made_for_bytes']:>14}  "
            f"{entry['engine']}, {entry['partition']}{written}"
        )
    return "\n".join(lines)
