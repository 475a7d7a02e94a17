"""The codecs by name."""

from __future__ import annotations

from taccl.errors import UsageError
from taccl.runtime.codecs import bf16, fp8, q8, raw, xw, zstd
from taccl.runtime.codecs.codec import Codec

# Number 6 on the wire is kept for sums of quantised values, 128 and above for plug-ins.
CODECS = {
    codec.name: codec
    for codec in (raw.CODEC, xw.CODEC, bf16.CODEC, bf16.WINDOWED, q8.CODEC, fp8.CODEC, zstd.CODEC)
}


def get(name: str) -> Codec:
    """The codec of a name, plug-ins among them. Raises UsageError for an unknown one."""
    found = CODECS.get(name)
    if name == "nvcomp-ans":
        # Only here, as the module brings the device path along.
        from taccl.runtime.codecs import nvcomp

        return nvcomp.CODEC
    if found is None:
        raise UsageError(f"unknown codec {name!r}; known: {', '.join(CODECS)}")
    return found
