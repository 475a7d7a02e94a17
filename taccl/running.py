"""Programs from files as collectives in one's own MPI program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from taccl.runtime.bench import Loaded
    from taccl.runtime.codecs import Codec, ErrorFeedback
    from taccl.runtime.collective import BoundCollective
    from taccl.runtime.job import Job

    Array = np.ndarray[Any, Any]

COLLECTIVE_OPTIONS = ("collective", "root", "demand", "pairs", "groups", "pre_post")


def open_collective(
    job: Job,
    file: str,
    input: Array,
    output: Array,
    *,
    op: str | None = None,
    codec: str | None = None,
    links: str | None = None,
    feedback: ErrorFeedback | None = None,
    **collective: Any,
) -> BoundCollective:
    """A program on the caller's arrays, to be called again and again; see `BoundCollective`.

    file: MSCCL XML or the native .json of an algorithm. op: default the file's, or "sum". codec, links: as --codec and
    --codec-links of `taccl run`, whose default is what the file plans; "raw" codes nothing. collective: what an XML
    file does not say, as the options of `taccl run` (root, demand, pairs, groups, pre_post, collective).
    Collective over the ranks of the job. What is wrong with file or options is raised on rank 0, in the words of
    `taccl run`.
    """
    from taccl.runtime.collective import BoundCollective

    unknown = sorted(set(collective) - set(COLLECTIVE_OPTIONS))
    if unknown:
        raise TypeError(f"open_collective has no option {unknown[0]!r}")
    options = {
        **dict.fromkeys(COLLECTIVE_OPTIONS), **collective, "file": file, "codecs": codec, "codec_links": links,
        "op": op, "dtype": str(input.dtype), "device": "host", "calibrate": False, "accumulate": "type",
    }  # fmt: skip
    loaded, reduction, chosen, where = job.together("the reading of the file", lambda: _prepare(job, options))
    return BoundCollective(job, loaded, input, output, reduction, chosen, where, feedback)


def _prepare(job: Job, options: dict[str, Any]) -> tuple[Loaded, str | None, Codec | None, str]:
    """The program, the reduction, the codec, and which messages it codes."""
    from dataclasses import replace

    from taccl.commands.run_codecs import choose_codecs
    from taccl.commands.run_prepare import load_program
    from taccl.errors import Diagnostic, InvalidInput, UsageError
    from taccl.runtime.bench_settings import RAW
    from taccl.runtime.codecs import CODECS
    from taccl.runtime.dtypes import select_ops

    file, asked = options["file"], options["op"]
    try:
        loaded, opened = load_program(job, file, options)
    except OSError as error:
        place = str(error.filename or file)
        raise InvalidInput([Diagnostic(place, 0, 0, "R100", error.strerror or str(error))]) from error
    program, collective = loaded.program, loaded.collective
    if asked is not None and not collective.combining:
        raise UsageError(f"{collective.name} copies data and reduces nothing; leave out op")
    ops = tuple(select_ops(asked or program.reduce_op or "sum")) if collective.combining else ()
    choice = choose_codecs(options, opened, collective, ops)
    if len(ops) > 1 or len(choice.names) > 1:
        raise UsageError("one reduction and one codec are used at a time")
    codec = None if choice.names == (RAW,) else CODECS[choice.names[0]]
    return replace(loaded, planned=choice.plan), ops[0] if ops else None, codec, choice.links
