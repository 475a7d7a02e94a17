"""Compiled code against its twin in Python: the same bytes, the same refusals, and what only it has."""

import contextlib
import ctypes
import mmap
import os
import struct

import numpy as np
import pytest
import runtime_programs as programs
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codecs_frame import reseal

from taccl.runtime import native, native_run
from taccl.runtime.bind import Bound, Buffers, buffer_elements, compile_program
from taccl.runtime.codecs import (
    CODECS,
    TILE,
    FrameError,
    Origin,
    Scratch,
    accumulate_into,
    compiled,
    decode_into,
    encode_into,
    most_bytes,
)
from taccl.runtime.codecs.checksum import checksum
from taccl.runtime.codecs.codec import dtype_of
from taccl.runtime.codecs.frame import ENTRY, HEADER_BYTES
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.layout import layout
from taccl.runtime.process_memory import address
from taccl.runtime.shared import SharedMemory
from taccl.runtime.shm import SharedMemoryTransport
from taccl.runtime.switch import LocalSwitch, LocalTransport
from taccl.synth.collective import build

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled code: {native.why_not()}")

SCRATCH = Scratch()
NAMES = [name for name in CODECS if name != "zstd"]


@contextlib.contextmanager
def loops(plain):
    """Compiled code as on a processor without AVX2, or as it is."""
    switch = ctypes.c_int.in_dll(native.library(), "taccl_plain")
    switch.value = plain
    try:
        yield
    finally:
        switch.value = 0


def in_python(work, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "library", lambda: None)
        return work(*arguments)


def frame_of(codec, values, tile):
    wire = np.full(most_bytes(codec, dtype_of(values), len(values), tile), 0xA5, np.uint8)
    return wire[: encode_into(codec, values, wire, SCRATCH, Origin(3, 17), tile)]


def decoded(codec, frame, like):
    values = np.zeros(len(like), like.dtype)
    decode_into(codec, frame, values, SCRATCH, Origin(3, 17))
    return values.tobytes()


def added(codec, frame, like):
    total = np.linspace(-1, 1, len(like), dtype=np.float32)
    with np.errstate(all="ignore"):
        accumulate_into(codec, frame, total, SCRATCH, Origin(3, 17))
    return total.tobytes()


@st.composite
def tensors(draw):
    """Values of a type with any exponents, zeros, NaN and infinities."""
    name = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    dtype = DTYPES[name]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(0, 3 * 1024) | st.integers(TILE - 70, TILE + 70))
    bits = np.dtype(f"u{dtype.bytes}")
    with np.errstate(all="ignore"):
        scale = 10.0 ** draw(st.integers(-40, 38))
        values = (rng.standard_normal(count) * scale).astype(np.float32).astype(dtype.numpy).view(bits)
    values ^= rng.integers(0, 1 << draw(st.integers(0, 8 * dtype.bytes - 1)), count).astype(bits)
    values[rng.random(count) < draw(st.sampled_from([0, 0.02, 0.1, 0.9, 1]))] = 0
    if draw(st.booleans()):
        values[rng.random(count) < 0.001] = rng.integers(0, np.iinfo(bits).max, dtype=bits)
    return values.view(dtype.numpy)


@settings(max_examples=150, deadline=None)
@given(
    values=tensors(),
    name=st.sampled_from(NAMES),
    tile=st.sampled_from([256, 1024, TILE]),
    plain=st.booleans(),
)
def test_frames_have_the_same_bytes_and_mean_the_same(values, name, tile, plain):
    codec = CODECS[name]
    if values.dtype.name not in codec.dtypes:
        codec = CODECS["xw"]
    with loops(plain):
        frame = frame_of(codec, values, tile)
        assert frame.tobytes() == in_python(frame_of, codec, values, tile).tobytes()
        assert decoded(codec, frame, values) == in_python(decoded, codec, frame, values)
        assert added(codec, frame, values) == in_python(added, codec, frame, values)


@settings(max_examples=150, deadline=None)
@given(values=tensors(), name=st.sampled_from(NAMES), data=st.data(), plain=st.booleans())
def test_damaged_frames_are_refused_in_the_same_words(values, name, data, plain):
    codec = CODECS[name]
    if values.dtype.name not in codec.dtypes:
        codec = CODECS["xw"]
    frame = frame_of(codec, values, 1024).copy()
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))

    def said(work):
        with pytest.raises(FrameError) as error:
            work(codec, frame, values)
        return str(error.value)

    with loops(plain):
        for work in (decoded, added):
            assert said(work) == in_python(said, work)


@settings(max_examples=300, deadline=None)
@given(
    count=st.integers(1, 2500),
    name=st.sampled_from(["bfloat16", "float32"]),
    tile=st.sampled_from([256, 512, 1024, 2048]),
    zeros=st.sampled_from([0, 0.5]),
    seed=st.integers(0, 2**32),
    plain=st.booleans(),
)
def test_wrong_frames_with_right_checksums_mean_the_same(count, name, tile, zeros, seed, plain):
    """What someone sends who means harm: sizes, maps and positions that no encoder writes."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(count) * 0.05).astype(np.float32)
    values[rng.random(count) < zeros] = 0
    values = values.astype(DTYPES[name].numpy)
    frame, tiles = frame_of(CODECS["xw"], values, tile).copy(), -(-count // tile)
    for _ in range(rng.integers(1, 4)):
        entry = HEADER_BYTES + ENTRY.itemsize * rng.integers(tiles)
        payload = rng.integers(HEADER_BYTES + ENTRY.itemsize * tiles, len(frame))
        frame[entry + rng.integers(12, 24) if rng.random() < 0.6 else payload] ^= 1 << rng.integers(8)
    reseal(frame, tiles)

    def outcome(work):
        try:
            return work(CODECS["xw"], frame, values)
        except FrameError as error:
            return str(error)

    with loops(plain):
        for work in (decoded, added):
            assert outcome(work) == in_python(outcome, work)


@given(words=st.integers(0, 40000), seed=st.integers(0, 2**32), plain=st.booleans())
@settings(max_examples=30, deadline=None)
def test_checksums(words, seed, plain):
    data = np.random.default_rng(seed).integers(0, 256, 8 * words, np.uint8)
    work = np.empty(8 * TILE, np.uint8)
    with loops(plain):
        assert checksum(data, work) == in_python(checksum, data, work)


@settings(max_examples=300, deadline=None)
@given(
    count=st.integers(64, 1024) | st.integers(TILE - 200, TILE),
    width=st.sampled_from([2, 4]),
    most=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    plain=st.booleans(),
)
def test_tiles_with_any_number_of_exponents(count, width, most, seed, plain):
    """All widths of the window, with values beyond it at the ends of quarters too."""
    rng = np.random.default_rng(seed)
    bits = np.dtype(f"u{width}")
    above = 8 * width - 9
    exponents = np.minimum(rng.geometric(1 / (1 + rng.integers(1, most + 1)), count), 250)
    values = (exponents.astype(bits) << above) | rng.integers(0, 1 << above, count).astype(bits)
    values |= rng.integers(0, 2, count).astype(bits) << (8 * width - 1)
    ends = np.arange(0, count, max(count // 16, 1))
    values[rng.choice(ends, 3)] = 251 << above
    values = values.view(DTYPES["bfloat16" if width == 2 else "float32"].numpy)
    with loops(plain):
        frame = frame_of(CODECS["xw"], values, TILE)
        assert frame.tobytes() == in_python(frame_of, CODECS["xw"], values, TILE).tobytes()
        assert decoded(CODECS["xw"], frame, values) == values.tobytes()


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 70_000) | st.integers(260_000, 270_000),
    source=st.integers(0, 200),
    target=st.integers(0, 200),
    stream=st.booleans(),
    behind=st.none() | st.integers(0, 70),
)
def test_copies_and_reads_write_what_they_should_and_nothing_else(length, source, target, stream, behind):
    """behind: the target lies so far behind the source in its page, where the kernel's own copy would crawl."""
    library, room = native.library(), 300_000
    data = np.frombuffer(mmap.mmap(-1, room), np.uint8)
    data[:] = np.random.default_rng(length).integers(0, 256, room)
    if behind is not None:
        target = source + behind
    for read in (False, True):
        result = np.frombuffer(mmap.mmap(-1, room), np.uint8)
        to, begin = address(result) + target, address(data) + source
        if read:
            call = (os.getpid(), ctypes.c_void_p(to), ctypes.c_void_p(begin))
            assert library.taccl_read(*call, ctypes.c_size_t(length), int(stream)) == 0
        else:
            library.taccl_copy(
                ctypes.c_void_p(to), ctypes.c_void_p(begin), ctypes.c_size_t(length), int(stream)
            )
        assert (result[target : target + length] == data[source : source + length]).all()
        assert not result[:target].any() and not result[target + length :].any()


def test_what_cannot_be_read_has_a_reason():
    """Memory that is not mapped, and a process that is not there."""
    target = np.zeros(4096, np.uint8)
    call = (ctypes.c_void_p(address(target)), ctypes.c_void_p(4096), ctypes.c_size_t(4096), 0)
    assert os.strerror(native.library().taccl_read(os.getpid(), *call)) == "Bad address"
    assert os.strerror(native.library().taccl_read(2**22 - 1, *call)) == "No such process"


def test_structs_have_the_sizes_that_both_sides_think():
    def told(name):
        return ctypes.c_int64.in_dll(native.library(), f"taccl_{name}_bytes").value

    assert told("operation") == native_run.OPERATION.itemsize
    assert told("state") == ctypes.sizeof(native_run.State)
    assert told("call") == ctypes.sizeof(compiled.Call)


def test_calls_can_tell_more_bytes_than_2_gib():
    calls = compiled.library()
    for call in (calls.taccl_encode, calls.taccl_decode, calls.taccl_accumulate):
        assert ctypes.sizeof(call.restype) == 8


def test_it_can_be_left_out(monkeypatch):
    monkeypatch.setenv("TACCL_NATIVE", "0")
    native._load.cache_clear()
    try:
        assert native.library() is None and native.why_not() == "TACCL_NATIVE=0 leaves it out"
    finally:
        monkeypatch.undo()
        native._load.cache_clear()
    assert native.library() is not None


def test_what_may_not_be_written_is_not_written():
    """Compiled code has addresses only; numpy's rules are kept before it gets them."""
    values = np.arange(1000, dtype=np.float32)
    frame = frame_of(CODECS["q8"], values, TILE)
    kept = bytes(4000)
    locked = np.frombuffer(kept, np.float32)
    for work in (decode_into, accumulate_into):
        with pytest.raises(ValueError, match="read-only"):
            work(CODECS["q8"], frame, locked, SCRATCH)
    assert kept == bytes(4000)
    wire = np.zeros(8192, np.uint8)
    wire.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        encode_into(CODECS["q8"], values, wire, SCRATCH)


@pytest.mark.parametrize("kind", ["cpy", "re"])
@pytest.mark.parametrize("chunk", [3, 700, 40_000])
def test_operands_that_overlap_give_what_numpy_gives(kind, chunk):
    """No sound program has them, but one that runs must not mean something else with compiled code."""
    steps = [("cpy", "i", 0, "o", 0, 3), (kind, "o", 0, "o", 1, 2)]
    gpus = [(3, 3, 0, [(1 - rank, 1 - rank, 0, [*steps, ("s", "o", 2, "o", 2, 1), ("r", "o", 2, "o", 2, 1)])])
            for rank in range(2)]  # fmt: skip
    made = programs.program("custom", 2, 3, gpus)
    collective = build("allreduce", 2, 3)  # any that has buffers of three chunks

    def ran():
        return one_run(two_ranks(made, collective, 3 * chunk))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        expected = ran()
    assert ran() == expected


def two_ranks(made, collective, elements):
    """Both ranks of a program in this process, connected through shared memory."""
    compiled_program = compile_program(made, collective, False, range(2))
    bounds, memories, shape = [], [SharedMemory() for _ in range(2)], layout(collective, elements)
    for rank in range(2):
        others = LocalTransport(LocalSwitch(), rank)
        way = SharedMemoryTransport(memories[rank], rank, (0, 1), compiled_program.messages, others)
        lengths = buffer_elements(collective, shape, rank)
        buffers = Buffers(np.arange(lengths[0], dtype=np.float32), np.zeros(lengths[1], np.float32))
        inside = memories[rank].empty
        bounds.append(
            Bound(compiled_program, rank, shape, buffers, DTYPES["float32"], "sum", way, np, inside)
        )
    offers = np.stack([bound.transport.offer() for bound in bounds])
    for bound in bounds:
        bound.connect(offers)
    return bounds


def one_run(bounds):
    for bound in bounds:
        bound.start()
    left = bounds
    for _ in range(100):
        left = [bound for bound in left if not bound.executor.advance(5)]
    assert not left
    return [bound.user.output.tobytes() for bound in bounds]


@pytest.mark.parametrize("chunk", [1500, 40_000])
def test_copies_go_the_way_that_took_less_time(chunk):
    """Through the caches or past them, whatever the first guess was; short ones are not timed."""
    bounds = two_ranks(programs.ring_allgather(2), build("allgather", 2), 2 * chunk)
    ways = [bound.executor._loop._state.copies for bound in bounds]
    right = [np.tile(np.arange(chunk, dtype=np.float32), 2).tobytes()] * 2
    for way in ways:
        assert way.tries and not way.past
    first = []
    for _ in range(5):
        assert one_run(bounds) == right
        first.append([way.past for way in ways])
    timed = chunk == 40_000
    assert first == ([[0, 0], [0, 0], [1, 1], [0, 0], [1, 1]] if timed else [[0, 0]] * 5)
    for quicker in (0, 1, 0):
        for way in ways:
            way.taken_ns[quicker], way.taken_ns[1 - quicker] = 1, 10**15
        for _ in range(10):
            assert one_run(bounds) == right
            assert [way.past for way in ways] == [quicker * timed] * 2
    tried = []
    for _ in range(64):
        assert one_run(bounds) == right
        tried.append(ways[0].past)
    assert sum(tried) == timed  # the other way once


@pytest.mark.parametrize("name", NAMES)
def test_values_in_the_frame_itself_crash_nothing(name):
    """What is decoded overwrites the directory that says where the rest is."""
    room = np.zeros(40_000, np.uint8)
    room = room[-address(room) % 64 :]
    codec = CODECS[name]
    for at in (0, 64, 96, 512):
        used = encode_into(
            codec, np.linspace(1, 2, 2000, dtype=np.float32), room[:20_000], SCRATCH, Origin(), 256
        )
        for work in (decode_into, accumulate_into):
            try:
                work(codec, room[:used], room[at : at + 8000].view(np.float32), SCRATCH)
            except FrameError:
                continue


@pytest.mark.parametrize(
    "origin", [Origin(-1, -1), Origin(-1, 2), Origin(2**32, 0), Origin(0, 2**32 + 5), Origin(2**64 + 1, 2)]
)
def test_origins_that_no_header_holds(origin):
    values = np.ones(100, np.float32)
    frame = frame_of(CODECS["raw"], values, TILE)
    with pytest.raises(struct.error):
        encode_into(CODECS["raw"], values, np.zeros(4096, np.uint8), SCRATCH, origin)
    with pytest.raises(FrameError, match="where one from"):
        decode_into(CODECS["raw"], frame, values.copy(), SCRATCH, origin)
