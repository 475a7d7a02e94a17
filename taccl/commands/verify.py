"""`taccl verify FILE`: prove that a program does what its collective promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import topologies
from taccl.commands.options import print_json
from taccl.errors import UsageError
from taccl.program_file import (
    ProgramFile,
    ScheduleFile,
    WrongAlgorithm,
    certificate_findings,
    coding_findings,
    collective_options,
    judged,
    open_large,
    open_program,
)

if TYPE_CHECKING:
    from taccl.synth.program import Program
    from taccl.synth.verify_finding import Finding


@click.command("verify")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--topology",
    metavar="T",
    shell_complete=topologies,
    help="Check a native .json's times for this topology too.",
)
@collective_options
@click.option("--strict", is_flag=True, help="Limits that only some loaders have are errors, not warnings.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Prove that a program does what its collective promises.

    FILE is MSCCL XML from any tool, or a native .json algorithm (then the program it is lowered to is proven
    as well, and its certificate as far as that can be done). For each mode that the program claims: every output
    chunk holds each contribution exactly once, in every order of execution; no deadlock; nothing that loaders
    refuse. Exit code 1 if anything is wrong.
    """
    from taccl.profiles.load import load_topology
    from taccl.synth.check_algorithm import check_algorithm
    from taccl.synth.verify import is_unjudged, verify
    from taccl.synth.verify_finding import Finding

    file = options["file"]
    large = open_large(file)
    if large is not None:
        _judge_large(ctx, large, options)
        return
    if options["topology"] is not None and not file.endswith(".json"):
        raise UsageError(
            "--topology checks the times of a native .json file; a program says nothing of links"
        )
    cluster = None if options["topology"] is None else load_topology(options["topology"])
    findings: list[Finding] = []
    what = "the algorithm"
    try:
        opened = judged(open_program(file, options))
    except WrongAlgorithm as wrong:
        opened = None
        findings += [Finding("A100", problem) for problem in wrong.problems]
    if opened is not None:
        if opened.algorithm is not None and cluster is not None:
            findings += [Finding("A100", problem) for problem in check_algorithm(opened.algorithm, cluster)]
        if not findings:
            findings += coding_findings(opened)
        findings += certificate_findings(opened)
        findings += verify(opened.program, collective=opened.collective, strict=options["strict"])
        findings += [Finding("V303", limit, "warning") for limit in opened.limits]
        what = _words(opened)
    errors = [finding for finding in findings if finding.severity == "error"]
    warnings = [finding for finding in findings if finding.severity == "warning"]
    notes = [finding for finding in findings if finding.severity == "note"]
    if options["as_json"]:
        print_json({
            "schema": "taccl/verify/v1",
            "file": file,
            "ok": not errors,
            **_numbers(opened),
            "certificate": _certificate(opened),
            "errors": [_entry(finding) for finding in errors],
            "warnings": [_entry(finding) for finding in warnings],
            "notes": [_entry(finding) for finding in notes],
        })  # fmt: skip
    else:
        for finding in errors + warnings + notes:
            click.echo(finding.render(file))
        verdict = f"wrong, {len(errors)} error{'s' * (len(errors) > 1)}" if errors else "correct"
        if is_unjudged(errors):
            verdict = "not judged"
        click.echo(f"{file}: {verdict}: {what}")
        if opened is not None and opened.judgement is not None and not errors:
            click.echo(f"{file}: certificate: {opened.judgement.text()}")
    if errors:
        ctx.exit(1)


def _judge_large(ctx: click.Context, opened: ScheduleFile, options: dict[str, Any]) -> None:
    """A schedule of more ranks than programs are made for: it is proved message by message."""
    from taccl.synth.cost import us
    from taccl.synth.verify_finding import Finding

    only = ("topology", "collective", "root", "demand", "pairs", "groups", "pre_post")
    given = [name for name in only if options[name] is not None]
    if given:
        raise UsageError(
            f"--{given[0].replace('_', '-')} is for programs; {options['file']} is a schedule without one"
        )
    file, made, judgement = options["file"], opened.algorithm, opened.judgement
    errors = [Finding("A100", problem) for problem in opened.problems]
    if judgement is not None:
        errors += [Finding("A101", problem) for problem in judgement.problems]
    proved = None if errors or judgement is None else judgement
    if options["as_json"]:
        print_json({
            "schema": "taccl/verify/v1",
            "file": file,
            "ok": not errors,
            "collective": made.collective,
            "ranks": made.ranks,
            "groups": [],
            "steps": None,
            "modes": None,
            "certificate": None if proved is None else proved.document(),
            "errors": [_entry(finding) for finding in errors],
            "warnings": [],
            "notes": [],
        })  # fmt: skip
    else:
        for finding in errors:
            click.echo(finding.render(file))
        verdict = f"wrong, {len(errors)} error{'s' * (len(errors) > 1)}" if errors else "correct"
        click.echo(
            f"{file}: {verdict}: schedule of {made.collective}, {made.ranks} ranks, {made.message_count} messages, "
            f"{us(made.time_fs):.3f} us, without a program"
        )
        if proved is not None:
            click.echo(f"{file}: certificate: {proved.text()}")
    if errors:
        ctx.exit(1)


def _certificate(opened: ProgramFile | None) -> dict[str, Any] | None:
    """What is proved of a native file's certificate; None without one, or when it is wrong."""
    judgement = None if opened is None else opened.judgement
    return None if judgement is None or judgement.problems else judgement.document()


def _modes(program: Program) -> list[str]:
    claims = (("in place", program.inplace), ("out of place", program.outofplace))
    return [name for name, claim in claims if claim]


def _numbers(opened: ProgramFile | None) -> dict[str, Any]:
    """What the JSON says of the program; nulls for an algorithm that could not be lowered to one."""
    if opened is None:
        return dict.fromkeys(("collective", "ranks", "groups", "steps", "modes"))
    program, collective = opened.program, opened.collective
    return {
        "collective": program.collective if collective is None else collective.name,
        "ranks": program.ranks,
        "groups": [] if collective is None else [list(group) for group in collective.groups],
        "steps": _steps(program),
        "modes": _modes(program),
    }


def _words(opened: ProgramFile) -> str:
    program = opened.program
    modes = " and ".join(_modes(program)) or "no mode"
    name = program.collective if opened.collective is None else opened.collective.title
    plan = None if opened.algorithm is None else opened.algorithm.coding
    coded = "" if plan is None else f", {len(plan.messages)} messages coded by {plan.cost.codec}"
    return f"{name}, {program.ranks} ranks, {_steps(program)} steps, {modes}{coded}"


def _steps(program: Program) -> int:
    return sum(len(tb.steps) for gpu in program.gpus for tb in gpu.threadblocks)


def _entry(finding: Finding) -> dict[str, Any]:
    def known(number: int) -> int | None:
        return number if number >= 0 else None

    return {
        "code": finding.code,
        "message": finding.message,
        "rank": known(finding.rank),
        "threadblock": known(finding.threadblock),
        "step": known(finding.step),
        "line": finding.line or None,
        "mode": finding.mode or None,
    }
