"""Codecs for messages: lossless and lossy, framed, checked, in the caller's buffers.

    codec = get("xw")
    wire = np.empty(most_bytes(codec, DTYPES["bfloat16"], count), np.uint8)
    used = encode_into(codec, values, wire, scratch, Origin(rank, chunk))
    decode_into(codec, wire[:used], values, scratch, Origin(rank, chunk))

docs/codecs.md has the format to the byte, the promised errors and what was measured.
"""

from taccl.runtime.codecs.codec import TILE, Codec, FrameError, Promise, Scratch
from taccl.runtime.codecs.coding import accumulate_into, decode_into, encode_into, verify
from taccl.runtime.codecs.feedback import ErrorFeedback
from taccl.runtime.codecs.frame import Frame, Origin, most_bytes
from taccl.runtime.codecs.registry import CODECS, get

__all__ = [
    "CODECS",
    "TILE",
    "Codec",
    "ErrorFeedback",
    "Frame",
    "FrameError",
    "Origin",
    "Promise",
    "Scratch",
    "accumulate_into",
    "decode_into",
    "encode_into",
    "get",
    "most_bytes",
    "verify",
]
