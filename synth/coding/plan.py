"""The decision which messages of a schedule travel as frames of a codec."""

from __future__ import annotations

from dataclasses import dataclass

from taccl.profiles.codec_cost import CodecCost

Hop = tuple[int, int, int, str]  # (source rank, destination rank, chunk, op of the message)


@dataclass(frozen=True, slots=True)
class CodingPlan:
    """Which messages of an algorithm travel as frames, and what the algorithm then takes.

    A chunk is coded by the first rank that sends it in a coded message. Ranks pass the frame on in coded messages and
    the values decoded from it in others; each rank that needs its values decodes it.
    """

    cost: CodecCost  # what the decision and the times below rest on
    messages: tuple[int, ...]  # indices into Algorithm.messages of those that are coded, ascending
    time_fs: int  # completion with coded messages, coding and decoding
    lower_bound_us: float  # for any algorithm whose messages may all be so much shorter
    uncoded_time_us: float  # of the best schedule without a codec that the same search knew
