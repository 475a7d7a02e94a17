"""Device memory that the ranks of one host read from each other: CUDA IPC.

A piece comes from cudaMalloc itself, because a handle names a whole allocation, and CuPy's pool gives out parts of its
own. Another process of the same host opens the handle, on the same device or on one that can reach it.
"""

from __future__ import annotations

import secrets
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from taccl.errors import EnvironmentProblem
from taccl.runtime.gpu import Cuda, address

HANDLE_BYTES = 64
# Shorter allocations share blocks of this size, and a handle would open the block with all that is in it.
PIECE_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Where an array lies, for other processes."""

    handle: bytes
    token: int  # of the piece
    size: int  # bytes of the piece
    offset: int  # bytes, from its beginning


class _Piece:
    """An allocation; it lives as long as an array in it."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size
        self.token = secrets.randbits(62)
        self.handle = b""


# Of the process, as allocations and handles are: who has an array need not know which `DeviceMemory` it is from.
_PIECES: weakref.WeakValueDictionary[int, _Piece] = weakref.WeakValueDictionary()  # by token
_OPENED: dict[int, tuple[int, int]] = {}  # of other processes' pieces: token -> (address, users)


class DeviceMemory:
    """This rank's pieces, and those of others that it has open."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def empty(self, elements: int, dtype: Any) -> Any:
        """(elements,) of a numpy type, not initialised. Raises EnvironmentProblem when there is not enough memory."""
        nbytes = elements * np.dtype(dtype).itemsize
        if nbytes == 0:
            return self._cuda.xp.empty(0, dtype)
        runtime = self._cuda.runtime
        size = -(-nbytes // PIECE_BYTES) * PIECE_BYTES
        try:
            first = runtime.malloc(size)
        except runtime.CUDARuntimeError as error:
            raise EnvironmentProblem(f"no device memory of {size} bytes: {error}") from error
        piece = _Piece(first, size)
        _PIECES[piece.token] = piece
        # At the end of the process the driver frees what is left, perhaps before Python would.
        weakref.finalize(piece, runtime.free, first).atexit = False
        return self._cuda.array(first, elements, dtype, piece)

    def place(self, array: Any) -> DevicePlace | None:
        """Where a contiguous array lies; None when it is not in a piece of this rank. Raises EnvironmentProblem where
        the device cannot export memory."""
        first = address(array)
        for piece in list(_PIECES.values()):
            if piece.first <= first and first + array.nbytes <= piece.first + piece.size:
                if not piece.handle:
                    piece.handle = self._export(piece)
                return DevicePlace(piece.handle, piece.token, piece.size, first - piece.first)
        return None

    def _export(self, piece: _Piece) -> bytes:
        try:
            return bytes(self._cuda.runtime.ipcGetMemHandle(piece.first))
        except self._cuda.runtime.CUDARuntimeError as error:
            raise EnvironmentProblem(f"device memory cannot be shared: {error}") from error

    def attach(self, token: int, handle: bytes) -> int:
        """The address of another rank's piece here. A process may open a handle once, so users of it are counted.

        Raises EnvironmentProblem where it cannot be opened.
        """
        first, users = _OPENED.get(token, (0, 0))
        if not users:
            try:
                first = self._cuda.runtime.ipcOpenMemHandle(handle)
            except self._cuda.runtime.CUDARuntimeError as error:
                raise EnvironmentProblem(
                    f"device memory of another process cannot be opened: {error}"
                ) from error
        _OPENED[token] = first, users + 1
        return first

    def detach(self, token: int) -> None:
        """A user of a piece, whose work on it is done, is gone."""
        first, users = _OPENED.pop(token)
        if users > 1:
            _OPENED[token] = first, users - 1
        else:
            self._cuda.runtime.ipcCloseMemHandle(first)
