"""Programs from files as collectives in one's own MPI program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    import numpy as np

    from taccl.runtime.bench import Loaded
    from taccl.runtime.bench_settings import Settings
    from taccl.runtime.codecs import Codec, ErrorFeedback
    from taccl.runtime.collective import BoundCollective
    from taccl.runtime.job import Job, Neighbours

    Array = np.ndarray[Any, Any]

COLLECTIVE_OPTIONS = ("collective", "root", "demand", "pairs", "groups", "pre_post")
LINKS = ("nodes", "all", "planned")


def open_collective(
    job: Job,
    file: str | os.PathLike[str],
    input: Array,
    output: Array,
    *,
    op: str | None = None,
    codec: str | None = None,
    links: str | None = None,
    feedback: ErrorFeedback | None = None,
    recode: bool = False,
    **collective: Any,
) -> BoundCollective:
    """A program on the caller's arrays, of numpy or of CuPy, to be called again and again; see `BoundCollective`.

    file: MSCCL XML or the native .json of an algorithm. op: default the file's, or "sum". codec, links, recode: as
    --codec, --codec-links and --recode of `taccl run`, whose default is what the file plans; "raw" codes nothing.
    collective: what an XML file does not say, as the options of `taccl run` (root, demand, pairs, groups, pre_post,
    collective).
    Collective over the ranks of the job. What is wrong with file or options is raised on rank 0, in the words of
    `taccl run`.
    """
    import os

    import numpy as np

    from taccl.runtime.collective import BoundCollective, check_kinds, on_device

    given = {"op": op, "codec": codec, "links": links, "feedback": feedback, "recode": recode, **collective}
    job.together("the check of the options", lambda: _check_options(file, given))
    job.together("the check of the arrays", lambda: check_kinds(input, output))
    options = {
        **dict.fromkeys(COLLECTIVE_OPTIONS), **collective, "file": os.fspath(file), "codecs": codec,
        "codec_links": links, "op": op, "dtype": str(input.dtype), "calibrate": False, "accumulate": "type",
        "codec_at": "collective", "recode": recode,
    }  # fmt: skip
    there = job.together("the check of the arrays", lambda: on_device(input))
    anywhere = bool(job.gather_bytes(np.array([there], np.uint8), "the check of the arrays").any())
    options["device"] = "cuda" if anywhere else "host"
    loaded, reduction, chosen, where = job.together("the reading of the file", lambda: _prepare(job, options))
    reach = _reach(job, there) if anywhere else None
    return BoundCollective(job, loaded, input, output, reduction, chosen, where, feedback, reach, recode)


def _check_options(file: Any, options: dict[str, Any]) -> None:
    """Raise UsageError for what is no option, or nothing that the option can be."""
    import os

    from taccl.errors import UsageError
    from taccl.runtime.codecs import ErrorFeedback

    if not isinstance(file, str | os.PathLike) or not isinstance(os.fspath(file), str):
        raise UsageError(f"file must be the path of a program; it is {file!r}")
    for name, value in options.items():
        if name in ("op", "codec"):
            wanted, fits = "a name", value is None or isinstance(value, str)
        elif name == "links":
            wanted, fits = f"one of {', '.join(LINKS)}", value is None or value in LINKS
        elif name == "feedback":
            wanted, fits = "an ErrorFeedback", value is None or isinstance(value, ErrorFeedback)
        elif name == "recode":
            wanted, fits = "True or False", isinstance(value, bool)
        elif name in COLLECTIVE_OPTIONS:
            continue
        else:
            raise UsageError(
                f"open_collective has no option {name!r}; it has op, codec, links, feedback, recode, and for XML "
                f"{', '.join(COLLECTIVE_OPTIONS)}"
            )
        if not fits:
            raise UsageError(f"{name} must be {wanted}, or be left out; it is {value!r}")


def _reach(job: Job, there: bool) -> tuple[Settings, Neighbours]:
    """How device memory travels, as `taccl run` finds it. there: whether this rank's arrays are on a device. Raises
    UsageError, on all ranks, where some are not."""
    from taccl.commands.run_devices import reach_devices
    from taccl.errors import UsageError

    def check() -> None:
        if not there:
            raise UsageError("the arrays of other ranks are on a device, and those of this one are not")

    job.together("the check of the arrays", check)
    return reach_devices(job)


def _prepare(job: Job, options: dict[str, Any]) -> tuple[Loaded, str | None, Codec | None, str]:
    """The program, the reduction, the codec, and which messages it codes."""
    from dataclasses import replace

    from taccl.commands.run_codecs import choose_codecs
    from taccl.commands.run_prepare import load_program
    from taccl.errors import Diagnostic, InvalidInput, UsageError
    from taccl.runtime import gpu
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
    if options["device"] == "cuda" and ops:
        gpu.check_reductions(dtype.numpy for dtype in choice.dtypes)
    if len(ops) > 1 or len(choice.names) > 1:
        raise UsageError("one reduction and one codec are used at a time")
    codec = None if choice.names == (RAW,) else CODECS[choice.names[0]]
    found = replace(loaded, planned=choice.plan, topology=opened.topology)
    return found, ops[0] if ops else None, codec, choice.links
