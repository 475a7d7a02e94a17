"""`taccl synth`: synthesise an algorithm for a collective on a topology."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import files, sketches, topologies
from taccl.commands.options import Quantity, Size, check_output, print_json, write_output
from taccl.demand import read_demand
from taccl.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from taccl.produce import Product
    from taccl.synth.request import Progress

COLLECTIVES = (
    "allgather", "alltoall", "alltoallv", "reducescatter", "allreduce", "broadcast", "reduce", "gather",
    "scatter", "sendrecv", "custom",
)  # fmt: skip
ENGINES = (
    "auto", "cp-sat", "greedy", "ring", "recursive-doubling", "direct", "hierarchical", "double-binary-tree",
    "circulant", "chain", "one-shot-doubling", "one-shot-levels", "one-shot-pairs", "one-shot-trees",
)  # fmt: skip
PROTOCOLS = ("Simple", "LL", "LL128")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")


@click.command("synth")
@click.option(
    "-t",
    "--topology",
    required=True,
    metavar="T",
    shell_complete=topologies,
    help="Bundled profile (ndv2:2) or YAML file.",
)
@click.option(
    "-s",
    "--sketch",
    metavar="S",
    shell_complete=sketches,
    help="Bundled sketch (ndv2-sk-1) or file; default: none.",
)
@click.option("-c", "--collective", required=True, type=click.Choice(COLLECTIVES), help="What to synthesise.")
@click.option("--size", type=Size(), help="nccl-tests size: 1MB = 10^6, 1MiB = 2^20 bytes; or the sketch's.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    shell_complete=files,
    help="Write .xml (program) or .json (algorithm), in a folder that is made if it is missing; - is stdout.",
)
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="auto",
    show_default=True,
    help="What searches. Other names that an answer may carry (batched, forest, ...) are stages of auto; see "
    "docs/synthesis.md.",
)
@click.option(
    "--partition", type=click.IntRange(1, 4096), metavar="K", help="Chunks per block of a rank. [chosen]"
)
@click.option(
    "--root", type=click.IntRange(0), default=0, show_default=True, help="Root of rooted collectives."
)
@click.option(
    "--demand",
    metavar="ROWS|FILE",
    shell_complete=files,
    help='alltoallv: blocks from i (row) to j, e.g. "0,2;1,0".',
)
@click.option("--pairs", metavar="A-B,...", help="sendrecv: who sends to whom. [each rank to the next]")
@click.option(
    "--groups",
    metavar="RANKS|MESH|FILE",
    shell_complete=files,
    help='Each group does it for itself, all at once: "0,8 1,9", "0-7 8-15", or what varies in a mesh: '
    "dp=2,tp=8:dp. --size and --root are a group's own.",
)
@click.option(
    "--pre-post",
    metavar="FILE",
    shell_complete=files,
    help="custom: YAML file with the place of every chunk.",
)
@click.option(
    "--instances", type=click.IntRange(1, 32), default=1, show_default=True, help="Copies on own channels."
)
@click.option(
    "--protocol", type=click.Choice(PROTOCOLS), default="Simple", show_default=True, help="Of the program."
)
@click.option(
    "--batching/--no-batching", default=True, show_default=True, help="Messages may carry several chunks."
)
@click.option(
    "--codec",
    metavar="NAME",
    help="Code messages where that pays by the profile's `codecs`: auto (lossless ones), none, or a codec. [the "
    "sketch's, or auto]",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Of the values that a codec would code.",
)
@click.option(
    "--time-limit", type=Quantity("s", 0.1, 1e6), metavar="S", help="Seconds. [the sketch's, or 60]"
)
@click.option(
    "--target-gap", type=Quantity("fraction", 0, 1), metavar="G", help="Stop at this gap, e.g. 5%. [0]"
)
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of the solver."
)
@click.option(
    "--workers", type=click.IntRange(1, 256), default=2, show_default=True, help="Threads of the solver."
)
@click.option(
    "--sweep",
    metavar="SIZES",
    help="Many sizes at once: 1KB:1GB, 1KB:1GB:2 (every twofold) or 1KB,1MB; -o is a folder then.",
)
@click.option(
    "--check-up-to-date", is_flag=True, help="Write nothing; fail if FILE is not what would be made."
)
@click.option(
    "--alternatives",
    type=click.IntRange(1, 32),
    metavar="N",
    help="Also write the N next best schedules, beside FILE.json to FILE.2.json and so on; `taccl choose` times them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Synthesise an algorithm for a collective on a topology.

    The program is verified and priced before anything is written. Ctrl-C keeps the best algorithm found so
    far (exit code 130); a second Ctrl-C gives up.

        taccl synth --topology ndv2:1 --collective allgather --size 1MB -o allgather.xml

    --groups makes one schedule for groups of ranks that do the same collective at the same time and share links:

        taccl synth -t dgx-a100:2 -c allreduce --size 64MB --groups dp=2,tp=8:dp -o gradients.json

    --sweep makes the programs that are the quickest somewhere among many sizes, each with the range of sizes
    (minBytes, maxBytes) where it is:

        taccl synth --topology ndv2:1 --collective allgather --sweep 1KB:1GB -o allgather
    """
    from taccl.alternatives import path_of
    from taccl.produce import Order, produce, suffix_of
    from taccl.product_document import document

    output, sizes = options["output"], options["sweep"]
    if sizes is not None and (options["size"] is not None or options["check_up_to_date"]):
        raise UsageError("--sweep goes with neither --size nor --check-up-to-date")
    if output is not None and sizes is None:
        suffix_of(output)
        if not options["check_up_to_date"]:
            check_output(output)
        for number in range(2, (options["alternatives"] or 0) + 2):
            check_output(path_of(output, number))
    if output == "-" and options["as_json"] and sizes is None:
        raise UsageError("-o - and --json both want stdout; write the algorithm to a file")
    if options["alternatives"]:
        if output in (None, "-"):
            raise UsageError("--alternatives writes files beside the one of -o FILE; name it")
        if sizes is not None or options["check_up_to_date"]:
            raise UsageError("--alternatives goes with neither --sweep nor --check-up-to-date")
    plain = sizes is not None or (output is not None and suffix_of(output) == ".xml")
    if plain and options["codec"] not in (None, "none"):
        raise UsageError("--codec needs -o FILE.json: MSCCL XML has no room for compression")
    if options["check_up_to_date"] and output in (None, "-"):
        raise UsageError("--check-up-to-date needs -o FILE, the file to compare")
    before = _content(output) if options["check_up_to_date"] else b""
    order = Order(
        topology=options["topology"],
        collective=options["collective"],
        size_bytes=options["size"],
        sketch=options["sketch"],
        engine=options["engine"],
        root=options["root"],
        partition=options["partition"],
        demand=read_demand(options["demand"]),
        pairs=read_pairs(options["pairs"]),
        groups=options["groups"],
        pre_post=options["pre_post"],
        instances=options["instances"],
        protocol=options["protocol"],
        time_limit_s=options["time_limit"],
        target_gap=options["target_gap"],
        seed=options["seed"],
        workers=options["workers"],
        batching=options["batching"],
        codec=options["codec"],
        dtype=options["dtype"],
        alternatives=options["alternatives"] or 0,
    )
    _check_together(options)
    progress = _progress if sys.stderr.isatty() else None
    if sizes is not None:
        from taccl.commands.synth_sweep import run_sweep

        with _Interruption() as interruption:
            run_sweep(order, sizes, output, options["as_json"], progress, interruption.asked)
        if interruption.asked():
            click.echo("taccl: interrupted: the sizes so far are the sweep", err=True)
            ctx.exit(130)
        return
    with _Interruption() as interruption:
        suffixes = () if output is None else (suffix_of(output),)
        product = produce(order, progress, interruption.asked, suffixes)
    for warning in product.warnings:
        click.echo(f"taccl: warning: {warning}", err=True)
    if options["check_up_to_date"]:
        if interruption.asked():
            raise Interrupted("interrupted: whether the file is up to date was not found out")
        _compare(ctx, product, output, before, options["as_json"])
        return
    if output is not None:
        write_output(output, product.text(suffix_of(output)))
    others = _write_alternatives(product, output, bool(options["alternatives"]))
    if options["as_json"]:
        print_json(document(product, output) | ({"alternatives": others} if options["alternatives"] else {}))
    else:
        click.echo(_table(document(product, output)), err=output == "-")
        for other in others:
            what = f"{other['simulated_us']:.3f} us, {other['messages']} messages, {other['engine']}"
            click.echo(f"{'alternative':<12} {other['path']}: {what}")
        if options["alternatives"] and not others:
            click.echo(f"{'alternative':<12} none: nothing else that was found comes near")
    if interruption.asked():
        where = f"written to {output}" if output else "shown above; -o FILE would have kept it"
        click.echo(f"taccl: interrupted: the best algorithm found so far was {where}", err=True)
        ctx.exit(130)


def _write_alternatives(product: Product, output: str | None, wanted: bool) -> list[dict[str, Any]]:
    """Write the other schedules beside the best one, and say what they are."""
    from functools import partial
    from pathlib import Path

    from taccl.alternatives import MOST, path_of
    from taccl.produce import suffix_of
    from taccl.product_document import document

    said: list[dict[str, Any]] = []
    if output is None or not wanted:
        return said
    for number, other in enumerate(product.alternatives, 2):
        path = path_of(output, number)
        write_output(path, other.text(suffix_of(output)))
        whole = document(other, path)
        said.append({key: whole[key] for key in ("path", "engine", "partition", "messages", "simulated_us")})
    others = map(partial(path_of, output), range(len(said) + 2, MOST + 2))
    older = [path for path in others if Path(path).exists()]
    if older:
        what = "was not written by this call" if len(older) == 1 else "were not written by this call"
        click.echo(f"taccl: warning: {', '.join(older)} {what}: remove what is out of date", err=True)
    return said


def read_pairs(given: str | None) -> tuple[tuple[int, int], ...] | None:
    """The pairs of sendrecv, e.g. `0-3,3-0`."""
    if given is None:
        return None
    import re

    parts = [part.strip() for part in given.split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"\d{1,6}-\d{1,6}", part, re.ASCII) for part in parts):
        raise UsageError("--pairs are ranks joined by a dash, separated by commas, e.g. 0-3,3-0")
    return tuple((int(part.split("-")[0]), int(part.split("-")[1])) for part in parts)


def _check_together(options: dict[str, Any]) -> None:
    from taccl.synth.collective import ROOTED

    collective = options["collective"]
    for name, only in (("demand", "alltoallv"), ("pairs", "sendrecv"), ("pre_post", "custom")):
        if options[name] is not None and collective != only:
            raise UsageError(f"--{name.replace('_', '-')} is for --collective {only}, not for {collective}")
    if options["root"] and collective is not None and collective not in ROOTED:
        raise UsageError(f"--root is for {', '.join(sorted(ROOTED))}; {collective} has none")
    if collective == "alltoallv" and options["demand"] is None:
        raise UsageError("--collective alltoallv needs --demand, the matrix of counts")


class _Interruption:
    """Turns the first Ctrl-C into a wish to stop, and leaves the second to Python."""

    def __init__(self) -> None:
        self._asked = False

    def asked(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._asked

    def __enter__(self) -> _Interruption:
        import signal

        def note(number: int, frame: object) -> None:
            if self._asked:
                raise KeyboardInterrupt
            self._asked = True
            click.echo("taccl: stopping with the best so far; Ctrl-C again gives up", err=True)

        self._before = signal.signal(signal.SIGINT, note)
        return self

    def __exit__(self, *details: object) -> None:
        import signal

        signal.signal(signal.SIGINT, self._before)


def _progress(progress: Progress) -> None:
    from taccl.synth.gap import gap, gap_text

    time = "-" if progress.time_us is None else f"{progress.time_us:.3f} us"
    left = ""
    if progress.time_us:
        left = f"  gap {gap_text(gap(progress.time_us, progress.lower_bound_us))}"
    bound = f"bound {progress.lower_bound_us:.3f} us"
    click.echo(f"{progress.elapsed_s:7.1f} s  {time:>14}  {bound}{left}  ({progress.stage})", err=True)


def _content(path: str) -> bytes:
    """What is in a file. Raises OSError, before anything is searched for."""
    from pathlib import Path

    return Path(path).read_bytes()


def _compare(ctx: click.Context, product: Product, path: str, before: bytes, as_json: bool) -> None:
    from taccl.produce import suffix_of

    same = product.text(suffix_of(path)).encode() == before
    if as_json:
        print_json({"schema": "taccl/up-to-date/v1", "path": path, "ok": same})
    elif same:
        click.echo(f"{path} is up to date")
    if not same:
        click.echo(
            f"taccl: {path} is stale: synthesis now gives another file; run again without the check", err=True
        )
        ctx.exit(1)


def _table(found: dict[str, Any]) -> str:
    from taccl.produce import ENDED
    from taccl.synth.collective import titled
    from taccl.synth.gap import gap_text

    proof = f"optimal ({found['proved_by']})" if found["status"] == "optimal" else "feasible"
    rows = [
        (
            "algorithm",
            f"{titled(found['collective'], found['groups'])} on {found['topology']}, {found['ranks']} ranks",
        ),
        ("size", f"{found['size_bytes']} bytes, {found['partition']} chunk(s) per block"),
        ("time", f"{found['time_us']:.3f} us"),
        ("lower bound", f"{found['lower_bound_us']:.3f} us for any algorithm ({found['bound_by']})"),
        ("gap", f"{gap_text(found['gap'])}, {proof}"),
        ("engine", found["engine"]),
        ("search", f"{found['solve_s']:.1f} s, ended: {ENDED[found['ended']]}"),
        ("program", f"{found['messages']} messages, {found['threadblocks']} threadblocks, verified"),
    ]
    if found["no_program"]:
        reason = found["no_program"].splitlines()[0]
        rows[-1] = ("schedule", f"{found['messages']} messages, checked; no program: {reason}")
    made = found["provenance"]
    if "quickest_us" in made:
        others = (
            f"{made['quickest_messages']} messages would take {made['quickest_us']:.3f} us by links alone"
        )
        why = f"a message costs {made['load_us']:g} us more where ranks share cores, and this one should lose less"
        rows.append(("shared cores", f"{others}; {why}"))
    coding = found["coding"]
    if coding is not None:
        times = f"{coding['uncoded_time_us'] / coding['time_us']:.2f} times as fast"
        what = f"{coding['codec']} ({coding['dtype']}) in {coding['coded_messages']} of {coding['messages']} messages"
        rows += [
            (
                "codec",
                f"{what} of a schedule by {coding['engine']}, {coding['partition']} chunk(s) per block",
            ),
            ("coded time", f"{coding['time_us']:.3f} us, {times}"),
            (
                "its bound",
                f"{coding['lower_bound_us']:.3f} us with this codec, gap {gap_text(coding['gap'])}",
            ),
        ]
    if found["not_coded"]:
        rows.append(("codec", f"none: {found['not_coded']}"))
    if found["path"] is not None:
        rows.append(("written", found["path"]))
        if coding is not None:
            rows[-1] = (
                "written",
                f"{found['path']}, as coded; lines above `codec` are of the best schedule without",
            )
    return "\n".join(f"{name:<12} {value}" for name, value in rows)
