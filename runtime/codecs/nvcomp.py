"""Plug-in: nvCOMP's ANS in the frames of this package, where NVIDIA's library is installed; device memory only.

nvCOMP has a licence of its own and is never installed by taccl: `pip install nvidia-nvcomp-cu12` (or -cu13). A tile is
the bytes of its stream (u64, then 8 zeros) and the stream in nvCOMP's own format, which only nvCOMP decodes; raw where
that is not smaller. nvCOMP's decoders expect sound streams, so the frame's checksums are checked before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.codecs.codec import (
    CODED,
    EXACT,
    RAW,
    Array,
    Codec,
    Entry,
    FrameError,
    Scratch,
    aligned,
    raw_bytes,
)
from taccl.runtime.codecs.coding import check_room
from taccl.runtime.codecs.device import (
    DeviceScratch,
    check_call,
    close_on_device,
    entries_of,
    launch,
    raise_for_status,
    read_on_device,
)
from taccl.runtime.codecs.frame import ENTRY, Frame, Origin, directory_bytes
from taccl.runtime.dtypes import DTYPES, DType

PREFIX = 16
# How nvCOMP's ANS shall look at the bytes; the others are bytes to it.
DATA_TYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<f2"}
OF_FLOATS = 6  # the first version that looks at float32 as such


def load() -> Any:
    """The module nvidia.nvcomp. Raises EnvironmentProblem without it."""
    try:
        from nvidia import nvcomp
    except ImportError as error:
        raise EnvironmentProblem(
            f"codec nvcomp-ans needs NVIDIA's nvCOMP ({error}); pip install nvidia-nvcomp-cu13 (or -cu12)"
        ) from None
    return nvcomp


def _only_on_devices(*_: object) -> Any:
    raise EnvironmentProblem("codec nvcomp-ans works on device memory only; on the host take xw")


def encode(values: Array, wire: Array, scratch: Scratch) -> Entry:
    """Raises EnvironmentProblem: nvCOMP has no path on the host."""
    found: Entry = _only_on_devices()
    return found


def decode(entry: Entry, wire: Array, values: Array, scratch: Scratch) -> None:
    """Raises EnvironmentProblem: nvCOMP has no path on the host."""
    _only_on_devices()


CODEC = Codec("nvcomp-ans", 128, EXACT, tuple(DTYPES), False, raw_bytes, encode, decode)


def encode_with_nvcomp(
    nvcomp: Any,
    dtype: DType,
    values: Any,
    wire: Any,
    scratch: DeviceScratch,
    origin: Origin = Origin(),  # noqa: B008 - frozen
) -> int:
    """As `encode_on_device`. nvcomp: from `load`."""
    count, tiles = check_call(CODEC, dtype, values, wire, scratch)
    xp = scratch.cuda.xp
    step = scratch.tile * dtype.bytes
    parts = [values[first : first + step] for first in range(0, len(values), step)]
    scratch.cuda.synchronize()  # nvCOMP works on a stream of its own
    streams = _codec(nvcomp, dtype).encode(nvcomp.as_arrays(parts)) if parts else []
    rows = np.zeros(tiles, ENTRY)
    place = directory_bytes(tiles)
    for index, part in enumerate(parts):
        stream = xp.asarray(streams[index]).view(np.uint8)
        here = len(part) // dtype.bytes
        size = aligned(PREFIX + len(stream))
        mode = CODED if size < raw_bytes(dtype, here) else RAW
        prefix = np.zeros(PREFIX if mode == CODED else 0, np.uint8)
        if mode == CODED:
            prefix[:8].view(np.uint64)[0] = len(stream)
        else:
            size, stream = raw_bytes(dtype, here), part
        scratch.cuda.upload(wire[place : place + len(prefix)], prefix)
        end = place + len(prefix) + len(stream)
        wire[place + len(prefix) : end] = stream
        scratch.cuda.upload(wire[end : place + size], np.zeros(place + size - end, np.uint8))
        rows[index] = (0, size, here, mode, 0, 0, 0, 0, 0)
        place += size
    if tiles:
        entries = entries_of(wire, tiles)
        scratch.cuda.upload(entries, rows.view(np.uint8))
        launch(scratch, "seal", tiles, values, count, wire, directory_bytes(tiles), entries)
    return close_on_device(CODEC, dtype, count, wire, scratch, origin)


def decode_with_nvcomp(
    nvcomp: Any,
    dtype: DType,
    wire: Any,
    values: Any,
    scratch: DeviceScratch,
    origin: Origin | None = None,
) -> Frame:
    """As `decode_on_device`. nvcomp: from `load`. Raises FrameError."""
    frame, directory = read_on_device(CODEC, wire, scratch, origin)
    check_room(frame, dtype, len(values))
    if not frame.tiles:
        return frame
    entries = entries_of(wire, frame.tiles)
    launch(scratch, "check", frame.tiles, values, frame.elements, wire, directory.places[0], entries)
    raise_for_status(frame, scratch)
    streams, targets = [], []
    for index, entry in enumerate(directory.entries):
        target = values[index * frame.tile * dtype.bytes : (index + 1) * frame.tile * dtype.bytes]
        place = directory.places[index]
        here = len(target) // dtype.bytes
        if entry == Entry(raw_bytes(dtype, here), RAW, kept=here):
            target[:] = wire[place : place + len(target)]
            continue
        prefix = np.zeros(PREFIX, np.uint8)
        if entry.bytes >= PREFIX:
            scratch.cuda.download(prefix, wire[place : place + PREFIX])
        length = int(prefix[:8].view(np.uint64)[0])
        if entry != Entry(aligned(PREFIX + length), CODED, kept=here) or length == 0:
            raise FrameError(
                f"frame from {frame.origin}, tile {index}: {entry.bytes} bytes do not hold a stream of {length}",
                index,
            )
        streams.append(wire[place + PREFIX : place + PREFIX + length])
        targets.append(target)
    if streams:
        scratch.cuda.synchronize()
        try:
            found = _codec(nvcomp, dtype).decode(nvcomp.as_arrays(streams))
        except (RuntimeError, ValueError) as error:
            raise FrameError(f"frame from {frame.origin}: nvCOMP cannot decode it: {error}") from None
        for index, target in enumerate(targets):
            decoded = scratch.cuda.xp.asarray(found[index]).view(np.uint8)
            if len(decoded) != len(target):
                raise FrameError(
                    f"frame from {frame.origin}: a stream of {len(decoded)} bytes, not {len(target)}"
                )
            target[:] = decoded
    scratch.cuda.synchronize()
    return frame


def _codec(nvcomp: Any, dtype: DType) -> Any:
    kind = DATA_TYPES.get(dtype.name, "|u1")
    version = str(getattr(nvcomp, "__version__", OF_FLOATS)).partition(".")[0]
    if kind == "<f4" and int(version) < OF_FLOATS:
        kind = "|u1"
    return nvcomp.Codec(algorithm="ANS", data_type=kind)
