"""Error feedback: what a lossy codec took away from one step's values is added to the next step's.

Seide et al.: 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al.: Error Feedback Fixes SignSGD, 2019. Over many
steps the sum of what arrives differs from the sum of what was sent by the last residual alone, so the error of a
running sum stays that of one coding. The residual is the caller's: it belongs to one tensor on one rank for as long as
it trains.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from taccl.runtime.codecs.codec import Array, Codec, Scratch
from taccl.runtime.codecs.coding import decode_into, encode_into
from taccl.runtime.codecs.frame import Origin


class ErrorFeedback:
    """The residual of (n,) float32 values. After each step sum(decoded) = sum(values) - residual, but for rounding.

    residual: (n,) float32, what is still owed; save and restore it with the optimizer's state. xp: cupy for a residual
    on the device, as collectives on arrays there want it; `encode_into` and `lost` are for the host.
    """

    def __init__(self, elements: int, xp: Any = np) -> None:
        self._xp = xp
        self.residual: Array = xp.zeros(elements, np.float32)
        self._decoded = np.zeros(elements if xp is np else 0, np.float32)

    def encode_into(
        self,
        codec: Codec,
        values: Array,
        wire: Array,
        scratch: Scratch,
        origin: Origin = Origin(),  # noqa: B008 - frozen
    ) -> int:
        """Code values + residual, keep the new residual, and give the bytes of the frame; as `encode_into` besides.

        What cannot be coded leaves the residual as it was.
        """
        self._decoded[:] = self.residual
        used = 0
        try:
            used = encode_into(codec, self.owed(values), wire, scratch, origin)
        finally:
            if not used:  # a frame has a header at least
                self.residual[:] = self._decoded
        decode_into(codec, wire[:used], self._decoded, scratch)
        self.paid(self._decoded)
        return used

    def owed(self, values: Array) -> Array:
        """(n,) float32: values + residual, what is to be coded now. It is overwritten by `paid`, which must follow."""
        if values.shape != self.residual.shape:
            raise ValueError(f"{values.shape} values; this feedback is for {self.residual.shape}")
        # Infinities are the caller's, and stay in what is coded.
        with np.errstate(over="ignore", invalid="ignore"):
            self._xp.add(self.residual, values, out=self.residual)
        return self.residual

    def lost(self, where: slice, values: Array, decoded: Array) -> None:
        """Owe what coding took away from some of the values, on top of what is owed there."""
        with np.errstate(over="ignore", invalid="ignore"):
            gone = np.subtract(values, decoded, dtype=np.float32)
        gone[~np.isfinite(gone)] = 0
        self.residual[where] += gone

    def paid(self, decoded: Array) -> None:
        """Take note of what the coded values became. Where one of the two is not finite, nothing is owed."""
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(self.residual, decoded, out=self.residual, casting="same_kind")
        self.residual[~np.isfinite(self.residual)] = 0
