"""nccl-tests' table and JSON, with the reference and the prediction in columns after the standard ones."""

from __future__ import annotations

from collections.abc import Mapping

from taccl.runtime.bench import Measurement, Row
from taccl.runtime.bench_settings import MODES, RAW, Settings
from taccl.synth.collective import bus_factor


def codes(settings: Settings) -> bool:
    """Whether the columns of codecs are shown."""
    return settings.codecs != (RAW,)


def header(reference: str | None, predicted: bool, coded: bool = False) -> list[str]:
    """Three comment lines, as nccl-tests prints them, with our columns behind. reference: whose times they show."""
    group = f"{'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}"
    units = f"{'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':>6}"
    first = f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}  {'out-of-place':^31}  {'in-place':^31}"
    second = f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}  {group}  {group}"
    third = f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}  {units}  {units}"
    if coded:
        first += f"  {'messages of frames':^55}"
        second += f"  {'codec':>7}  {'wire':>12}  {'ratio':>6}  {'maxerr':>9}  {'of':>9}"
        third += f"  {'':>7}  {'(B)':>12}  {'':>6}  {'':>9}  {'':>9}"
    if reference is not None:
        first += "".join(f"  {f'{reference} {mode}'.strip():^16}" for mode in ("out-of-place", "in-place"))
        second += f"  {'time':>7}  {'speedup':>7}" * 2
        third += f"  {'(us)':>7}  {'':>7}" * 2
    if predicted:
        first += f"  {'model':>9}"
        second += f"  {'predicted':>9}"
        third += f"  {'(us)':>9}"
    return [line.rstrip() for line in (first, second, third)]


def line(
    row: Row, name: str, ranks: int, reference: bool, predicted_us: float | None, coded: bool = False
) -> str:
    """One line of the table; a mode that was not run shows n/a."""
    root = row.root
    text = (
        f"{row.size_bytes:>12}  {row.count:>12}  {row.dtype.nccl_name:>8}  {row.op or 'none':>6}  {root:>6}"
    )
    for mode in MODES:
        found = row.modes.get(mode)
        if found is None:
            text += f"  {'n/a':>7}  {'n/a':>6}  {'n/a':>6}  {'n/a':>6}"
            continue
        alg, bus = bandwidths(row, found, name, ranks)
        wrong = "N/A" if found.wrong is None else f"{found.wrong:g}"
        text += f"  {microseconds(found.time.mean)}  {alg:>6.2f}  {bus:>6.2f}  {wrong:>6}"
    if coded:
        found = next(iter(row.modes.values()))
        values, wire = found.coded_bytes
        error = max(one.max_error for one in row.modes.values())
        largest = max(one.largest for one in row.modes.values())
        worst = "N/A" if found.wrong is None else f"{error:.2e}" if error else "0"
        scale = f"{largest:.2e}" if largest >= 0 and found.wrong is not None else "N/A"
        text += f"  {row.codec:>7}  {wire:>12}  {ratio(values, wire):>6.3f}  {worst:>9}  {scale:>9}"
    if reference:
        for mode in MODES:
            found = row.modes.get(mode)
            other = found.reference if found is not None else None
            if found is None or other is None:
                text += f"  {'n/a':>7}  {'n/a':>7}"
            else:
                text += f"  {microseconds(other.mean)}  {other.mean / found.time.mean:>7.2f}"
    if predicted_us is not None:
        text += f"  {predicted_us:>9.2f}"
    return text


def ratio(values_bytes: int, wire_bytes: int) -> float:
    """Bytes of values for one on the wire; 1 where nothing was coded."""
    return values_bytes / wire_bytes if wire_bytes else 1.0


def microseconds(value: float) -> str:
    """A time in seven columns with the digits that nccl-tests shows."""
    return f"{value:>7.0f}" if value >= 10000 else f"{value:>7.1f}" if value >= 100 else f"{value:>7.2f}"


def bandwidths(row: Row, found: Measurement, name: str, ranks: int) -> tuple[float, float]:
    """(algbw, busbw) in GB/s, GB = 10^9 bytes; 0 when nothing was moved."""
    if found.time.mean <= 0:
        return 0.0, 0.0
    alg = row.size_bytes / found.time.mean / 1e3
    return alg, alg * float(bus_factor(name, ranks))


def mode_json(row: Row, found: Measurement | None, name: str, ranks: int) -> dict[str, object] | None:
    """One mode of a row with nccl-tests' keys, then ours; null for a mode that was not run."""
    if found is None:
        return None
    alg, bus = bandwidths(row, found, name, ranks)
    other = found.reference
    return {
        "time": round(found.time.mean, 3),
        "alg_bw": round(alg, 6),
        "bus_bw": round(bus, 6),
        "nwrong": found.wrong,
        "min_time": round(found.time.least, 3),
        "median_time": round(found.time.median, 3),
        "outside_bytes": found.outside,
        "max_error": finite(found.max_error),
        "largest_value": found.largest if found.largest >= 0 else None,
        "coded_value_bytes": found.coded_bytes[0],
        "coded_wire_bytes": found.coded_bytes[1],
        "wire_ratio": round(ratio(*found.coded_bytes), 6),
        "messages_with_turns": found.turns,
        "no_turns": found.no_turns or None,
        "reference_time_us": None if other is None else round(other.mean, 3),
        "reference_min_time_us": None if other is None else round(other.least, 3),
        "reference_median_time_us": None if other is None else round(other.median, 3),
    }


def finite(value: float) -> float | str:
    """JSON has no infinity: an error that is not a number is the string "inf"."""
    return value if value != float("inf") else "inf"


def row_json(row: Row, name: str, ranks: int, predicted_us: float | None) -> dict[str, object]:
    """One row with nccl-tests' keys, then ours."""
    modes: Mapping[str, Measurement] = row.modes
    return {
        "size": row.size_bytes,
        "count": row.count,
        "type": row.dtype.nccl_name,
        "redop": row.op or "none",
        "root": row.root,
        "out_of_place": mode_json(row, modes.get("out_of_place"), name, ranks),
        "in_place": mode_json(row, modes.get("in_place"), name, ranks),
        "dtype": row.dtype.name,
        "wire_bytes": row.wire_bytes,
        "codec": row.codec,
        "predicted_time_us": predicted_us,
    }
