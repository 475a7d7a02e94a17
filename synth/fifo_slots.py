"""Sizes at which a program's messages fit the slots of MSCCL's FIFOs, and so travel whole.

Larger ones travel in pieces, of which a connection holds no more than of messages: a program may then wait for ever
(V303). Such a program is for the sizes below.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from taccl.synth.program import RECEIVES, SENDS, SLOT_BYTES, Program
from taccl.synth.verify_finding import Finding


def whole_up_to(program: Program) -> int:
    """The largest size in bytes at which every message fits one slot of the default FIFO."""
    steps = (step for gpu in program.gpus for block in gpu.threadblocks for step in block.steps)
    most = max((step.count for step in steps if step.kind in SENDS or step.kind in RECEIVES), default=1)
    return SLOT_BYTES[program.protocol] * program.chunks_per_loop // most


def within_slots(
    program: Program, findings: Iterable[Finding], size_bytes: int
) -> tuple[Program, tuple[str, ...]]:
    """The program with a `maxBytes` that keeps it from waiting for ever, and a warning if size_bytes is beyond.

    findings: what `verify` says of it. A program made for larger sizes alone (its `minBytes`) stays as it is.
    """
    if not any(finding.code == "V303" for finding in findings):
        return program, ()
    limit = whole_up_to(program)
    if limit >= max(1, program.min_bytes):
        program = replace(program, max_bytes=min(program.max_bytes, limit))
    if size_bytes <= limit:
        return program, ()
    return program, (
        f"beyond {limit} bytes MSCCL's kernels would wait for ever in this program: messages of several chunks no "
        "longer fit a slot of the default FIFO; --no-batching or a larger --partition may avoid that, and taccl run "
        "is not concerned",
    )
