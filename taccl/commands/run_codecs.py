"""Which messages `taccl run` codes, and with what: as options say, or as the file plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taccl.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from taccl.program_file import ProgramFile
    from taccl.runtime.dtypes import DType
    from taccl.runtime.planned import Planned
    from taccl.synth.collective import Collective

_ON_DEVICES = ("xw", "bf16", "bf16-xw", "q8", "fp8")
IGNORE = "--codec raw runs the file without its plan"


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """What is coded."""

    names: tuple[str, ...]  # of codecs, and "raw"
    links: str  # as in Settings.codec_links
    plan: Planned | None  # where links are "planned"
    dtypes: tuple[DType, ...]


def choose_codecs(
    options: dict[str, Any], opened: ProgramFile, collective: Collective, ops: tuple[str, ...]
) -> CodecChoice:
    """From the options and the file's coding plan, which counts unless --codec says otherwise.

    Raises UsageError for what a codec cannot do or was not planned for, EnvironmentProblem without its package,
    CheckFailed for a plan that is wrong.
    """
    from taccl.program_file import coding_findings
    from taccl.runtime.dtypes import DTYPES, select_dtypes
    from taccl.runtime.planned import planned

    file, asked, links = options["file"], options["codecs"], options["codec_links"]
    plan = None
    if opened.algorithm is not None and (asked is None or links == "planned"):
        if wrong := coding_findings(opened):
            raise CheckFailed("\n".join([*(finding.render(file) for finding in wrong), IGNORE]))
        plan = planned(opened.algorithm, collective)
    if plan is None and links == "planned":
        raise UsageError(f"--codec-links planned: {file} plans no coded messages")
    if plan is not None and asked is None and links not in (None, "planned"):
        raise UsageError(f"{file} plans which messages are coded; --codec-links {links} needs --codec")
    if plan is not None and plan.dtype not in DTYPES:
        raise UsageError(f"{file} plans codec {plan.codec} for {plan.dtype}, which cannot be run: {IGNORE}")
    if plan is not None and asked is None and options["recode"]:
        raise UsageError(
            f"--recode is for other codecs than the one that {file} plans, {plan.codec}: leave it out, or give --codec"
        )
    dtypes = tuple(select_dtypes(options["dtype"] or ("float32" if plan is None else plan.dtype)))
    if plan is not None and asked is None:
        _check_types(options, plan, dtypes, ops)
    if plan is None and asked is None:
        for name, given in (
            ("--codec-links", links is not None),
            ("--codec-at hop", options["codec_at"] == "hop"),
            ("--recode", options["recode"]),
        ):
            if given:
                raise UsageError(
                    f"{name} says how messages are coded, and none are: give --codec as well, or leave it out"
                )
    names = ("raw",) if plan is None else (plan.codec,)
    if asked is not None:
        names = tuple(dict.fromkeys(asked.split(",")))
    check_codecs(
        options, names, "--codec" if asked is not None or plan is None else f"{file} plans codec", dtypes, ops
    )
    return CodecChoice(names, "planned" if plan is not None else links or "nodes", plan, dtypes)


def _check_types(
    options: dict[str, Any], plan: Planned, dtypes: tuple[DType, ...], ops: tuple[str, ...]
) -> None:
    """Raise UsageError where other values would travel than those that the file has a plan for."""
    from taccl.runtime.dtypes import inside_type

    others = [dtype.name for dtype in dtypes if dtype.name != plan.dtype]
    if others:
        raise UsageError(
            f"{options['file']} plans codec {plan.codec} for {plan.dtype}, and -d asks for {', '.join(others)}: "
            f"{IGNORE}, and taccl synth makes a plan for another type"
        )
    for dtype in dtypes:
        for op in ops:
            inside = inside_type(dtype, op, options["accumulate"])
            if inside.name != plan.dtype:
                raise UsageError(
                    f"{options['file']} plans codec {plan.codec} for {plan.dtype}, and with --accumulate "
                    f"{options['accumulate']} its messages are {inside.name}: {IGNORE}"
                )


def check_codecs(
    options: dict[str, Any], names: tuple[str, ...], by: str, dtypes: tuple[DType, ...], ops: tuple[str, ...]
) -> None:
    """Raise UsageError for what a codec cannot do, EnvironmentProblem without its package. by: who names them."""
    from taccl.runtime.codecs import CODECS, zstd
    from taccl.runtime.dtypes import inside_type

    for name in names:
        if name not in CODECS:
            hint = "; synthesis chooses one: taccl synth --codec auto -o FILE.json" if name == "auto" else ""
            raise UsageError(f"{by} {name!r}: unknown; known: {', '.join(CODECS)}{hint}")
        if name == "raw":
            continue
        # Before the device is looked for.
        if name == "zstd" and options["device"] == "cuda":
            raise UsageError(
                f"{by} zstd, which has no kernel for devices: take {', '.join(_ON_DEVICES)}, or leave out --device cuda"
            )
        codec = CODECS[name]
        for dtype in dtypes:
            for op in ops or (None,):
                inside = inside_type(dtype, op, options["accumulate"])
                if inside.name not in codec.dtypes:
                    raise UsageError(f"{by} {name} takes {', '.join(codec.dtypes)}; not {inside.name}")
                if op == "prod" and not codec.lossless:
                    raise UsageError(
                        f"{by} {name}: products of rounded values have no error that can be promised"
                    )
        if name == "zstd":
            zstd.load()
    if names == ("raw",):
        return
    if options["calibrate"]:
        raise UsageError(
            "--calibrate compares with a model of messages that are not coded; leave out --codec, or give --codec raw "
            "where the file plans coded messages"
        )
