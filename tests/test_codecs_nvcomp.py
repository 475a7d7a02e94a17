"""The plug-in for nvCOMP on a stand-in with its interface (zlib inside); on a GPU with nvCOMP the real one."""

from __future__ import annotations

import types
import zlib

import device_double
import numpy as np
import pytest
from test_codecs import bits_of, tensor
from test_codecs_device import TILE, device, put, take  # noqa: F401 - fixtures

from taccl.errors import EnvironmentProblem
from taccl.runtime.codecs import FrameError, Origin, Scratch, encode_into, get, most_bytes
from taccl.runtime.codecs import nvcomp as plugin
from taccl.runtime.codecs.device import make_scratch
from taccl.runtime.codecs.frame import ENTRY, directory_bytes
from taccl.runtime.dtypes import DTYPES


def stand_in() -> types.SimpleNamespace:
    """Codec and as_arrays of nvidia.nvcomp, as far as the plug-in uses them, in host memory."""

    class Codec:
        def __init__(self, algorithm: str, data_type: str) -> None:
            assert algorithm == "ANS" and data_type in ("<f4", "<f2", "|u1")

        def encode(self, arrays):
            return [self._wrap(zlib.compress(array._data.tobytes(), 1)) for array in arrays]

        def decode(self, arrays):
            try:
                return [self._wrap(zlib.decompress(array._data.tobytes())) for array in arrays]
            except zlib.error as error:
                raise RuntimeError(str(error)) from None

        @staticmethod
        def _wrap(content: bytes):
            return device_double.DeviceArray(np.frombuffer(content, np.uint8).copy())

    return types.SimpleNamespace(Codec=Codec, as_arrays=list)


@pytest.fixture
def nvcomp(device):  # noqa: F811
    if hasattr(device, "asarray"):
        try:
            return plugin.load()
        except EnvironmentProblem as problem:
            pytest.skip(str(problem))
    device.asarray = lambda array: array
    return stand_in()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int64"])
def test_every_bit_comes_back(device, nvcomp, name):  # noqa: F811
    dtype = DTYPES[name]
    noise = np.random.default_rng(0).integers(0, 2**32, 4000, dtype=np.uint32).view(np.uint8)
    for values in (
        tensor("float32", 3000).view(dtype.numpy)[:2500], np.zeros(2048, dtype.numpy),
        noise[: 1100 * dtype.bytes].view(dtype.numpy), np.zeros(0, dtype.numpy),
    ):  # fmt: skip
        scratch = make_scratch(device, 4000, TILE)
        wire = put(device, np.full(most_bytes(plugin.CODEC, dtype, len(values), TILE), 0xA5, np.uint8))
        size = plugin.encode_with_nvcomp(nvcomp, dtype, put(device, values), wire, scratch, Origin(1, 2))
        back = put(device, np.full(values.nbytes, 0xA5, np.uint8))
        frame = plugin.decode_with_nvcomp(nvcomp, dtype, wire[:size], back, scratch, Origin(1, 2))
        assert frame.bytes == size and take(back).tobytes() == values.tobytes()
        assert bits_of(name).itemsize == dtype.bytes


def test_damage_is_noticed_before_nvcomp_sees_it(device, nvcomp):  # noqa: F811
    dtype = DTYPES["float32"]
    values = np.tile(tensor("float32", 100), 30)
    scratch = make_scratch(device, 3000, TILE)
    wire = put(device, np.zeros(most_bytes(plugin.CODEC, dtype, 3000, TILE), np.uint8))
    size = plugin.encode_with_nvcomp(nvcomp, dtype, put(device, values), wire, scratch, Origin(1, 2))
    sound = take(wire)[:size]
    rows = sound[64 : 64 + 72].view(ENTRY)
    assert (rows["mode"] == 1).all()
    back = put(device, values)
    for tile, place in enumerate(directory_bytes(3) + np.cumsum(rows["bytes"]) - rows["bytes"]):
        damaged = sound.copy()
        damaged[int(place) + 20] ^= 4
        with pytest.raises(FrameError, match=f"rank 1, chunk 2, tile {tile}: the data are damaged"):
            plugin.decode_with_nvcomp(nvcomp, dtype, put(device, damaged), back, scratch)
    with pytest.raises(FrameError, match="expected 3000 of int32"):
        plugin.decode_with_nvcomp(nvcomp, DTYPES["int32"], put(device, sound), back, scratch)


def test_on_the_host_it_says_what_to_do():
    values = tensor("float32", 100)
    wire = np.zeros(most_bytes(get("nvcomp-ans"), DTYPES["float32"], 100), np.uint8)
    with pytest.raises(EnvironmentProblem, match="take xw"):
        encode_into(get("nvcomp-ans"), values, wire, Scratch())
