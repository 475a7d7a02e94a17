"""A stand-in for CuPy in host memory: arrays that numpy and MPI see only through `__cuda_array_interface__`.

MPI libraries that know nothing of CUDA take the pointer as what it is, host memory. So the whole device path
runs without a GPU, except that nothing is asynchronous; `state.clean` says instead whether all that was
started has been synchronised.
"""

from __future__ import annotations

import types

import numpy as np


class DeviceArray:
    """One-dimensional, contiguous, no buffer protocol."""

    def __init__(self, data):
        self._data = data

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self._data.shape, "typestr": self._data.dtype.str, "version": 3,
            "data": (self._data.__array_interface__["data"][0], False),
        }  # fmt: skip

    def __getitem__(self, key):
        found = self._data[key._data if isinstance(key, DeviceArray) else key]
        return DeviceArray(found) if isinstance(found, np.ndarray) else found

    def __setitem__(self, key, value):
        state.clean = False
        plain = key._data if isinstance(key, DeviceArray) else key
        self._data[plain] = value._data if isinstance(value, DeviceArray) else value

    def __len__(self):
        return len(self._data)

    def __lt__(self, other):
        return DeviceArray(self._data < other)

    def __iadd__(self, other):
        state.clean = False
        self._data += other
        return self

    def __itruediv__(self, other):
        state.clean = False
        self._data /= other
        return self

    def __ifloordiv__(self, other):
        state.clean = False
        self._data //= other
        return self

    @property
    def dtype(self):
        return self._data.dtype

    @property
    def nbytes(self):
        return self._data.nbytes

    def view(self, dtype):
        return DeviceArray(self._data.view(dtype))

    def set(self, host):
        state.clean = False
        self._data[:] = host

    def get(self, out):
        out[:] = self._data


state = types.SimpleNamespace(clean=True)


def _operation(function):
    def run(*arrays, out=None):
        state.clean = False
        function(*(a._data for a in arrays), out=out._data)

    return run


def _copyto(target, source):
    state.clean = False
    np.copyto(target._data, source._data)


def _synchronize():
    state.clean = True


def make():
    """A fresh module-like object."""
    state.clean = True
    double = types.SimpleNamespace(
        empty=lambda n, dtype: DeviceArray(np.empty(n, dtype)),
        zeros=lambda n, dtype: DeviceArray(np.zeros(n, dtype)),
        copyto=_copyto,
        cuda=types.SimpleNamespace(
            alloc_pinned_memory=lambda n: bytearray(n),
            get_current_stream=lambda: types.SimpleNamespace(synchronize=_synchronize),
        ),
    )
    for name in ("add", "multiply", "minimum", "maximum"):
        setattr(double, name, _operation(getattr(np, name)))
    return double
