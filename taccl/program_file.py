"""Opening what `taccl synth` writes and other tools make: MSCCL XML, or the native .json of an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import files
from taccl.errors import CheckFailed, Diagnostic, Infeasible, InvalidInput, UsageError

if TYPE_CHECKING:
    from taccl.profiles.topology import Topology
    from taccl.synth.algorithm import Algorithm
    from taccl.synth.check_certificate import Judgement
    from taccl.synth.collective import Collective
    from taccl.synth.program import Program
    from taccl.synth.symmetric.algorithm import SymmetricAlgorithm
    from taccl.synth.verify_finding import Finding

MAX_NATIVE_BYTES = 256 << 20
# Beyond so many ranks no program is made: one send peer and one receive peer to a threadblock, a GPU has no room for
# the threadblocks of a schedule with hundreds of peers, and MSCCL's loaders were written for far fewer.
LOWERED_RANKS = 128
COLLECTIVE_OPTIONS = ("collective", "root", "demand", "pairs", "groups", "pre_post")
TURNS = "turns"  # in the provenance of a native file: false where `taccl choose` found it quicker without
PROTOCOL = "protocol"  # in the provenance of a native file whose program was made for another one than Simple
HEAD_CHARACTERS = 200  # in which a native file that taccl wrote says what it is


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """A program and what its file or the options say beyond it."""

    program: Program
    collective: Collective | None  # what it must achieve; None: what its attributes name
    algorithm: Algorithm | None = None  # that it was lowered from, of a native file
    topology: Topology | None = None  # that a native file holds
    judgement: Judgement | None = None  # of a native file's certificate; None: nobody asked
    limits: tuple[
        str, ...
    ] = ()  # what keeps the program from running at a native file's own size, a warning each


@dataclass(frozen=True, slots=True)
class NativeFile:
    """A native file whose schedule is right, and what its certificate is worth."""

    algorithm: Algorithm
    topology: Topology
    judgement: Judgement


class WrongAlgorithm(CheckFailed):
    """A native file whose schedule breaks its own promises; `problems` has a sentence for each."""

    def __init__(self, file: str, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([f"{file}: the algorithm is wrong", *problems]))


def collective_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options that say what a program must achieve where its file does not."""
    options: list[Any] = [
        click.option("--collective", metavar="NAME", help="Judge it as this, whatever its coll says."),
        click.option("--root", type=click.IntRange(0), help="Of broadcast, reduce, gather, scatter."),
        click.option(
            "--demand", metavar="ROWS|FILE", shell_complete=files, help="Of alltoallv, as for taccl synth."
        ),
        click.option("--pairs", metavar="A-B,...", help="Of sendrecv, as for taccl synth."),
        click.option(
            "--groups",
            metavar="RANKS|MESH|FILE",
            shell_complete=files,
            help="That do --collective side by side, as for taccl synth.",
        ),
        click.option(
            "--pre-post",
            metavar="FILE",
            shell_complete=files,
            help="Of a custom collective, as for taccl synth.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def options_among(file: str, names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """The options for one of several files: what XML does not say is told to XML alone, if there is any."""
    if not file.endswith(".json") or all(name.endswith(".json") for name in names):
        return options
    return {**options, **dict.fromkeys(COLLECTIVE_OPTIONS)}


def unproven_option(function: Callable[..., None]) -> Callable[..., None]:
    """The option for programs that `taccl verify` refuses, which `open_proven` obeys."""
    option = click.option(
        "--unproven", is_flag=True, help="Take a program that taccl verify finds wrong, with a warning."
    )
    return option(function)


def open_proven(file: str, options: dict[str, Any]) -> ProgramFile:
    """`open_program`, and refuse what `taccl verify` refuses; a native file's certificate is judged.

    Raises CheckFailed with what is wrong, too. With `unproven` among the options, a wrong program is only warned of; a
    wrong certificate or coding plan never passes.
    """
    opened = judged(open_program(file, options))
    _check_claims(file, opened)
    from taccl.synth.verify import is_unjudged, verify

    errors = [f for f in verify(opened.program, collective=opened.collective) if f.severity == "error"]
    if errors:
        verdict = "the program cannot be judged" if is_unjudged(errors) else "the program is wrong"
        lines = [f"{file}: {verdict}", *(finding.render(file) for finding in errors)]
        if not options["unproven"]:
            raise CheckFailed("\n".join([*lines, "--unproven takes it as it is"]))
        click.echo("\n".join(["taccl: warning: " + lines[0], *lines[1:]]), err=True)
    return opened


def judged(opened: ProgramFile) -> ProgramFile:
    """With the judgement of its certificate, if it is a native file."""
    if opened.algorithm is None or opened.topology is None:
        return opened
    from taccl.synth.check_certificate import judge_certificate

    return replace(opened, judgement=judge_certificate(opened.algorithm, opened.topology))


def certificate_findings(opened: ProgramFile | NativeFile) -> list[Finding]:
    """What is untrue in a judged file's certificate."""
    from taccl.synth.verify_finding import Finding

    return [] if opened.judgement is None else [Finding("A101", p) for p in opened.judgement.problems]


def coding_findings(opened: ProgramFile | NativeFile) -> list[Finding]:
    """What is untrue in the coding plan of a native file."""
    from taccl.synth.coding.check import check_plan
    from taccl.synth.verify_finding import Finding

    if opened.algorithm is None or opened.topology is None:
        return []
    return [Finding("A102", problem) for problem in check_plan(opened.algorithm, opened.topology)]


def _check_claims(file: str, opened: ProgramFile | NativeFile) -> None:
    """Raise CheckFailed for a native file whose certificate or coding plan is untrue."""
    findings = certificate_findings(opened) + coding_findings(opened)
    if findings:
        raise CheckFailed("\n".join(finding.render(file) for finding in findings))


def open_program(file: str, options: dict[str, Any]) -> ProgramFile:
    """Read a program; `options` are those of `collective_options`.

    A native .json is lowered on the topology that it holds. Raises InvalidInput for the file, UsageError for
    options that do not fit, WrongAlgorithm for a schedule that cannot be lowered.
    """
    if file.endswith(".json"):
        return _open_native(file, options)
    from taccl.profiles.yaml_reader import read_most
    from taccl.synth.msccl_xml import MAX_FILE_BYTES, read_xml

    with Path(file).open("rb") as stream:
        program = read_xml(read_most(stream, MAX_FILE_BYTES + 1), file)
    name = program.collective if options["collective"] is None else options["collective"]
    root = program.root if options["root"] is None else options["root"]
    if root >= program.ranks:
        raise UsageError(f"--root {root}: the ranks of {file} are 0..{program.ranks - 1}")
    program = replace(program, collective=name, root=root)
    collective = _collective(program, options)
    if collective is not None and collective.groups:
        program = replace(
            program, collective="custom", root=0
        )  # no collective of all ranks, wherever it is written
    return ProgramFile(program, collective)


def size_of(opened: ProgramFile | NativeFile, given: int | None) -> int:
    """The size that an option names, else a native file's own. Raises UsageError without either."""
    if given is not None:
        return given
    if opened.algorithm is None:
        raise UsageError("--size is needed: XML does not say how large the collective is")
    return opened.algorithm.size_bytes


def topology_of(opened: ProgramFile | NativeFile, spec: str | None) -> Topology:
    """The topology that an option names, else the one in the native file. Raises UsageError without either."""
    from taccl.profiles.load import load_topology

    if spec is not None:
        return load_topology(spec)
    if opened.topology is None:
        raise UsageError("--topology is needed: XML does not say what cluster it is for")
    return opened.topology


def own_judgement(opened: ProgramFile | NativeFile, topology: Topology, size_bytes: int) -> Judgement | None:
    """The judgement of a native file's certificate where it speaks: on the file's own topology, at its own size."""
    if opened.algorithm is None or size_bytes != opened.algorithm.size_bytes:
        return None
    return opened.judgement if topology is opened.topology or topology == opened.topology else None


@dataclass(frozen=True, slots=True)
class ScheduleFile:
    """A native file of more ranks than programs are made for, judged."""

    algorithm: SymmetricAlgorithm
    topology: Topology
    problems: tuple[str, ...]  # of the schedule
    judgement: Judgement | None  # of its certificate; None for a wrong schedule


def open_large(file: str) -> ScheduleFile | None:
    """The schedule in a native file if it has too many ranks for a program, else None. Raises InvalidInput."""
    from taccl.profiles.link_table import link_table
    from taccl.profiles.yaml_reader import read_text
    from taccl.synth.check_certificate import judge_certificate
    from taccl.synth.check_table import check_table
    from taccl.synth.native import read_schedule
    from taccl.synth.native_symmetric import SCHEMA
    from taccl.synth.places import Places
    from taccl.synth.symmetric.algorithm import SymmetricAlgorithm

    if not file.endswith(".json"):
        return None
    text = read_text(Path(file), MAX_NATIVE_BYTES)
    if SCHEMA not in text[:HEAD_CHARACTERS]:
        return None  # read by open_program, once
    made, topology = read_schedule(text, file)
    if not isinstance(made, SymmetricAlgorithm) or made.ranks <= LOWERED_RANKS:
        return None
    links = link_table(topology)
    places = Places(made.collective, made.ranks, made.partition, made.root)
    problems = check_table(topology, links, places, made.size_bytes, made.batches(links), made.time_fs)
    judgement = None if problems else judge_certificate(made, topology)
    return ScheduleFile(made, topology, tuple(problems), judgement)


def open_native(file: str, options: dict[str, Any]) -> NativeFile | None:
    """A native file whose schedule is right, judged, without making its program; None for XML.

    Raises as `open_program` does, and CheckFailed for a certificate or coding plan that claims too much.
    """
    from taccl.synth.check_certificate import judge_certificate

    if not file.endswith(".json"):
        return None
    algorithm, topology = _read_native(file, options)
    judgement = judge_certificate(algorithm, topology)
    opened = NativeFile(algorithm, topology, judgement)
    _check_claims(file, opened)
    return opened


def _open_native(file: str, options: dict[str, Any]) -> ProgramFile:
    from taccl.synth.fifo_slots import within_slots
    from taccl.synth.lower import lower_exact
    from taccl.synth.program import FIFO_DEPTH
    from taccl.synth.program_collective import collective_of
    from taccl.synth.program_graph import graph_of
    from taccl.synth.verify import buffering

    algorithm, topology = _read_native(file, options)
    protocol = algorithm.provenance.get(PROTOCOL, "Simple")
    if not isinstance(protocol, str) or protocol not in FIFO_DEPTH:
        message = f"provenance.{PROTOCOL}: expected one of {', '.join(FIFO_DEPTH)}"
        raise InvalidInput([Diagnostic(file, 0, 0, "N100", message)])
    program = lower_exact(algorithm, topology, protocol=protocol).program
    # As taccl synth writes the program.
    findings = buffering(program, graph_of(program))
    program, limits = within_slots(program, findings, algorithm.size_bytes)
    wanted = algorithm.collective
    if wanted.size_chunks != program.chunks_per_loop:
        # Chunks that always travel together are one in the program.
        wanted = collective_of(wanted.name, wanted.ranks, program.chunks_per_loop)
    return ProgramFile(program, wanted, algorithm, topology, limits=limits)


def _read_native(file: str, options: dict[str, Any]) -> tuple[Algorithm, Topology]:
    from taccl.codec_claims import check_claims
    from taccl.profiles.yaml_reader import read_text
    from taccl.synth.check_algorithm import check_algorithm
    from taccl.synth.native import read_schedule
    from taccl.synth.symmetric.algorithm import SymmetricAlgorithm

    for name in COLLECTIVE_OPTIONS:
        if options[name] is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for XML; {file} says what its collective is")
    algorithm, topology = read_schedule(read_text(Path(file), MAX_NATIVE_BYTES), file)
    if isinstance(algorithm, SymmetricAlgorithm):
        if algorithm.ranks > LOWERED_RANKS:
            raise Infeasible(
                f"{file} is a schedule of {algorithm.ranks} ranks, and programs are made and schedules explained for "
                f"up to {LOWERED_RANKS}: taccl verify proves the schedule itself"
            )
        algorithm = algorithm.to_algorithm(topology)
    if algorithm.coding is not None:
        check_claims(file, [algorithm.coding.cost])
    problems = check_algorithm(algorithm, topology)
    if problems:
        raise WrongAlgorithm(file, problems)
    return algorithm, topology


def _collective(program: Program, options: dict[str, Any]) -> Collective | None:
    from taccl.commands.synth import read_pairs
    from taccl.demand import read_demand
    from taccl.groups import read_groups
    from taccl.profiles.yaml_reader import read_text
    from taccl.synth.collective import NAMES
    from taccl.synth.collective_file import read_collective
    from taccl.synth.program_collective import collective_of

    if program.collective not in NAMES and options["collective"] is not None:
        raise UsageError(f"--collective {program.collective}: known are {', '.join(NAMES)}")
    if options["pre_post"] is not None:
        custom = read_collective(read_text(Path(options["pre_post"])), options["pre_post"])
        if custom.ranks != program.ranks:
            raise UsageError(
                f"{options['pre_post']} has {custom.ranks} ranks, and the program {program.ranks}"
            )
        return custom
    demand, pairs = read_demand(options["demand"]), read_pairs(options["pairs"])
    groups = read_groups(options["groups"], program.ranks)
    if groups is not None and options["collective"] is None:
        raise UsageError("--groups needs --collective: XML does not say what groups do (coll is custom)")
    if demand is None and pairs is None and groups is None:
        return None
    try:
        return collective_of(
            program.collective,
            program.ranks,
            program.chunks_per_loop,
            program.root,
            demand=demand,
            pairs=pairs,
            groups=groups,
        )
    except CheckFailed as error:
        raise UsageError(str(error)) from error
