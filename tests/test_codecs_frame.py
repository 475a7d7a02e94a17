"""Frames: fixed to the byte, every flipped bit noticed and placed, and nothing that crashes a decoder."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import twin  # noqa: F401 - a fixture

from taccl.runtime.codecs import (
    CODECS,
    Codec,
    FrameError,
    Origin,
    Scratch,
    accumulate_into,
    decode_into,
    encode_into,
    most_bytes,
    verify,
)
from taccl.runtime.codecs.checksum import BLOCK, checksum
from taccl.runtime.codecs.codec import dtype_of
from taccl.runtime.codecs.frame import ENTRY, HEADER_BYTES, directory_bytes, read_header
from taccl.runtime.dtypes import DTYPES

GOLDEN = json.loads((Path(__file__).parent / "golden" / "codecs.json").read_text())
SCRATCH = Scratch()
TILE = 256
NAMED = [codec for codec in CODECS.values() if codec.name != "zstd"]


def golden_values(name: str) -> np.ndarray:
    """700 values without a library's random numbers: three tiles, the second half zeros, one infinity."""
    step = np.arange(700, dtype=np.uint64)
    noise = (step * np.uint64(2654435761) >> np.uint64(7)) % np.uint64(65521)
    sizes = ((noise.astype(np.float64) - 32760) / 32768) ** 3
    values = np.where((step >= 256) & (step < 512) & (step % 2 == 0), 0, sizes)
    values[600] = np.inf
    return values.astype(np.float32).astype(DTYPES[name].numpy)


def framed(codec: Codec, values, origin: Origin = Origin(), tile: int = TILE) -> np.ndarray:  # noqa: B008
    wire = np.zeros(most_bytes(codec, dtype_of(values), len(values), tile), np.uint8)
    return wire[: encode_into(codec, values, wire, SCRATCH, origin, tile)].copy()


def reseal(wire: np.ndarray, tiles: int) -> None:
    """Make every checksum right again, as someone does who means harm."""
    start = directory_bytes(tiles)
    rows = wire[HEADER_BYTES : HEADER_BYTES + tiles * ENTRY.itemsize].view(ENTRY)
    place = start
    for row in rows:
        end = place + int(row["bytes"])
        if end <= len(wire) and not (end - place) % 8:
            row["checksum"] = checksum(wire[place:end], SCRATCH.tile)
        place = end
    wire[40:48].view(np.uint64)[0] = checksum(wire[HEADER_BYTES:start], SCRATCH.tile)
    wire[60:64].view(np.uint32)[0] = zlib.crc32(wire[:60].tobytes())


@pytest.mark.parametrize("key", GOLDEN)
def test_golden_frames(key):
    """The format does not change: what is coded today is what was coded when the file was written."""
    name, dtype = key.split()
    values = golden_values(dtype)
    wire = framed(CODECS[name], values, Origin(2, 7))
    assert wire.tobytes().hex() == "".join(GOLDEN[key])
    found = np.empty_like(values)
    decode_into(
        CODECS[name], np.frombuffer(bytes.fromhex("".join(GOLDEN[key])), np.uint8).copy(), found, SCRATCH
    )
    if CODECS[name].lossless:
        assert found.tobytes() == values.tobytes()


def test_golden_frames_hold_every_mode():
    modes = set()
    for key, lines in GOLDEN.items():
        rows = np.frombuffer(bytes.fromhex("".join(lines))[64 : 64 + 72], ENTRY)
        modes |= {(key.split()[0], int(row["mode"])) for row in rows}
    assert {("xw", 1), ("xw", 2), ("raw", 0)} <= modes


def test_header_is_the_documented_one():
    wire = framed(CODECS["xw"], golden_values("bfloat16"), Origin(2, 7))
    head = struct.unpack_from("<4sBBBBQQIIIIQ12sI", wire)
    assert head[:11] == (b"TCF1", 1, 1, 2, 0, 700, len(wire) - 64, 256, 3, 2, 7)
    assert head[12] == bytes(12) and head[13] == zlib.crc32(wire[:60].tobytes())


@pytest.mark.parametrize("codec", NAMED, ids=lambda codec: codec.name)
def test_every_flipped_bit_is_noticed_and_placed(codec):
    """All bits of header and directory, and many of the tiles; the message names rank, chunk and tile."""
    values = golden_values("float32")
    wire = framed(codec, values, Origin(5, 11))
    found = np.empty_like(values)
    rows = wire[64 : 64 + 72].view(ENTRY)
    ends = np.cumsum(rows["bytes"]) + directory_bytes(3)
    rng = np.random.default_rng(0)
    bits = [*range(8 * directory_bytes(3)), *rng.integers(8 * directory_bytes(3), 8 * len(wire), 300)]
    for bit in bits:
        damaged = wire.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError) as caught:
            decode_into(codec, damaged, found, SCRATCH, Origin(5, 11))
        assert "rank 5, chunk 11" in str(caught.value)
        if bit // 8 >= directory_bytes(3):
            tile = int(np.searchsorted(ends, bit // 8, side="right"))
            assert caught.value.tile == tile and f"rank 5, chunk 11, tile {tile}:" in str(caught.value)
    for bit in bits[:: len(bits) // 40]:
        damaged = wire.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            verify(damaged, SCRATCH)


def test_two_flipped_bits_are_noticed():
    """The promise of the checksum; without its fold, two flips of a word's top bit would cancel."""
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, 8 * 300).astype(np.uint8)
    work = np.empty(8 * BLOCK, np.uint8)
    before = checksum(content, work)
    bits = np.stack(
        [rng.integers(0, 300 * 64, 6000).reshape(-1, 2), rng.integers(0, 300, 6000).reshape(-1, 2) * 64 + 63]
    )
    for first, second in bits.reshape(-1, 2).tolist():
        damaged = content.copy()
        damaged[first // 8] ^= 1 << first % 8
        assert checksum(damaged, work) != before
        damaged[second // 8] ^= 1 << second % 8
        assert (checksum(damaged, work) != before) == (first != second)


def test_checksum_of_any_length_is_its_formula():
    rng = np.random.default_rng(0)
    work = np.empty(8 * BLOCK, np.uint8)
    for words in (0, 1, 2, 1000, BLOCK, BLOCK + 1, 2 * BLOCK + 5):
        content = rng.integers(0, 256, 8 * words).astype(np.uint8)
        expected = sum((2 * i + 1) * (w ^ w >> 32) for i, w in enumerate(content.view(np.uint64).tolist()))
        assert checksum(content, work) == expected % 2**64


def refused(codec: Codec, wire, values) -> str:
    with pytest.raises(FrameError) as caught:
        decode_into(codec, wire, values, SCRATCH)
    return str(caught.value)


def test_frames_that_were_not_expected_are_refused():
    values = golden_values("float32")
    wire = framed(CODECS["xw"], values, Origin(1, 2))
    found = np.empty_like(values)
    assert "expected q8" in refused(CODECS["q8"], wire, found)
    assert "700 values of float32, expected 699" in refused(CODECS["xw"], wire, found[:699])
    assert "expected 700 of bfloat16" in refused(CODECS["xw"], wire, np.empty(700, DTYPES["bfloat16"].numpy))
    assert "are there" in refused(CODECS["xw"], wire[:-16].copy(), found)
    assert "at least 64" in refused(CODECS["xw"], wire[:40].copy(), found)
    assert "no frame" in refused(CODECS["xw"], np.zeros(100, np.uint8), found)
    with pytest.raises(FrameError, match="rank 1, chunk 2 where one from rank 1, chunk 3"):
        decode_into(CODECS["xw"], wire, found, SCRATCH, Origin(1, 3))
    # A longer buffer is fine: receives are posted for the largest frame.
    decode_into(CODECS["xw"], np.concatenate([wire, np.full(64, 7, np.uint8)]), found, SCRATCH)
    assert found.tobytes() == values.tobytes()


@pytest.mark.parametrize("place,value,message", [
    (4, 2, "format version 2"), (6, 99, "does not know"), (7, 1, "does not know"), (50, 1, "does not know"),
    (24, 1, "do not make 700"), (28, 4, "do not make 700"), (8, 0, "do not make"), (16, 1, "bytes by its header"),
])  # fmt: skip
def test_headers_that_are_sealed_but_wrong_are_refused(place, value, message):
    values = golden_values("float32")
    wire = framed(CODECS["raw"], values)
    wire[place] = value
    wire[60:64].view(np.uint32)[0] = zlib.crc32(wire[:60].tobytes())
    assert message in refused(CODECS["raw"], wire, np.empty_like(values))


def corrupt(rng: np.random.Generator, wire: np.ndarray) -> np.ndarray:
    """A sealed frame with one to six bytes changed, mostly in the directory, where structure is."""
    wire = wire.copy()
    for _ in range(rng.integers(1, 7)):
        end = HEADER_BYTES + 72 if rng.random() < 0.6 else len(wire)
        wire[rng.integers(HEADER_BYTES, end)] = rng.choice([rng.integers(0, 256), 0, 1, 255])
    reseal(wire, 3)
    return wire


@pytest.mark.parametrize("key", GOLDEN)
def test_sealed_garbage_crashes_nothing(key):
    """Frames whose checksums are right and whose directory or data are not: decoded or refused, nothing else.

    What lies before and behind the values stays as it was.
    """
    name, dtype = key.split()
    values = golden_values(dtype)
    wire = framed(CODECS[name], values)
    rng = np.random.default_rng(len(wire))
    targets = (DTYPES[dtype].numpy, decode_into), (np.dtype(np.float32), accumulate_into)
    outcomes = set()
    for step in range(300):
        target, decode = targets[step % 2]
        guarded = np.full(len(values) + 64, 42).astype(target)
        try:
            with np.errstate(all="ignore"):
                decode(CODECS[name], corrupt(rng, wire), guarded[32:-32], SCRATCH)
            outcomes.add("decoded")
        except FrameError:
            outcomes.add("refused")
        assert (guarded[:32] == 42).all() and (guarded[-32:] == 42).all()
    assert outcomes == {"decoded", "refused"}


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_refused(content, headed):
    """Noise, with and without a header that is sound in itself."""
    wire = np.frombuffer(content.ljust(80, b"\0"), np.uint8).copy()
    if headed:
        wire[:8] = np.frombuffer(b"TCF1\x01\x01\x01\x00", np.uint8)
        wire[48:60] = 0
        wire[60:64].view(np.uint32)[0] = zlib.crc32(wire[:60].tobytes())
    with pytest.raises(FrameError):
        decode_into(CODECS["xw"], wire, np.empty(100, np.float32), SCRATCH)


def test_sealed_garbage_of_zstd():
    pytest.importorskip("zstandard")
    values = (np.arange(700) * 7919) % 300
    wire = framed(CODECS["zstd"], values)
    rng = np.random.default_rng(0)
    for _ in range(300):
        try:
            decode_into(CODECS["zstd"], corrupt(rng, wire), np.empty_like(values), SCRATCH)
        except FrameError as error:
            assert error.tile is not None or "tiles end" in str(error)


def test_a_stream_of_zstd_that_grows_is_refused():
    """A tile of a few bytes that unpacks to gigabytes is read no further than the tile goes."""
    zstandard = pytest.importorskip("zstandard")
    values = np.zeros(256, np.int64)
    wire = framed(CODECS["zstd"], values)
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(1 << 24))
    size = -(-(4 + len(bomb)) // 16) * 16
    start = directory_bytes(1)
    wire = np.concatenate([wire[:start], np.zeros(size, np.uint8)])
    wire[start : start + 4].view(np.uint32)[0] = len(bomb)
    wire[start + 4 : start + 4 + len(bomb)] = np.frombuffer(bomb, np.uint8)
    wire[HEADER_BYTES : HEADER_BYTES + 24].view(ENTRY)["bytes"] = size
    wire[16:24].view(np.uint64)[0] = len(wire) - 64
    reseal(wire, 1)
    assert "tile 0: " in refused(CODECS["zstd"], wire, np.empty_like(values))


def test_relays_verify_without_decoding():
    wire = framed(CODECS["q8"], golden_values("float32"), Origin(1, 2))
    frame = verify(wire, SCRATCH, Origin(1, 2))
    assert frame == read_header(wire) and frame.elements == 700 and frame.bytes == len(wire)
    with pytest.raises(FrameError, match="expected"):
        verify(wire, SCRATCH, Origin(1, 3))


def test_an_empty_frame_is_its_header():
    for codec in NAMED:
        wire = framed(codec, np.empty(0, np.float32))
        assert len(wire) == 64
        decode_into(codec, wire, np.empty(0, np.float32), SCRATCH)
