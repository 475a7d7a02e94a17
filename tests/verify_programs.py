"""Programs for the tests of verification and simulation, and ways to damage them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from taccl.synth.program import Program, RankProgram, Step, Threadblock


def make(coll, per_loop, gpus, *, inplace=False, outofplace=None, protocol="Simple", root=0, scratch=0):
    """gpus: per rank (i_chunks, o_chunks, [(send, recv, channel, [step])]); hasdep is set where it must be.

    A step is ("s", "i0", "o3") or ("s", "i0", "o3", count) or with a last (threadblock, step) to depend on.
    """
    made = []
    for rank, (i, o, tbs) in enumerate(gpus):
        waited = {step[4] for *_, steps in tbs for step in map(_full, steps) if step[4]}
        blocks = tuple(
            Threadblock(number, send, recv, channel, tuple(
                Step(kind, src[0], int(src[1:]), dst[0], int(dst[1:]), count, needs, (number, at) in waited)
                for at, (kind, src, dst, count, needs) in enumerate(map(_full, steps))
            ))
            for number, (send, recv, channel, steps) in enumerate(tbs)
        )  # fmt: skip
        made.append(RankProgram(rank, i, o, scratch, blocks))
    channels = 1 + max((tb.channel for gpu in made for tb in gpu.threadblocks), default=0)
    return labelled(Program(
        coll, coll, protocol, channels, per_loop, len(gpus), inplace,
        (not inplace) if outofplace is None else outofplace, 0, 2**30, tuple(made), "sum", root,
    ))  # fmt: skip


def labelled(program):
    """With the operands that name the other end of a message set to what they must name."""
    queues = {}
    for gpu in program.gpus:
        for tb, block in enumerate(gpu.threadblocks):
            for number, step in enumerate(block.steps):
                if step.kind in ("s", "rcs", "rrs", "rrcs"):
                    key = (gpu.rank, block.send, block.channel)
                    queues.setdefault(key, ([], []))[0].append((gpu.rank, tb, number, step))
                if step.kind in ("r", "rcs", "rrs", "rrc", "rrcs"):
                    key = (block.recv, gpu.rank, block.channel)
                    queues.setdefault(key, ([], []))[1].append((gpu.rank, tb, number, step))
    labels = {}
    for sends, receives in queues.values():
        for (*here, out), (*there, into) in zip(sends, receives, strict=False):
            if out.kind in ("s", "rrs") and into.kind != "rrs":
                labels.setdefault(tuple(here), {}).update(
                    dst_buffer=into.dst_buffer, dst_offset=into.dst_offset
                )
            if into.kind in ("r", "rcs"):
                at = "src" if out.kind == "s" else "dst"
                labels.setdefault(tuple(there), {}).update(
                    src_buffer=getattr(out, f"{at}_buffer"), src_offset=getattr(out, f"{at}_offset")
                )
    return replace(program, gpus=tuple(
        replace(gpu, threadblocks=tuple(
            replace(block, steps=tuple(
                replace(step, **labels.get((gpu.rank, tb, number), {}))
                for number, step in enumerate(block.steps)
            ))
            for tb, block in enumerate(gpu.threadblocks)
        ))
        for gpu in program.gpus
    ))  # fmt: skip


def along_trees(rng, n, combining, channels=2):
    """Allgather, or allreduce of n chunks, in place along random trees, one for each chunk.

    Every connection has a sending and a receiving threadblock; dependencies tie them together.
    """
    transfers = []  # (kind of the receive, chunk, source, destination)
    for chunk in range(n):
        order = [chunk, *rng.sample([r for r in range(n) if r != chunk], n - 1)]
        tree = [(order[rng.randrange(x)], order[x]) for x in range(1, n)]
        if combining:
            transfers.append([("rrc", chunk, v, u) for u, v in reversed(tree)])
            transfers[-1] += [("r", chunk, u, v) for u, v in tree]
        else:
            transfers.append([("r", chunk, u, v) for u, v in tree])
    merged = []
    while any(transfers):
        merged.append(rng.choice([queue for queue in transfers if queue]).pop(0))
    buffer = "i" if combining else "o"
    blocks = [{} for _ in range(n)]  # per rank: (send, recv, channel) -> (number, steps)
    written = {}
    for kind, chunk, u, v in merged:
        channel = rng.randrange(channels)
        place = f"{buffer}{chunk}"
        for rank, key, one in ((u, (v, -1, channel), "s"), (v, (-1, u, channel), kind)):
            number, steps = blocks[rank].setdefault(key, (len(blocks[rank]), []))
            needs = written.get((rank, chunk)) if one != "r" else None
            needs = None if needs is None or needs[0] == number else needs
            steps.append((one, place, place, *([needs] if needs else [])))
            if one != "s":
                written[rank, chunk] = (number, len(steps) - 1)
    gpus = [
        (n if combining else 0, 0 if combining else n, [(*key, steps) for key, (_, steps) in made.items()])
        for made in blocks
    ]
    return make("allreduce" if combining else "allgather", n, gpus, inplace=True)


def _full(step):
    kind, *rest = step
    src, dst = rest[:2] if kind != "nop" else ("i-1", "o-1")
    rest = rest[2:] if kind != "nop" else rest
    needs = rest[-1] if rest and isinstance(rest[-1], tuple) else None
    counts = [x for x in rest if isinstance(x, int)]
    return kind, src, dst, counts[0] if counts else int(kind != "nop"), needs


def relay_allgather(n, protocol="Simple"):
    """Out of place round a ring; the own chunk is copied in a threadblock of its own."""
    gpus = []
    for r in range(n):
        steps = [("s", f"o{r}", f"o{r}", (0, 0))]
        steps += [("rcs", f"o{c}", f"o{c}") for hop in range(1, n - 1) for c in [(r - hop) % n]]
        steps.append(("r", f"o{(r + 1) % n}", f"o{(r + 1) % n}"))
        tbs = [(-1, -1, 0, [("cpy", "i0", f"o{r}")]), ((r + 1) % n, (r - 1) % n, 0, steps)]
        gpus.append((1, n, tbs))
    return make("allgather", n, gpus, protocol=protocol)


def split_allgather(n):
    """In place round a ring with sending and receiving threadblocks apart, tied by dependencies."""
    gpus = []
    for r in range(n):
        sends = [("s", f"o{r}", f"o{r}")]
        receives = []
        for hop in range(1, n):
            c = (r - hop) % n
            receives.append(("r", f"o{c}", f"o{c}"))
            if hop < n - 1:
                sends.append(("s", f"o{c}", f"o{c}", (1, hop - 1)))
        gpus.append((0, n, [((r + 1) % n, -1, 0, sends), (-1, (r - 1) % n, 0, receives)]))
    return make("allgather", n, gpus, inplace=True)


def ring_allreduce(n, protocol="Simple"):
    """In place: rrs round the ring, rrcs, then rcs."""
    gpus = []
    for r in range(n):
        at = [(r - hop) % n for hop in range(2 * n)]
        steps = [("s", f"i{at[0]}", f"i{at[0]}")]
        steps += [("rrs", f"i{c}", f"i{c}") for c in at[1 : n - 1]]
        steps.append(("rrcs", f"i{at[n - 1]}", f"i{at[n - 1]}"))
        steps += [("rcs", f"i{c}", f"i{c}") for c in at[n : 2 * n - 2]]
        steps.append(("r", f"i{at[2 * n - 2]}", f"i{at[2 * n - 2]}"))
        gpus.append((n, 0, [((r + 1) % n, (r - 1) % n, 0, steps)]))
    return make("allreduce", n, gpus, inplace=True, protocol=protocol)


def allpairs_allreduce(n, protocol="LL"):
    """In place: everyone's piece to scratch, a chain of `re`, the sum to everyone; nops join dependencies."""
    gpus = []
    for r in range(n):
        peers = [p for p in range(n) if p != r]
        tbs = [(-1, -1, 0, [
            *[("nop", (1 + x, 1)) for x in range(len(peers) - 1)],
            ("re", "s0", f"i{r}", (len(peers), 1)),
            *[("re", f"s{x}", f"i{r}") for x in range(1, len(peers))],
        ])]  # fmt: skip
        last = len(tbs[0][3]) - 1
        for x, p in enumerate(peers):
            there = [q for q in range(n) if q != p].index(r)
            tbs.append((p, p, 0, [
                ("s", f"i{p}", f"s{there}"), ("r", f"i{r}", f"s{x}"),
                ("s", f"i{r}", f"i{r}", (0, last)), ("r", f"i{p}", f"i{p}"),
            ]))  # fmt: skip
        gpus.append((n, 0, tbs))
    return make("allreduce", n, gpus, inplace=True, protocol=protocol, scratch=n - 1)


def fan_in_reduce(n, root=0):
    """In place: every rank sends to the root, whose threadblocks add one after another."""
    gpus = []
    for r in range(n):
        if r != root:
            gpus.append((2, 0, [(root, -1, 0, [("s", "i0", "i0", 2)])]))
            continue
        tbs, before = [], None
        for x, p in enumerate(p for p in range(n) if p != root):
            tbs.append((-1, p, 0, [("rrc", "i0", "i0", 2, *([before] if before else []))]))
            before = (x, 0)
        gpus.append((2, 0, tbs))
    return make("reduce", 2, gpus, inplace=True, root=root)


def relayed_alltoall(n):
    """Out of place; all data of a pair go through one scratch chunk of the rank between, used twice."""
    assert n == 3
    gpus = []
    for r in range(n):
        a, b = (r + 1) % n, (r + 2) % n
        # Straight to the next rank; for the rank after it, two chunks by way of the next one's scratch.
        tbs = [
            (-1, -1, 0, [("cpy", f"i{2 * r}", f"o{2 * r}", 2)]),
            (a, -1, 0, [
                ("s", f"i{2 * a}", f"o{2 * r}", 2), ("s", f"i{2 * b}", "s0"), ("s", f"i{2 * b + 1}", "s0"),
            ]),
            (-1, b, 0, [
                ("r", "i0", f"o{2 * b}", 2), ("r", "i0", "s0"), ("r", "i0", "s0", (3, 0)),
            ]),
            (a, -1, 1, [("s", "s0", "o0", (2, 1)), ("s", "s0", "o0", (2, 2))]),
            (-1, b, 1, [("r", "s0", f"o{2 * a}"), ("r", "s0", f"o{2 * a + 1}")]),
        ]  # fmt: skip
        gpus.append((2 * n, 2 * n, tbs))
    return make("alltoall", 2 * n, gpus, scratch=1)


def reducescatter_tree(n=4):
    """Out of place: pairs reduce in scratch, then across; uses rrc with a source that is not its destination."""
    assert n == 4
    gpus = []
    for r in range(n):
        near, far = r ^ 1, r ^ 2
        mine, other = r, far
        gpus.append((n, 1, [
            (near, near, 0, [
                ("s", f"i{near}", "s0"), ("s", f"i{near ^ 2}", "s1"),
                ("rrc", f"i{mine}", "s0"), ("rrc", f"i{other}", "s1"),
            ]),
            (far, far, 0, [("s", "s1", "s0", (0, 3)), ("rrc", "s0", "o0", (0, 2))]),
        ]))  # fmt: skip
    return make("reducescatter", n, gpus, scratch=2)


GENERATED = {
    "relay_allgather": relay_allgather(3),
    "split_allgather": split_allgather(4),
    "ring_allreduce": ring_allreduce(3, "LL"),
    "allpairs_allreduce": allpairs_allreduce(3),
    "fan_in_reduce": fan_in_reduce(3),
    "relayed_alltoall": relayed_alltoall(3),
    "reducescatter_tree": reducescatter_tree(4),
}


# Damage.


def with_step(program, rank, tb, number, step):
    """The program with one step replaced."""
    return with_steps(program, rank, tb, lambda steps: [*steps[:number], step, *steps[number + 1 :]])


def with_steps(program, rank, tb, change):
    """The program with the steps of one threadblock (by its place) changed."""
    gpu = program.gpus[rank]
    block = gpu.threadblocks[tb]
    blocks = list(gpu.threadblocks)
    blocks[tb] = replace(block, steps=tuple(change(list(block.steps))))
    gpus = list(program.gpus)
    gpus[rank] = replace(gpu, threadblocks=tuple(blocks))
    return replace(program, gpus=tuple(gpus))


def with_threadblock(program, rank, tb, **changes):
    """The program with attributes of one threadblock changed."""
    gpu = program.gpus[rank]
    blocks = list(gpu.threadblocks)
    blocks[tb] = replace(blocks[tb], **changes)
    gpus = list(program.gpus)
    gpus[rank] = replace(gpu, threadblocks=tuple(blocks))
    return replace(program, gpus=tuple(gpus))


def _renumbered(program, rank, tb, number, by):
    """Dependencies on steps of a threadblock from `number` on, moved by `by` steps."""
    gpu = program.gpus[rank]
    id = gpu.threadblocks[tb].id

    def moved(step):
        if step.depends is None or step.depends[0] != id or step.depends[1] < number:
            return step
        at = step.depends[1] + by
        return replace(step, depends=(id, at) if at >= 0 else None)

    blocks = tuple(replace(b, steps=tuple(map(moved, b.steps))) for b in gpu.threadblocks)
    gpus = list(program.gpus)
    gpus[rank] = replace(gpu, threadblocks=blocks)
    return replace(program, gpus=tuple(gpus))


def drop_step(program, rank, tb, number):
    """Without a step; whoever waited for it waits for the step before it."""
    gpu = program.gpus[rank]
    id = gpu.threadblocks[tb].id
    before = (id, number - 1) if number else None
    blocks = []
    for block in gpu.threadblocks:
        blocks.append(replace(block, steps=tuple(
            replace(step, depends=before) if step.depends == (id, number) else step for step in block.steps
        )))  # fmt: skip
    gpus = list(program.gpus)
    gpus[rank] = replace(gpu, threadblocks=tuple(blocks))
    program = with_steps(
        replace(program, gpus=tuple(gpus)), rank, tb, lambda steps: [*steps[:number], *steps[number + 1 :]]
    )
    return flagged(_renumbered(program, rank, tb, number + 1, -1))


def double_step(program, rank, tb, number):
    """With a step run twice."""
    program = _renumbered(program, rank, tb, number + 1, 1)

    def twice(steps):
        again = replace(steps[number], depends=None, has_dependents=False)
        return [*steps[: number + 1], again, *steps[number + 1 :]]

    return with_steps(program, rank, tb, twice)


def flagged(program):
    """hasdep set on exactly the steps that others wait for."""
    gpus = []
    for gpu in program.gpus:
        waited = {step.depends for tb in gpu.threadblocks for step in tb.steps}
        gpus.append(replace(gpu, threadblocks=tuple(
            replace(tb, steps=tuple(
                replace(step, has_dependents=(tb.id, at) in waited) for at, step in enumerate(tb.steps)
            ))
            for tb in gpu.threadblocks
        )))  # fmt: skip
    return replace(program, gpus=tuple(gpus))


OTHER_KIND = {
    "s": "nop", "r": "rrc", "rcs": "rrcs", "rrs": "rcs", "rrc": "r", "rrcs": "rcs", "cpy": "re", "re": "cpy",
    "nop": "cpy",
}  # fmt: skip


def damages(program, rank, tb, number):
    """(name of the damage, damaged program) for one step; every kind that applies to it."""
    block = program.gpus[rank].threadblocks[tb]
    step = block.steps[number]
    yield "drop the step", drop_step(program, rank, tb, number)
    yield "run the step twice", double_step(program, rank, tb, number)
    yield "change its kind", with_step(program, rank, tb, number, replace(step, kind=OTHER_KIND[step.kind]))
    if step.kind != "nop":
        for field in ("src_offset", "dst_offset", "count"):
            for by in (-1, 1):
                changed = replace(step, **{field: getattr(step, field) + by})
                yield f"{field} {by:+d}", with_step(program, rank, tb, number, changed)
        for field in ("src_buffer", "dst_buffer"):
            for buffer in "ios":
                if buffer != getattr(step, field):
                    yield (
                        f"{field}={buffer}",
                        with_step(program, rank, tb, number, replace(step, **{field: buffer})),
                    )
    if step.depends is not None:
        lost = with_step(program, rank, tb, number, replace(step, depends=None))
        yield "lose the dependency", flagged(lost)
        depid, deps = step.depends
        if deps:
            earlier = with_step(program, rank, tb, number, replace(step, depends=(depid, deps - 1)))
            yield "depend on the step before", flagged(earlier)
    if step.has_dependents:
        unflagged = with_step(program, rank, tb, number, replace(step, has_dependents=False))
        yield "lose hasdep", unflagged
    if number + 1 < len(block.steps):
        later = block.steps[number + 1]

        def swapped(steps):
            return [*steps[:number], later, step, *steps[number + 2 :]]

        yield "swap with the next step", flagged(with_steps(program, rank, tb, swapped))
        mixed = with_step(program, rank, tb, number, replace(step, src_offset=later.src_offset))
        mixed = with_step(mixed, rank, tb, number + 1, replace(later, src_offset=step.src_offset))
        yield "swap source offsets with the next step", mixed
        mixed = with_step(program, rank, tb, number, replace(step, dst_offset=later.dst_offset))
        mixed = with_step(mixed, rank, tb, number + 1, replace(later, dst_offset=step.dst_offset))
        yield "swap destination offsets with the next step", mixed
    if number == 0:
        for end in ("send", "recv"):
            if getattr(block, end) >= 0:
                others = [p for p in range(program.ranks) if p not in (rank, getattr(block, end))]
                other = others[0] if others else rank
                yield f"{end} peer {other}", with_threadblock(program, rank, tb, **{end: other})
        channels = max(2, program.channels)
        moved = with_threadblock(program, rank, tb, channel=(block.channel + 1) % channels)
        yield "another channel", replace(moved, channels=channels)


def every_place(program):
    """(rank, place of the threadblock, number) of every step."""
    for gpu in program.gpus:
        for tb, block in enumerate(gpu.threadblocks):
            for number in range(len(block.steps)):
                yield gpu.rank, tb, number


def without_lines(program):
    """The program with every step's line forgotten."""
    return replace(program, gpus=tuple(
        replace(gpu, threadblocks=tuple(
            replace(tb, steps=tuple(dataclasses.replace(step, line=0) for step in tb.steps))
            for tb in gpu.threadblocks
        ))
        for gpu in program.gpus
    ))  # fmt: skip
