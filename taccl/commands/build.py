"""`taccl build`: synthesise all algorithms of a cluster, only what is stale."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from taccl.commands.completion import files
from taccl.commands.options import check_folder, print_json, write_output
from taccl.errors import EnvironmentProblem, TacclError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future, ProcessPoolExecutor

    from taccl.build_plan import Entry
    from taccl.cluster_file import Cluster, Wanted
    from taccl.produce import Order

Outcome = tuple[dict[str, str], float, int, str]  # text by suffix, time in us, exit code, message or warnings


@click.command("build")
@click.argument("file", shell_complete=files)
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 when something is stale.")
@click.option("-j", "--jobs", type=click.IntRange(1, 1024), help="Algorithms at a time. [cores / workers]")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON document.")
@click.pass_context
def command(ctx: click.Context, file: str, check: bool, jobs: int | None, as_json: bool) -> None:
    """Synthesise all algorithms of a cluster, only what is stale.

    FILE is a cluster file (YAML, `schema: taccl/cluster/v1`): a topology, collectives, sizes, sketches, a
    folder. A manifest beside the results remembers the hashes of inputs and files; nothing that is up to date
    is touched. What fails does not stop the rest.
    """
    from taccl.build_plan import left_over, read_manifest, why_stale
    from taccl.cluster_file import read_cluster

    cluster = read_cluster(file)
    check_folder(cluster.output, written=False)
    known = read_manifest(cluster.output)
    inputs = _inputs(cluster)
    reasons = {
        w.stem: why_stale(w, inputs[w.stem], known, cluster.output, cluster.suffixes) for w in cluster.wanted
    }
    stale = [w for w in cluster.wanted if reasons[w.stem]]
    surplus = left_over(cluster, known)
    failed: dict[str, tuple[int, str]] = {}
    if check:
        for wanted in stale:
            click.echo(f"taccl: stale: {wanted.stem}: {reasons[wanted.stem]}", err=True)
        for name in surplus:
            click.echo(f"taccl: stale: {name} is no longer asked for", err=True)
    else:
        if stale or surplus:
            check_folder(cluster.output)
        failed = _make(cluster, stale, inputs, known, jobs or _jobs(stale))
        for name in surplus:
            (cluster.output / name).unlink()
        _keep(cluster, {w.stem: known[w.stem] for w in cluster.wanted if w.stem in known})
    state = {
        w.stem: "up to date" if not reasons[w.stem] else "stale" if check else "made" for w in cluster.wanted
    }
    state |= dict.fromkeys(failed, "failed")
    if as_json:
        times = {stem: entry.get("time_us") for stem, entry in known.items()}
        rows: list[dict[str, Any]] = [
            {"name": stem, "state": what, "reason": reasons[stem], "time_us": times.get(stem)}
            for stem, what in state.items()
        ]
        ok = not failed and not (check and (stale or surplus))
        print_json({"schema": "taccl/build/v1", "ok": ok, "output": str(cluster.output), "algorithms": rows,
                    "removed": [] if check else surplus})  # fmt: skip
    else:
        counted = {
            what: list(state.values()).count(what) for what in ("made", "up to date", "stale", "failed")
        }
        click.echo(f"{cluster.output}: " + ", ".join(f"{n} {what}" for what, n in counted.items() if n))
    if failed:
        ctx.exit(next(iter(failed.values()))[0])
    if check and (stale or surplus):
        ctx.exit(1)


def _inputs(cluster: Cluster) -> dict[str, str]:
    """The hash of the inputs of every wanted algorithm."""
    from importlib.metadata import version

    from taccl import __version__
    from taccl.build_plan import inputs_hash
    from taccl.produce import restrictions_of
    from taccl.profiles.load import load_topology
    from taccl.profiles.yaml_reader import read_text
    from taccl.synth.collective_file import read_collective

    versions = {"taccl": __version__, "ortools": version("ortools")}
    texts: dict[tuple[str, str | None], dict[str, str]] = {}
    for wanted in cluster.wanted:
        key = (wanted.order.topology, wanted.order.sketch)
        if key not in texts:
            topology = load_topology(key[0])
            # The values that the files mean, so that a changed comment makes nothing stale.
            texts[key] = {"topology": repr(topology), "sketch": repr(restrictions_of(key[1], topology)[0])}
    hashes = {}
    for wanted in cluster.wanted:
        order = wanted.order
        of_files = dict(texts[order.topology, order.sketch])
        if ".json" in cluster.suffixes:  # which may have a plan for codecs, and leaves the search less time
            of_files["format"] = "json"
        if order.pre_post is not None:
            of_files["pre_post"] = repr(read_collective(read_text(order.pre_post), order.pre_post))
        hashes[wanted.stem] = inputs_hash(order, of_files, versions)
    return hashes


def _jobs(stale: list[Wanted]) -> int:
    import os

    each = max((wanted.order.workers for wanted in stale), default=1)
    return max(1, (os.cpu_count() or 1) // each)


def _make(
    cluster: Cluster, stale: list[Wanted], inputs: dict[str, str], known: dict[str, Entry], jobs: int
) -> dict[str, tuple[int, str]]:
    """Make what is stale, write each file when it is ready, note it in `known`. Returns what failed."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    from taccl.build_plan import digest

    failed: dict[str, tuple[int, str]] = {}
    if not stale:
        return failed
    pool = ProcessPoolExecutor(
        min(jobs, len(stale)), multiprocessing.get_context("spawn"), initializer=_die_on_ctrl_c
    )
    with contextlib.ExitStack() as unfinished:
        unfinished.callback(_abandon, pool)
        running: dict[Future[Outcome], Wanted] = {
            pool.submit(_one, wanted.order, cluster.suffixes): wanted for wanted in stale
        }
        for future in as_completed(running):
            wanted = running[future]
            texts, time_us, code, message = _result(future)
            if code:
                failed[wanted.stem] = (code, message)
                click.echo(f"taccl: {wanted.stem}: {message}", err=True)
                continue
            if message:
                click.echo(f"taccl: warning: {wanted.stem}: {message}", err=True)
            files = {}
            for suffix, text in texts.items():
                write_output(str(cluster.output / (wanted.stem + suffix)), text)
                files[wanted.stem + suffix] = digest(text.encode())
            known[wanted.stem] = {"inputs": inputs[wanted.stem], "files": files, "time_us": time_us}
            _keep(cluster, known)
            click.echo(f"{wanted.stem}: {time_us:.3f} us", err=True)
        unfinished.pop_all()
    pool.shutdown()
    return dict(sorted(failed.items()))


def _result(future: Future[Outcome]) -> Outcome:
    """What a worker made. Raises EnvironmentProblem when it was killed, which ends the whole pool."""
    from concurrent.futures.process import BrokenProcessPool

    try:
        return future.result()
    except BrokenProcessPool as error:
        raise EnvironmentProblem(
            "a process of the build was killed, perhaps for want of memory; what was finished is kept: build again, "
            "with fewer at a time (-j 1)"
        ) from error


def _abandon(pool: ProcessPoolExecutor) -> None:
    """What is finished is in the manifest; the rest would only keep the machine busy."""
    import multiprocessing

    pool.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():
        process.terminate()


def _keep(cluster: Cluster, entries: Mapping[str, Entry]) -> None:
    """Write the manifest, unless it is there already."""
    from taccl.build_plan import manifest_text
    from taccl.cluster_file import MANIFEST

    path = cluster.output / MANIFEST
    text = manifest_text(entries)
    if not path.is_file() or path.read_text("utf-8") != text:
        write_output(str(path), text)


def _die_on_ctrl_c() -> None:
    """A worker has nothing to say when the user stops the build; the parent says it."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _one(order: Order, suffixes: tuple[str, ...]) -> Outcome:
    """Runs in a worker process: one algorithm, or the exit code and message of its failure."""
    from taccl.produce import produce
    from taccl.synth.cost import us

    try:
        product = produce(order, suffixes=suffixes)
        texts = {suffix: product.text(suffix) for suffix in suffixes}
    except TacclError as error:
        return {}, 0.0, error.exit_code, str(error)
    return texts, us(product.algorithm.time_fs), 0, "; ".join(product.warnings)
