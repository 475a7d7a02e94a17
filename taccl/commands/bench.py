"""`taccl bench`: measurements that need no ranks. `taccl bench codecs`: what compression would gain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import files
from taccl.commands.options import Size, print_json
from taccl.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from taccl.runtime.codecs.codec import Codec
    from taccl.runtime.codecs.measure import Measurement
    from taccl.runtime.codecs.samples import Sample

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")


@click.group("bench")
def command() -> None:
    """Measure what codecs would gain on your data, on one core.

    Programs on real ranks are measured by `taccl run`.
    """


@command.command("codecs")
@click.argument("paths", nargs=-1, metavar="[FILE]...", shell_complete=files)
@click.option("--codec", "names", metavar="NAMES", help="Some codecs, with commas. Default: all that fit.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="What a raw file holds; ignored for files that say it."
)
@click.option(
    "--as", "as_dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Round floats to this type first, as training does before it sends them.",
)  # fmt: skip
@click.option("--chunk", type=Size(), default="4MiB", show_default=True, help="Bytes of values in a frame.")
@click.option(
    "--limit", type=Size(), default="64MiB", show_default=True,
    help="Most bytes of one type to take from a file, spread evenly over it.",
)  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(1, 1000), default=3, show_default=True, help="Take the best of."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def codecs(
    paths: tuple[str, ...],
    names: str | None,
    dtype: str | None,
    as_dtype: str | None,
    chunk: int,
    limit: int,
    repeats: int,
    as_json: bool,
) -> None:
    """Say how much smaller and how fast codecs make the tensors of files.

    FILE is a .npy, a .safetensors, or raw values of one type (--dtype). Without a FILE: normal values. Speeds are
    GB/s of uncompressed bytes in CPU time of one core, checksums included; "pays below" is the link rate under
    which a message that is coded, sent and decoded in turn is quicker than one that is not ("alone"), or many
    that overlap ("piped").
    """
    import numpy as np

    from taccl.runtime.codecs import CODECS, get
    from taccl.runtime.codecs.measure import copy_gbps, measure
    from taccl.runtime.codecs.samples import Sample, invalid, read_samples, synthetic
    from taccl.runtime.dtypes import DTYPES as TYPES

    chosen = list(CODECS.values()) if names is None else [get(name) for name in names.split(",")]
    given = None if dtype is None else TYPES[dtype]
    samples, skipped = [], []
    for path in paths:
        found, others = read_samples(path, given, limit)
        samples += found
        # A .npy holds one array, of the file's name.
        skipped += [other if other.startswith(f"{path} (") else f"{path}: {other}" for other in others]
    if not paths:
        samples = [synthetic(TYPES[name], limit) for name in ("bfloat16", "float32")]
    if as_dtype is not None:
        target = TYPES[as_dtype]
        with np.errstate(all="ignore"):
            samples = [
                Sample(s.name, target, s.values.astype(target.numpy), s.values.size * target.bytes)
                if s.dtype.name in ("float32", "float64", "float16", "bfloat16") else s
                for s in samples
            ]  # fmt: skip
    if not samples:
        raise invalid(
            paths[0],
            "C005",
            "there are no values of a known type: " + ("; ".join(skipped) or "nothing is in there"),
            f"known types: {', '.join(TYPES)}",
        )

    copy = copy_gbps(16 << 20, 5 * repeats)
    missing: dict[str, str] = {}
    rows: list[tuple[Sample, Measurement]] = []
    for sample in samples:
        for codec in chosen:
            if sample.dtype.name not in codec.dtypes:
                continue
            try:
                rows.append((sample, measure(codec, sample.values, chunk, repeats)))
            except EnvironmentProblem as problem:
                if names is not None:
                    raise
                missing[codec.name] = str(problem)
    if not rows:
        raise UsageError(_nothing_fits(chosen, samples))
    notes = [f"left out {name}" for name in skipped] + list(missing.values())
    if as_json:
        print_json(_document(rows, copy, chunk, notes))
        return
    for line in _table(rows):
        click.echo(line)
    click.echo(f"A copy in memory: {copy:.1f} GB/s. Errors: L2 relative to the values; largest, absolute.")
    for note in notes:
        click.echo(note, err=True)


def _nothing_fits(chosen: list[Codec], samples: list[Sample]) -> str:
    types = ", ".join(sorted({sample.dtype.name for sample in samples}))
    takes = "; ".join(f"{codec.name}: {', '.join(codec.dtypes)}" for codec in chosen)
    return f"none of these codecs takes {types} ({takes})"


def _table(rows: list[tuple[Sample, Measurement]]) -> list[str]:
    lines = []
    before = None
    for sample, row in rows:
        if sample is not before:
            before = sample
            size_bytes = sample.values.nbytes
            size = f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e5 else f"{size_bytes} bytes"
            lines.append(f"{sample.name}: {size} of {sample.dtype.name}")
            lines.append(
                f"  {'codec':<9}{'ratio':>7}{'encode':>9}{'decode':>9}{'rel. error':>12}{'largest':>10}"
                f"{'pays below, alone':>20}{'piped':>7}"
            )
            lines.append(f"  {'':<9}{'':>7}{'GB/s':>9}{'GB/s':>9}{'':>12}{'':>10}{'Gb/s':>20}{'Gb/s':>7}")
        error = (
            f"{row.relative_error:>12.1e}{row.largest_error:>10.1e}"
            if row.relative_error
            else f"{'0':>12}{'0':>10}"
        )
        pays = [f"{rate:.1f}" if (rate := row.pays_below_gbps(piped)) else "never" for piped in (False, True)]
        lines.append(
            f"  {row.codec:<9}{row.ratio:>7.2f}{row.encode_gbps:>9.2f}{row.decode_gbps:>9.2f}{error}"
            f"{pays[0]:>20}{pays[1]:>7}"
        )
    return lines


def _document(
    rows: list[tuple[Sample, Measurement]], copy: float, chunk: int, notes: list[str]
) -> dict[str, Any]:
    return {
        "schema": "taccl/bench-codecs/v1",
        "chunk_bytes": chunk,
        "copy_gbps": copy,
        "results": [
            {
                "file": sample.name,
                "dtype": row.dtype,
                "file_bytes": sample.file_bytes,
                "values_bytes": row.values_bytes,
                "codec": row.codec,
                "wire_bytes": row.wire_bytes,
                "ratio": row.ratio,
                "encode_gbps": row.encode_gbps,
                "decode_gbps": row.decode_gbps,
                "relative_error": row.relative_error,
                "largest_error": row.largest_error,
                "pays_below_gbit_per_s": row.pays_below_gbps(False),
                "pays_below_piped_gbit_per_s": row.pays_below_gbps(True),
            }
            for sample, row in rows
        ],
        "notes": notes,
    }
