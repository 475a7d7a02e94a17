"""What a codec costs and gains on the devices of a cluster, as `taccl profile` measured it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class CodecCost:
    """One codec on values of one dtype.

    b bytes of values take `encode_alpha_us + encode_beta_us_per_mb * b / 10^6` us to code on a rank's codec engine,
    `frame_bytes + b / ratio` bytes on the wire, and the decode numbers to decode, or to decode and add to a sum.
    """

    codec: str  # its name in runtime/codecs
    dtype: str  # of the values, e.g. "float32"
    lossless: bool
    ratio: Fraction  # > 0; below 1 where it makes data longer
    frame_bytes: int  # of a chunk's frame, beside its values
    encode_alpha_us: Fraction
    encode_beta_us_per_mb: Fraction  # per MB of values, not of coded bytes; so for decode
    decode_alpha_us: Fraction
    decode_beta_us_per_mb: Fraction
    source: str = ""  # on which values and ranks it was measured


def fault_of_codecs(costs: Sequence[CodecCost]) -> str | None:
    """Which rule the costs of a topology break, in a sentence; None for none."""
    for cost in costs:
        numbers: tuple[Fraction | int, ...] = (
            cost.frame_bytes,
            cost.encode_alpha_us,
            cost.encode_beta_us_per_mb,
            cost.decode_alpha_us,
            cost.decode_beta_us_per_mb,
        )
        if cost.ratio <= 0 or any(number < 0 for number in numbers):
            return f"codec {cost.codec} on {cost.dtype}: the ratio must be above 0, no other number below it"
    if len({(cost.codec, cost.dtype) for cost in costs}) != len(costs):
        return "a codec stands twice for one type of values"
    return None
