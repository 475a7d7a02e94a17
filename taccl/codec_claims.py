"""What a profile or an algorithm says of a codec, beside what the codec is."""

from __future__ import annotations

from collections.abc import Iterable

from taccl.errors import Diagnostic, InvalidInput
from taccl.profiles.codec_cost import CodecCost


def check_claims(file: str, costs: Iterable[CodecCost]) -> None:
    """Raise InvalidInput where a file calls a lossy codec lossless, or a lossless one lossy.

    Synthesis and proof rest on that: lossless codecs may code sums again, and are taken without being asked for. Of a
    codec that is not known here the file is believed.
    """
    from taccl.runtime.codecs import CODECS

    for cost in costs:
        codec = CODECS.get(cost.codec)
        if codec is not None and codec.lossless != cost.lossless:
            said, truth = ("lossless", "lossy") if cost.lossless else ("lossy", "lossless")
            raise InvalidInput([Diagnostic(
                file, 0, 0, "C006", f"it calls codec {cost.codec} {said}, which is {truth}",
                "correct its `lossless`, or measure it anew (taccl profile --codecs)",
            )])  # fmt: skip
