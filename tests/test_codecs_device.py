"""The kernels: compiled as C++ for the host they write the same frames as numpy, byte for byte.

So is the Python round them, on a stand-in for CuPy. On a machine with a GPU the same tests run on it (-m gpu).
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import device_double
import numpy as np
import pytest
from kernels_on_host import SOURCES
from test_codecs import bits_of, coded, kinds, same_bits, tensor
from test_codecs_frame import corrupt, golden_values

from taccl.runtime import gpu
from taccl.runtime.codecs import CODECS, FrameError, Origin, Scratch, decode_into, most_bytes
from taccl.runtime.codecs.codec import dtype_of
from taccl.runtime.codecs.device import (
    OPTIONS,
    WITHOUT_KERNEL,
    accumulate_on_device,
    decode_on_device,
    encode_on_device,
    make_scratch,
    source,
)
from taccl.runtime.codecs.frame import ENTRY
from taccl.runtime.dtypes import DTYPES

TILE = 1024
CODED_BY_KERNELS = [
    (name, dtype)
    for name, codec in CODECS.items()
    if name not in WITHOUT_KERNEL
    for dtype in codec.dtypes
    if name != "raw" or dtype in ("uint8", "bfloat16", "float32", "int64")
]


class HostModule:
    """In place of cupy.RawModule: kernels compiled for the host."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def get_function(self, name: str):
        kernel = ctypes.cast(getattr(self.library, name), ctypes.c_void_p)

        def launch(grid, block, arguments):
            kinds = {np.uint64: ctypes.c_uint64, np.uint32: ctypes.c_uint32}
            converted = [
                kinds[type(each)](int(each))
                if type(each) in kinds
                else ctypes.c_void_p(each.__cuda_array_interface__["data"][0])
                for each in arguments
            ]
            device_double.state.clean = False
            self.library.launch(kernel, ctypes.c_uint32(grid[0]), ctypes.c_uint32(block[0]), *converted)

        return launch


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """cupy, or what stands in for it."""
    if request.param == "gpu":
        if gpu.load() is None:
            pytest.skip(f"needs a GPU: {gpu.why_not()}")
        return gpu.load()
    library = ctypes.CDLL(str(request.getfixturevalue("host_kernels")))
    double = device_double.make()
    double.RawModule = lambda code, options: HostModule(library)
    return double


def put(device, array: np.ndarray):
    on_device = device.empty(max(array.nbytes, 1), np.uint8)[: array.nbytes]
    on_device.set(np.ascontiguousarray(array).view(np.uint8))
    return on_device


def take(on_device) -> np.ndarray:
    host = np.empty(len(on_device), np.uint8)
    on_device.get(out=host)
    return host


def encoded(device, name: str, values: np.ndarray, tile: int = TILE) -> np.ndarray:
    dtype = dtype_of(values)
    wire = put(device, np.full(most_bytes(CODECS[name], dtype, len(values), tile), 0xA5, np.uint8))
    scratch = make_scratch(device, len(values), tile)
    size = encode_on_device(CODECS[name], dtype, put(device, values), wire, scratch, Origin(1, 2))
    return take(wire)[:size]


def decoded(device, name: str, wire: np.ndarray, like: np.ndarray, tile: int = TILE) -> np.ndarray:
    values = put(device, np.full(like.nbytes, 0xA5, np.uint8))
    scratch = make_scratch(device, len(like), tile)
    decode_on_device(CODECS[name], dtype_of(like), put(device, wire), values, scratch, Origin(1, 2))
    return take(values).view(like.dtype)


def equal_or_both_nan(a: np.ndarray, b: np.ndarray) -> bool:
    same = a.view(bits_of(dtype_of(a).name)) == b.view(bits_of(dtype_of(b).name))
    return bool((same | (np.isnan(a) & np.isnan(b))).all())


def both_ways(device, name: str, values: np.ndarray, tile: int = TILE) -> None:
    expected = coded(CODECS[name], values, origin=Origin(1, 2), tile=tile)
    wire = encoded(device, name, values, tile)
    assert same_bits(wire, expected)
    by_numpy = np.empty_like(values)
    decode_into(CODECS[name], expected, by_numpy, Scratch())
    found = decoded(device, name, expected, values, tile)
    assert same_bits(found, by_numpy) if CODECS[name].lossless else equal_or_both_nan(found, by_numpy)


@pytest.mark.parametrize("name,dtype", CODED_BY_KERNELS)
def test_frames_are_those_of_numpy(device, name, dtype):
    for values in kinds(dtype if dtype in ("bfloat16", "float16") else "float32").values():
        typed = values.view(np.uint8)[: 3000 * DTYPES[dtype].bytes].view(DTYPES[dtype].numpy)
        both_ways(device, name, typed[:2500])
    for count in (0, 1, 33, 1023, 1025):
        both_ways(device, name, tensor("float32", 5000).view(DTYPES[dtype].numpy)[:count])


@pytest.mark.parametrize("name,dtype", [("xw", "bfloat16"), ("xw", "float32"), ("bf16-xw", "float32")])
def test_a_full_tile(device, name, dtype):
    both_ways(device, name, tensor(dtype, 65536 + 100), tile=65536)


def test_windows_of_all_widths(device):
    """Exponents from one to all, so that the plan tries and chooses every width."""
    rng = np.random.default_rng(0)
    bits = set()
    for spread in (1, 3, 6, 12, 24, 50, 100, 255):
        exponents = np.clip(rng.normal(120, spread / 3, 3072), 0, 255).astype(np.uint16)
        values = (exponents << 7 | rng.integers(0, 128, 3072).astype(np.uint16)).view(
            DTYPES["bfloat16"].numpy
        )
        both_ways(device, "xw", values)
        wire = coded(CODECS["xw"], values, tile=TILE)
        bits |= {int(row["bits"]) for row in wire[64 : 64 + 72].view(ENTRY)}
    assert bits >= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("name,dtype", CODED_BY_KERNELS)
def test_sums_are_those_of_numpy(device, name, dtype):
    if dtype not in ("float32", "bfloat16", "float16"):
        return
    values, total = tensor(dtype, 3000, seed=1), tensor("float32", 3000, seed=2)
    wire = coded(CODECS[name], values, origin=Origin(1, 2), tile=TILE)
    by_numpy = np.empty_like(values)
    decode_into(CODECS[name], wire, by_numpy, Scratch())
    on_device = put(device, total)
    accumulate_on_device(CODECS[name], put(device, wire), on_device, make_scratch(device, 3000, TILE))
    assert same_bits(take(on_device), total + by_numpy.astype(np.float32))


@pytest.mark.parametrize("name", ["xw", "bf16-xw", "q8", "fp8", "bf16", "raw"])
def test_damage_is_noticed_and_garbage_harms_nothing(device, name):
    values = golden_values("float32")
    wire = coded(CODECS[name], values, origin=Origin(1, 2), tile=256)
    rng = np.random.default_rng(0)
    for bit in rng.integers(8 * 144, 8 * len(wire), 10).tolist():
        damaged = wire.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError, match=r"rank 1, chunk 2, tile \d: the data are damaged"):
            decoded(device, name, damaged, values, 256)
    for _ in range(100):
        garbage = corrupt(rng, wire)
        # What numpy refuses is refused, what it decodes is decoded to the same values.
        by_numpy = np.empty_like(values)
        try:
            with np.errstate(all="ignore"):
                decode_into(CODECS[name], garbage, by_numpy, Scratch())
        except FrameError:
            with pytest.raises(FrameError):
                decoded(device, name, garbage, values, 256)
        else:
            assert equal_or_both_nan(decoded(device, name, garbage, values, 256), by_numpy)


def test_wrong_calls_are_refused(device):
    values = tensor("float32", 3000)
    wire = coded(CODECS["xw"], values, origin=Origin(1, 2), tile=TILE)
    scratch = make_scratch(device, 2000, TILE)
    with pytest.raises(ValueError, match="the scratch holds 2048"):
        encode_on_device(
            CODECS["xw"], DTYPES["float32"], put(device, values), put(device, np.zeros(20000)), scratch
        )
    with pytest.raises(ValueError, match="on a device"):
        encode_on_device(CODECS["zstd"], DTYPES["float32"], put(device, values), put(device, wire), scratch)
    with pytest.raises(ValueError, match="most_bytes"):
        encode_on_device(
            CODECS["xw"], DTYPES["float32"], put(device, values), put(device, wire[:99]), scratch
        )
    with pytest.raises(FrameError, match="at most 2 of 1024"):
        decode_on_device(CODECS["xw"], DTYPES["float32"], put(device, wire), put(device, values), scratch)
    large = make_scratch(device, 3000, TILE)
    with pytest.raises(FrameError, match="expected 2999"):
        decode_on_device(
            CODECS["xw"], DTYPES["float32"], put(device, wire), put(device, values[:2999]), large
        )
    with pytest.raises(FrameError, match="rank 1, chunk 2 where"):
        decode_on_device(
            CODECS["xw"], DTYPES["float32"], put(device, wire), put(device, values), large, Origin(1, 3)
        )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_kernels_compile_for_gpus(tmp_path):
    """As CuPy's compiler would, for what nvcc takes by default; no driver is needed. CuPy has subnormal numbers made
    zeros, which the kernels must not mind."""
    unit = tmp_path / "kernels.cu"
    unit.write_text(source())
    done = subprocess.run(
        ["nvcc", *OPTIONS, "-ftz=true", "-Wno-deprecated-gpu-targets", "-ptx", "-o", str(tmp_path / "kernels.ptx"),
         str(unit)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    ptx = (tmp_path / "kernels.ptx").read_text()
    assert all(f"{name.replace('-', '_')}_encode_" in ptx for name, _ in CODED_BY_KERNELS)
    # One rounding where numpy has two would give other bytes, and so would zeros for subnormal numbers.
    assert "fma.rn.f32" not in ptx and not re.search(r"(add|sub|mul|div|neg|min|max)\.[a-z.]*ftz", ptx)


def test_the_source_is_part_of_the_package():
    assert source() == "".join(path.read_text() for path in SOURCES)
