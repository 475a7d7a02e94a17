"""Frame memory on a device: the same bytes as on the host, the same words for what is damaged."""

from __future__ import annotations

import functools
import importlib
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from test_codecs_frame import reseal

from taccl.runtime import gpu
from taccl.runtime.codecs import CODECS, FrameError, Scratch
from taccl.runtime.device_frames import DeviceFrames, work_bytes
from taccl.runtime.dtypes import DTYPES
from taccl.runtime.frames import FrameMemory, frame_sizes
from taccl.runtime.plan import Frame, Operation, Plan
from taccl.runtime.transport import HEAD_BYTES, write_head

DOUBLE = str(Path(__file__).parent / "cupy_double")


@functools.cache
def double():
    """The stand-in for CuPy, which nobody else finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOUBLE)
        for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
            patch.delitem(sys.modules, name)
        found = importlib.import_module("cupy")
        for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
            del sys.modules[name]
    return found


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def cuda(request, monkeypatch):
    if request.param == "gpu":
        if gpu.load() is None:
            pytest.skip(f"needs a GPU: {gpu.why_not()}")
        return gpu.Cuda(gpu.load())
    monkeypatch.setenv("CUPY_DOUBLE_KERNELS", str(request.getfixturevalue("host_kernels")))
    return gpu.Cuda(double())


def operation(kind, dst, src, frames, chunks=()):
    return Operation(kind, dst, src, None, -1, 0, -1, 0, 0, (), (), frames, None, chunks)


# Rank 3 codes its chunks 0 to 2 one by one into an area of three, packs the second and third, decodes and adds them.
ONE = tuple(Frame(0, i, 3, i) for i in range(3))
PACKED = (Frame(3, 0, 3, 1), Frame(3, 1, 3, 2))
PLAN = Plan(
    3,
    (
        operation("encode", ("f", 0, 3), ("i", 0, 3), ONE, (0, 1, 2)),
        operation("pack", ("f", 3, 2), None, ONE[1:]),
        operation("decode", ("o", 0, 2), None, ONE[:2]),
        operation("accumulate", ("o", 1, 2), ("s", 1, 2), PACKED),
    ),
    0,
    slots=5,
)


class Both:
    """The same frame memory on the host and on a device, with the same rubbish in it before."""

    def __init__(self, cuda, name, dtype, count):
        codec, self.cuda, self.dtype, self.count = CODECS[name], cuda, DTYPES[dtype], count
        self.sizes = frame_sizes(codec, self.dtype, count)
        self.host = FrameMemory(self.sizes, np.full(PLAN.slots * self.sizes.stride, 0xA5, np.uint8))
        place = cuda.xp.empty(PLAN.slots * self.sizes.stride, np.uint8)
        cuda.upload(place, self.host.data)
        self.device = DeviceFrames(cuda, PLAN, self.sizes, self.dtype, count, place)
        rng = np.random.default_rng(count)
        self.memory = {
            letter: (0.1 * rng.standard_normal(3 * count)).astype(self.dtype.numpy) for letter in "ios"
        }
        self.there = {}
        for letter, values in self.memory.items():
            self.there[letter] = cuda.xp.empty(len(values), values.dtype)
            cuda.upload(self.there[letter], values)

    def view(self, memory, extent):
        return memory[extent[0]][extent[1] * self.count : (extent[1] + extent[2]) * self.count]

    def on_host(self, number):
        op = PLAN.operations[number]
        view = functools.partial(self.view, self.memory)
        self.host.work(op, view, self.count, np.add)(Scratch())

    def on_device(self, number):
        op = PLAN.operations[number]
        view = functools.partial(self.view, self.there)
        self.device.work(number, op, view, self.cuda.xp.add)()
        self.cuda.synchronize()
        self.device.check()

    def agree(self):
        frames, output = np.empty_like(self.host.data), np.empty_like(self.memory["o"])
        self.cuda.download(frames, self.device.data)
        self.cuda.download(output, self.there["o"])
        assert frames.tobytes() == self.host.data.tobytes()
        assert output.tobytes() == self.memory["o"].tobytes()


@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("q8", "float32", 66_000),
        ("fp8", "float32", 300),
        ("bf16", "float32", 1),
        ("xw", "float32", 66_000),
        ("xw", "bfloat16", 500),
        ("bf16-xw", "float32", 4001),
    ],
)
def test_the_same_bytes_as_on_the_host(cuda, name, dtype, count):
    both = Both(cuda, name, dtype, count)
    for number in range(len(PLAN.operations)):
        both.on_host(number)
        both.on_device(number)
    both.agree()
    for area in (("f", 0, 3), ("f", 3, 2)):
        assert both.device.used(area) == both.host.used(area)


def damage(rng, area, sized):
    """Change some bytes of an area of one frame, and sometimes make its checksums right again."""
    head = HEAD_BYTES if sized else 0
    frame = area[head:]
    where = rng.integers(0, 5)
    if where == 0 and sized:
        if rng.random() < 0.5:
            write_head(area, int(rng.integers(0, 2 * len(area))))
        else:
            area[rng.integers(0, HEAD_BYTES)] ^= 1 << rng.integers(0, 8)
        return
    first, last = ((0, 64), (64, 88), (64, 96), (96, 200))[rng.integers(0, 4)]
    for _ in range(rng.integers(1, 4)):
        frame[rng.integers(first, last)] = rng.choice([rng.integers(0, 256), 0, 1, 255])
    if where < 3 and first:
        reseal(frame, 1)
    if where == 3:  # a header that means harm: fewer or more bytes than the tiles have
        frame[16:24].view(np.int64)[0] += 16 * rng.integers(-1, 2)
        frame[60:64].view(np.uint32)[0] = zlib.crc32(frame[:60].tobytes())


@pytest.mark.parametrize("name", ["q8", "xw", "bf16-xw"])
def test_what_the_host_refuses_the_device_refuses_in_the_same_words(cuda, name):
    """Both decode, or neither; and nothing but the values is written."""
    both, rng, outcomes = Both(cuda, name, "float32", 300), np.random.default_rng(7), set()
    both.on_host(0)
    sound = both.host.data.copy()
    for _ in range(120):
        both.host.data[:] = sound
        damage(rng, both.host.data, both.sizes.sized)
        cuda.upload(both.device.data, both.host.data)
        both.device._wrong[:] = 0
        said = []
        for run in (both.on_host, both.on_device):
            try:
                with np.errstate(all="ignore"):
                    run(2)
            except FrameError as error:
                said.append(str(error))
            else:
                said.append("")
        assert said[0] == said[1]
        outcomes.add(said[0])
        if not said[0]:
            both.agree()
        cuda.upload(both.there["o"], both.memory["o"])
    assert len(outcomes) > 8 and "" in outcomes
    assert any("tile 0" in text for text in outcomes) and any("header" in text for text in outcomes)


def test_a_frame_behind_a_wrong_length_is_not_followed(cuda):
    both = Both(cuda, "xw", "float32", 300)
    both.on_host(0)
    payload = both.host.data[HEAD_BYTES + 16 :][:8].view(np.uint64)
    payload[0] = 2**62  # the second frame would lie far away
    cuda.upload(both.device.data, both.host.data)
    with pytest.raises(FrameError, match="frame from rank 3, chunk 0: the header is damaged"):
        both.on_device(2)


def test_work_space_is_counted(cuda, monkeypatch):
    for name in ("q8", "xw"):
        made = []
        for call in ("empty", "zeros"):
            take = getattr(cuda.xp, call)

            def counted(elements, dtype, made=made, take=take):
                made.append(elements * np.dtype(dtype).itemsize)
                return take(elements, dtype)

            monkeypatch.setattr(cuda.xp, call, counted)
        sizes = frame_sizes(CODECS[name], DTYPES["float32"], 70_000)
        data = cuda.xp.zeros(5 * sizes.stride, np.uint8)
        made.clear()
        DeviceFrames(cuda, PLAN, sizes, DTYPES["float32"], 70_000, data)
        monkeypatch.undo()
        assert sum(made) == work_bytes(PLAN, CODECS[name], DTYPES["float32"], 70_000) + 4 * 128
