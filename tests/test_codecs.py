"""Codecs: every bit or a promised error back, sizes bounded, special values, any buffer."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import twin  # noqa: F401 - a fixture

from taccl.errors import UsageError
from taccl.runtime.codecs import (
    CODECS,
    TILE,
    Codec,
    FrameError,
    Origin,
    Scratch,
    accumulate_into,
    decode_into,
    encode_into,
    get,
    most_bytes,
)
from taccl.runtime.codecs.codec import dtype_of
from taccl.runtime.codecs.fp8 import table
from taccl.runtime.codecs.plan import choose_window
from taccl.runtime.dtypes import DTYPES

SCRATCH = Scratch()
LENGTHS = (0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 4097)


def coded(codec: Codec, values, **options) -> np.ndarray:
    wire = np.zeros(most_bytes(codec, dtype_of(values), len(values), options.get("tile", TILE)), np.uint8)
    return wire[: encode_into(codec, values, wire, SCRATCH, **options)]


def back(codec: Codec, wire, like) -> np.ndarray:
    values = np.empty(len(like), like.dtype)
    decode_into(codec, wire, values, SCRATCH)
    return values


def same_bits(a, b) -> bool:
    return np.array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


def bits_of(name: str) -> np.dtype:
    return np.dtype(f"u{DTYPES[name].bytes}")


def tensor(name: str, count: int, seed: int = 0, scale: float = 0.05) -> np.ndarray:
    """Values as in a layer: normal, every hundredth row with larger ones."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(count) * scale
    values[:: max(1, count // 100)] *= 1000
    return values.astype(np.float32).astype(DTYPES[name].numpy)


def kinds(name: str) -> dict[str, np.ndarray]:
    """Bit patterns of a type that stress one path each."""
    rng = np.random.default_rng(3)
    bits = bits_of(name)
    most = np.iinfo(bits).max
    plain = tensor(name, 5000).view(bits)
    sparse = np.where(rng.random(5000) < 0.7, 0, plain).astype(bits)
    return {
        "tensor": plain,
        "noise": rng.integers(0, most, 5000, dtype=bits, endpoint=True),
        "equal": np.full(5000, plain[7], bits),
        "zeros": np.zeros(5000, bits),
        "minus zeros": np.full(5000, 1 << (8 * bits.itemsize - 1), bits),
        "sparse": sparse,
        "one value among zeros": np.where(np.arange(5000) == 4321, plain, 0).astype(bits),
        "every exponent": (np.arange(5000) * (most // 4999)).astype(bits),
        "wide": tensor(name, 5000, scale=1.0).view(bits) ^ rng.integers(0, 1 << 10, 5000).astype(bits) << 5,
    }


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", kinds("float32"))
def test_xw_gives_every_bit_back(name, kind):
    values = kinds(name)[kind].view(DTYPES[name].numpy)
    for count in (*LENGTHS, len(values)):
        wire = coded(get("xw"), values[:count])
        assert same_bits(back(get("xw"), wire, values[:count]), values[:count])


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_xw_keeps_all_patterns_of_16_bits(name):
    """NaN payloads, infinities, subnormals and both zeros among them."""
    rng = np.random.default_rng(0)
    for values in (np.arange(65536, dtype=np.uint16), rng.permutation(65536).astype(np.uint16)):
        typed = values.view(DTYPES[name].numpy)
        assert same_bits(back(get("xw"), coded(get("xw"), typed), typed), typed)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_lossless_codecs_on_any_data(data):
    name = data.draw(st.sampled_from(["xw", "raw"]))
    dtype = data.draw(st.sampled_from(CODECS[name].dtypes))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    count = data.draw(st.integers(0, 1500))
    # Mixtures of a few exponents, noise and zeros, so that windows, exceptions and maps all occur.
    bits = bits_of(dtype)
    pool = rng.integers(0, np.iinfo(bits).max, data.draw(st.integers(1, 40)), dtype=bits, endpoint=True)
    values = rng.choice(pool, count) ^ rng.integers(0, 1 << data.draw(st.integers(0, 7)), count).astype(bits)
    values[rng.random(count) < data.draw(st.sampled_from([0, 0.02, 0.1, 0.9]))] = 0
    typed = values.view(DTYPES[dtype].numpy)
    tile = data.draw(st.sampled_from([256, 512, TILE]))
    wire = coded(CODECS[name], typed, tile=tile)
    assert same_bits(back(CODECS[name], wire, typed), typed)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_what_does_not_shrink_stays_raw(name):
    """Random bits grow by no more than header, directory and padding."""
    rng = np.random.default_rng(1)
    for count in (1, 5000, TILE, TILE + 1, 2 * TILE + 777):
        bits = bits_of(name)
        noise = rng.integers(0, np.iinfo(bits).max, count, dtype=bits, endpoint=True).view(DTYPES[name].numpy)
        tiles = -(-count // TILE)
        assert len(coded(get("xw"), noise)) <= noise.nbytes + 64 + 24 * tiles + 31


def test_tensors_shrink_by_as_much_as_their_exponents_allow():
    """Normal values have an exponent entropy of 2.6 bits: 16 / (8 + 2.6 + ...) at best, 1.40 with windows."""
    plain = np.random.default_rng(0).standard_normal(4 * TILE).astype(np.float32)
    for name, least in (("bfloat16", 1.40), ("float32", 1.16), ("float16", 1.10)):
        values = (plain * 0.05).astype(DTYPES[name].numpy)
        assert values.nbytes / len(coded(get("xw"), values)) > least
    sparse = np.where(np.random.default_rng(1).random(len(plain)) < 0.8, 0, plain).astype(ml_dtypes.bfloat16)
    assert sparse.nbytes / len(coded(get("xw"), sparse)) > 4.5


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_sizes_are_bounded_and_fixed_where_promised(codec):
    pytest.importorskip("zstandard") if codec.name == "zstd" else None
    for name in codec.dtypes:
        for count in (0, 1, 300, 5000):
            values = np.zeros(count, DTYPES[name].numpy)
            values[: count // 2] = np.arange(count // 2) % 100
            size = len(coded(codec, values, tile=1024))
            bound = most_bytes(codec, DTYPES[name], count, 1024)
            assert size == bound if codec.fixed else size <= bound
            assert size % 16 == 0


def promise_holds(codec: Codec, values, found) -> bool:
    """Bound of every finite value; NaN and infinities where they were."""
    x, y = values.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(x)
    sizes = np.where(finite, np.abs(x), 0)
    bound = codec.promise.value * sizes + codec.promise.floor
    if codec.promise.block_values:
        width = codec.promise.block_values
        padded = np.zeros(-(-len(x) // width) * width)
        padded[: len(x)] = sizes
        bound += codec.promise.block * np.repeat(padded.reshape(-1, width).max(axis=1), width)[: len(x)]
    error = np.where(finite, np.abs(np.where(finite, y, 0) - np.where(finite, x, 0)), 0)
    return bool((np.isfinite(y) == finite).all() and (error <= bound).all())


@pytest.mark.parametrize("name", ["bf16", "bf16-xw", "q8", "fp8"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_errors_stay_below_the_promise(name, data):
    """Over all magnitudes that float32 has, mixed in a block, with zeros, NaN and infinities among them."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    count = data.draw(st.integers(1, 1200))
    middle = data.draw(st.integers(-149, 126))
    spread = data.draw(st.sampled_from([0, 3, 20]))
    exponents = np.clip(middle + rng.integers(-spread, spread + 1, count), -149, 126)
    values = (rng.uniform(-2, 2, count) * 2.0**exponents).astype(np.float32)
    values[rng.random(count) < data.draw(st.sampled_from([0, 0.3]))] = 0
    bad = rng.random(count) < data.draw(st.sampled_from([0, 0, 0.01]))
    values[bad] = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), int(bad.sum()))
    codec = CODECS[name]
    assert promise_holds(codec, values, back(codec, coded(codec, values, tile=512), values))


def test_q8_keeps_its_promise_where_values_lie_between_two_codes():
    """With an infinity in the block, whose codes are the coarsest, and roundings that work against the nearest one."""
    rng = np.random.default_rng(1)
    largest = rng.uniform(1, 2, (200, 1))
    values = np.concatenate(
        [np.full((200, 1), np.inf), largest, largest / 125 * (rng.integers(-125, 125, (200, 254)) + 0.5)],
        axis=1,
    )
    values = values.astype(np.float32).reshape(-1)
    codec = CODECS["q8"]
    found = back(codec, coded(codec, values), values)
    assert promise_holds(codec, values, found)
    errors = np.abs(found[~np.isinf(values)].astype(float) - values[~np.isinf(values)]).reshape(200, 255)
    assert (errors.max(axis=1) > largest[:, 0] / 250).any()  # it promises no less than half a code


def test_special_values_of_lossy_codecs():
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 1.0, -3.0, 3.3e38], np.float32)
    values = np.concatenate([values, np.linspace(-3, 3, 1000, dtype=np.float32)])
    for name in ("bf16", "bf16-xw", "q8"):
        found = back(CODECS[name], coded(CODECS[name], values), values)
        assert np.isnan(found[0]) and found[1] == np.inf and found[2] == -np.inf
    for name in ("bf16", "bf16-xw", "fp8"):
        assert np.signbit(back(CODECS[name], coded(CODECS[name], values), values)[3])
    # e4m3 has no infinities: they become NaN, so that an overflow is still seen.
    assert np.isnan(back(CODECS["fp8"], coded(CODECS["fp8"], values), values)[:3]).all()
    # Neighbours of a NaN in other blocks, and in its own, are what they were.
    far = back(CODECS["q8"], coded(CODECS["q8"], values), values)[512:]
    assert np.abs(far - values[512:]).max() < 3 / 250


def test_largest_values_do_not_overflow():
    largest = np.finfo(np.float32).max
    values = np.tile(np.array([largest, -largest, np.nextafter(largest, np.float32(0))], np.float32), 100)
    for name in ("q8", "fp8"):
        assert np.isfinite(back(CODECS[name], coded(CODECS[name], values), values)).all()


def test_bf16_rounds_as_ml_dtypes_for_every_upper_half():
    """All 65536 upper halves with the lower halves at, below and above a tie."""
    upper = np.arange(65536, dtype=np.uint32) << 16
    for lower in (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | lower).view(np.float32)
        with np.errstate(invalid="ignore"):
            expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
        found = back(CODECS["bf16"], coded(CODECS["bf16"], values), values)
        assert np.array_equal(np.isnan(found), np.isnan(values))
        plain = ~np.isnan(values)
        assert same_bits(found[plain], expected[plain])


def test_fp8_rounds_as_ml_dtypes():
    """Blocks whose largest value is 448 have the scale 1, so that codes are those of a plain cast."""
    e4m3 = ml_dtypes.float8_e4m3fn
    assert same_bits(table()[:127], np.arange(127, dtype=np.uint8).view(e4m3).astype(np.float32))
    halves = (np.arange(0x4800, dtype=np.uint32) << 16) | 0x8000
    sizes = np.concatenate([halves, np.arange(0x3C00 << 16, 0x43E0 << 16, 4099, dtype=np.uint32)])
    sizes = sizes.view(np.float32)
    ties = (table()[:126].astype(np.float64) + table()[1:127]) / 2
    sizes = np.concatenate([sizes[np.isfinite(sizes) & (sizes <= 448)], ties.astype(np.float32)])
    values = np.zeros(-(-len(sizes) // 127) * 128, np.float32)
    rows = values.reshape(-1, 128)
    rows[:, 0] = 448
    padded = np.zeros(rows[:, 1:].size, np.float32)
    padded[: len(sizes)] = np.where(np.arange(len(sizes)) % 2, -sizes, sizes)
    rows[:, 1:] = padded.reshape(-1, 127)
    found = back(CODECS["fp8"], coded(CODECS["fp8"], values), values)
    assert same_bits(found, values.astype(e4m3).astype(np.float32))


@pytest.mark.parametrize("name", ["int32", "int64", "uint8", "float64", "bfloat16"])
def test_zstd_gives_every_bit_back(name):
    pytest.importorskip("zstandard")
    rng = np.random.default_rng(0)
    for values in (rng.integers(0, 30522, 70_000), rng.integers(0, 255, 999), np.zeros(0)):
        typed = values.astype(DTYPES[name].numpy)
        assert same_bits(back(CODECS["zstd"], coded(CODECS["zstd"], typed), typed), typed)
    ids = rng.integers(0, 30522, 70_000)
    assert ids.nbytes / len(coded(CODECS["zstd"], ids)) > 3.9


@pytest.mark.parametrize("name", ["xw", "bf16-xw", "q8", "fp8", "bf16"])
def test_any_layout_of_values(name):
    """Strided, reversed and misaligned arrays code to the same bytes and can be decoded into."""
    codec = CODECS[name]
    plain = tensor("float32", 3000)
    expected = coded(codec, plain, tile=1024)
    odd = np.empty(plain.nbytes + 1, np.uint8)[1:].view(np.float32)
    wide = np.empty(2 * len(plain), np.float32)
    for place in (odd, wide[::2], wide[: len(plain)][::-1]):
        place[:] = plain
        assert same_bits(coded(codec, place, tile=1024), expected)
        place[:] = 0
        decode_into(codec, expected, place, SCRATCH)
        assert same_bits(place.copy(), back(codec, expected, plain))


@pytest.mark.parametrize("codec", [c for c in CODECS.values() if c.name != "zstd"], ids=lambda c: c.name)
def test_accumulate_adds_what_decoding_gives(codec):
    for name in {"float32", "bfloat16", "float16"} & set(codec.dtypes):
        values = tensor(name, 3000, seed=1)
        wire = coded(codec, values, tile=1024)
        total = tensor("float32", 3000, seed=2)
        expected = total + back(codec, wire, values).astype(np.float32)
        accumulate_into(codec, wire, total, SCRATCH)
        assert same_bits(total, expected)


def test_accumulate_refuses_what_cannot_be_added():
    wire = coded(get("raw"), np.arange(10))
    with pytest.raises(FrameError, match="cannot be added"):
        accumulate_into(get("raw"), wire, np.zeros(10, np.float32), SCRATCH)


def test_wrong_calls_are_refused():
    values = tensor("float32", 100)
    with pytest.raises(UsageError, match="known: raw, xw"):
        get("gzip")
    with pytest.raises(ValueError, match="most_bytes"):
        encode_into(get("xw"), values, np.zeros(100, np.uint8), SCRATCH)
    with pytest.raises(ValueError, match="takes float32"):
        coded(get("q8"), values.astype(np.float16))
    with pytest.raises(ValueError, match="no codec takes"):
        coded(get("raw"), values.astype(np.complex64))
    with pytest.raises(ValueError, match="one dimension"):
        coded(get("raw"), values.reshape(10, 10))
    with pytest.raises(ValueError, match="multiple of 256"):
        coded(get("raw"), values, tile=100)
    with pytest.raises(ValueError, match="multiple of 8"):
        decode_into(get("raw"), np.zeros(200, np.uint8)[1:], values, SCRATCH)


def test_threads_with_their_own_scratch_do_not_disturb_each_other():
    inputs = [tensor("bfloat16", 150_000, seed) for seed in range(4)]
    expected = [coded(get("xw"), values).tobytes() for values in inputs]
    found = [b""] * len(inputs)

    def work(index):
        scratch = Scratch()
        for _ in range(5):
            values = inputs[index]
            wire = np.zeros(most_bytes(get("xw"), DTYPES["bfloat16"], len(values)), np.uint8)
            used = encode_into(get("xw"), values, wire, scratch)
            decoded = np.empty_like(values)
            decode_into(get("xw"), wire, decoded, scratch)
            found[index] = wire[:used].tobytes() if same_bits(decoded, values) else b"differs"

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_old_contents_of_buffers_do_not_show():
    """The same bytes whatever the wire and the scratch held before."""
    values = tensor("float32", 3001)
    values[::3] = 0
    for codec in CODECS.values():
        if codec.name == "zstd":
            continue
        wires = []
        for old in (0, 0xA5):
            scratch = Scratch()
            for field in set(scratch.__slots__) - {"at"}:
                getattr(scratch, field).view(np.uint8)[:] = old & 1
            wire = np.full(most_bytes(codec, DTYPES["float32"], 3001, 1024), old, np.uint8)
            wires.append(wire[: encode_into(codec, values, wire, scratch, Origin(3, 4), 1024)].tobytes())
        assert wires[0] == wires[1]


def test_window_of_a_narrow_and_of_a_wide_sample():
    """The hot window takes what is there; symbols 0 and 255 can lie in it."""
    for symbols in ([0], [255], [117, 118], [0, 1, 2, 3]):
        base, bits = choose_window((np.array(symbols * 50, np.uint16)) << 7)
        window = {(base + (2 << bits) + step) % 256 for step in range(2 << bits)}
        assert set(symbols) <= window and bits <= 1
    base, bits = choose_window(np.arange(0, 65536, 64).astype(np.uint16))
    assert bits == 6
