"""Whole frames: encode, decode, add, verify. Buffers are the caller's, the only work space is a Scratch.

Calls share nothing, so threads may code at the same time, each with its own Scratch; numpy gives up the
interpreter lock inside its loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from taccl.runtime.codecs import compiled
from taccl.runtime.codecs.checksum import checksum
from taccl.runtime.codecs.codec import (
    FLOATS,
    TILE,
    Array,
    Codec,
    Entry,
    FrameError,
    Scratch,
    TileError,
    dtype_of,
)
from taccl.runtime.codecs.frame import (
    DTYPE_CODES,
    Frame,
    Origin,
    check_tile,
    close,
    directory_bytes,
    most_bytes,
    read_directory,
    read_header,
    write_entry,
)
from taccl.runtime.dtypes import DType
from taccl.runtime.process_memory import address


def encode_into(
    codec: Codec,
    values: Array,
    wire: Array,
    scratch: Scratch,
    origin: Origin = Origin(),  # noqa: B008 - frozen
    tile: int = TILE,
) -> int:
    """Code (n,) values into `wire`, uint8 of at least `most_bytes`; gives the bytes of the frame.

    Values may be strided or misaligned, then they are copied tile by tile; the wire starts at a multiple of 8.
    Raises ValueError for a type that the codec does not take, or a wire that is too small.
    """
    dtype = dtype_of(values)
    check_tile(tile)
    _check_wire(wire)
    if dtype.name not in codec.dtypes:
        raise ValueError(f"codec {codec.name} takes {', '.join(codec.dtypes)}; not {dtype.name}")
    if len(wire) < most_bytes(codec, dtype, len(values), tile):
        raise ValueError(f"{len(wire)} bytes of wire; most_bytes says what {len(values)} values may need")
    if _is_plain(values) and wire.flags.writeable:
        ends = compiled.encode(
            codec, DTYPE_CODES[dtype.name], values, wire, scratch, (origin.rank, origin.chunk), tile
        )
        if ends is not None:
            return ends
    tiles = -(-len(values) // tile)
    place = directory_bytes(tiles)
    for index in range(tiles):
        part = values[index * tile : (index + 1) * tile]
        entry = codec.encode(_plain(part, scratch), wire[place:], scratch)
        end = place + entry.bytes
        write_entry(wire, index, entry, checksum(wire[place:end], scratch.tile))
        place = end
    close(wire, Frame(codec.code, dtype, len(values), place, tile, tiles, origin, 0), scratch)
    return place


def decode_into(
    codec: Codec, wire: Array, values: Array, scratch: Scratch, origin: Origin | None = None
) -> Frame:
    """Decode a frame into (n,) values of the frame's type and length.

    origin: when given, a frame of another one is refused. Raises FrameError for everything that is not
    exactly a frame of this codec; `values` may then hold some decoded tiles.
    """
    if decode_compiled(codec, wire, values, scratch, origin):
        return read_header(wire)
    frame = expected(codec, lambda: read_header(wire), origin)
    check_room(frame, dtype_of(values), values.nbytes)
    for index, entry, payload in _tiles(wire, frame, scratch):
        part = values[index * frame.tile : (index + 1) * frame.tile]
        plain = part if _is_plain(part) else _spare(part, scratch)
        _decode_tile(codec, frame, index, entry, payload, plain, scratch)
        if plain is not part:
            part[:] = plain
    return frame


def decode_compiled(
    codec: Codec, wire: Array, values: Array, scratch: Scratch, origin: Origin | None = None
) -> int:
    """As `decode_into` by compiled code alone: the bytes of the frame. 0: `decode_into` says why not, or does it."""
    _check_wire(wire)
    if not (_is_plain(values) and values.flags.writeable):
        return 0
    code = DTYPE_CODES[dtype_of(values).name]
    return compiled.decode(codec, code, wire, values, scratch, _numbers(origin)) or 0


def accumulate_into(
    codec: Codec, wire: Array, total: Array, scratch: Scratch, origin: Origin | None = None
) -> Frame:
    """Add the decoded values of a frame of floats to (n,) float32, in place: the sum at a chunk's owner.

    Each value is decoded to its own type, widened and added with one rounding. Raises as `decode_into`; the
    tiles before the wrong one have been added by then.
    """
    _check_wire(wire)
    frame = expected(codec, lambda: read_header(wire), origin)
    if total.dtype == np.float32 and total.ndim == 1 and _is_plain(total) and total.flags.writeable:
        code = DTYPE_CODES[frame.dtype.name]
        done = compiled.accumulate(codec, code, wire, total, scratch, _numbers(origin))
        if done:
            return frame
        if done is not None:  # some tiles are added; this one says which is wrong
            decode_into(codec, wire, np.empty(frame.elements, frame.dtype.numpy), scratch, origin)
            raise AssertionError("compiled code refuses a frame that is right")
    if total.dtype != np.float32 or len(total) != frame.elements or frame.dtype.name not in FLOATS:
        raise FrameError(
            f"frame from {frame.origin}: {frame.elements} values of {frame.dtype.name}, they cannot be added "
            f"to {len(total)} of {total.dtype}"
        )
    decoded = np.empty(0, np.uint8) if not frame.tiles else _spare_bytes(frame, scratch)
    for index, entry, payload in _tiles(wire, frame, scratch):
        part = total[index * frame.tile : (index + 1) * frame.tile]
        values = decoded.view(frame.dtype.numpy)[: len(part)]
        _decode_tile(codec, frame, index, entry, payload, values, scratch)
        if frame.dtype.name == "bfloat16":
            wide = scratch.wide[: len(part)]
            np.copyto(wide, values.view(np.uint16))
            np.left_shift(wide, np.uint32(16), out=wide)
            np.add(part, wide.view(np.float32), out=part)
        else:
            np.add(part, values, out=part)
    return frame


def verify(wire: Array, scratch: Scratch, origin: Origin | None = None) -> Frame:
    """Check every checksum of a frame without decoding it, as a relay may. Raises FrameError."""
    _check_wire(wire)
    frame = read_header(wire)
    _check_origin(frame, origin)
    for _ in _tiles(wire, frame, scratch):
        pass
    return frame


def expected(codec: Codec, read: Callable[[], Frame], origin: Origin | None) -> Frame:
    """The header that `read` gives, if it is of this codec and origin. Raises FrameError."""
    try:
        frame = read()
    except FrameError as error:
        raise FrameError(f"from {origin}: {error}" if origin else str(error)) from None
    _check_origin(frame, origin)
    if frame.codec != codec.code or frame.dtype.name not in codec.dtypes:
        raise FrameError(
            f"frame from {frame.origin}: {frame.dtype.name} coded by codec {frame.codec}, expected "
            f"{codec.name} ({codec.code})"
        )
    return frame


def check_room(frame: Frame, dtype: DType, nbytes: int) -> None:
    """Raise FrameError unless the values of a frame are of a type and fill `nbytes` bytes exactly."""
    if frame.dtype != dtype or frame.elements * dtype.bytes != nbytes:
        raise FrameError(
            f"frame from {frame.origin}: {frame.elements} values of {frame.dtype.name}, expected "
            f"{nbytes // dtype.bytes} of {dtype.name}"
        )


def _numbers(origin: Origin | None) -> tuple[int, int] | None:
    return None if origin is None else (origin.rank, origin.chunk)


def _check_origin(frame: Frame, origin: Origin | None) -> None:
    if origin is not None and frame.origin != origin:
        raise FrameError(f"frame from {frame.origin} where one from {origin} was expected")


def _check_wire(wire: Array) -> None:
    if wire.dtype != np.uint8 or wire.ndim != 1 or not wire.flags.c_contiguous or address(wire) % 8:
        raise ValueError("a wire is a contiguous uint8 array that starts at a multiple of 8 bytes")


def _tiles(wire: Array, frame: Frame, scratch: Scratch) -> Iterator[tuple[int, Entry, Array]]:
    """(index, entry, payload) of every tile whose checksum is right."""
    directory = read_directory(wire, frame, scratch)
    for index, entry in enumerate(directory.entries):
        payload = wire[directory.places[index] : directory.places[index + 1]]
        if checksum(payload, scratch.tile) != directory.checksums[index]:
            raise FrameError(
                f"frame from {frame.origin}, tile {index}: the data are damaged, their checksum differs",
                index,
            )
        yield index, entry, payload


def _decode_tile(
    codec: Codec, frame: Frame, index: int, entry: Entry, payload: Array, values: Array, scratch: Scratch
) -> None:
    try:
        codec.decode(entry, payload, values, scratch)
    except TileError as error:
        raise FrameError(f"frame from {frame.origin}, tile {index}: {error}", index) from None


def _is_plain(values: Array) -> bool:
    return bool(values.flags.c_contiguous and values.flags.aligned)


def _plain(values: Array, scratch: Scratch) -> Array:
    if _is_plain(values):
        return values
    copy = _spare(values, scratch)
    copy[:] = values
    return copy


def _spare(values: Array, scratch: Scratch) -> Array:
    return scratch.values[: values.nbytes].view(values.dtype)


def _spare_bytes(frame: Frame, scratch: Scratch) -> Array:
    return scratch.values[: frame.tile * frame.dtype.bytes]
