"""Small programs made by hand, so that the runtime's tests need no synthesis."""

from __future__ import annotations

from dataclasses import replace

from taccl.synth.collective import Chunk, Collective
from taccl.synth.program import Program, RankProgram, Step, Threadblock


def program(coll, ranks, per_loop, gpus, *, inplace=False, outofplace=True, root=0, protocol="Simple"):
    """gpus: per rank (input, output, scratch chunks, [(send, recv, channel, [step tuple])])."""
    made = []
    for rank, (i, o, s, tbs) in enumerate(gpus):
        blocks = tuple(
            Threadblock(
                number, send, recv, channel,
                tuple(Step(kind, *rest) for kind, *rest in steps),
            )
            for number, (send, recv, channel, steps) in enumerate(tbs)
        )  # fmt: skip
        made.append(RankProgram(rank, i, o, s, blocks))
    channels = 1 + max((tb.channel for gpu in made for tb in gpu.threadblocks), default=0)
    return Program(
        f"{coll}-{ranks}", coll, protocol, channels, per_loop, ranks, inplace, outofplace, 0, 2**40,
        tuple(made), "sum", root,
    )  # fmt: skip


def ring_allgather(n, k=1, *, inplace=False):
    """Each rank's k chunks travel round the ring in one message."""
    gpus = []
    for r in range(n):
        steps = []
        if not inplace:
            steps.append(("cpy", "i", 0, "o", r * k, k))
        steps.append(("s", "o", r * k, "o", r * k, k))
        for hop in range(1, n):
            c = (r - hop) % n * k
            steps.append(("rcs" if hop < n - 1 else "r", "o", c, "o", c, k))
        gpus.append((k, n * k, 0, [((r + 1) % n, (r - 1) % n, 0, steps)]))
    return program("allgather", n, n * k, gpus, inplace=inplace, outofplace=not inplace)


def direct_alltoall(n, k=1):
    """One threadblock for each peer."""
    gpus = []
    for r in range(n):
        tbs = [(-1, -1, 0, [("cpy", "i", r * k, "o", r * k, k)])]
        for p in range(n):
            if p != r:
                tbs.append((p, p, 0, [("s", "i", p * k, "o", r * k, k), ("r", "i", r * k, "o", p * k, k)]))
        gpus.append((n * k, n * k, 0, tbs))
    return program("alltoall", n, n * k, gpus)


def wrong_alltoall(n):
    """As direct_alltoall, but rank 0 sends the first peer its own block."""
    right = direct_alltoall(n)
    gpu = right.gpus[0]
    copy, tb, *rest = gpu.threadblocks
    bad = replace(tb, steps=(replace(tb.steps[0], src_offset=0), *tb.steps[1:]))
    gpus = (replace(gpu, threadblocks=(copy, bad, *rest)), *right.gpus[1:])
    return replace(right, name="bad", gpus=gpus)


def inplace_exchange(n):
    """Alltoall in place by pairwise exchange: works only because sends are buffered."""
    gpus = []
    for r in range(n):
        tbs = [(p, p, 0, [("s", "i", p, "i", r, 1), ("r", "i", r, "i", p, 1)]) for p in range(n) if p != r]
        gpus.append((n, 0, 0, tbs))
    return program("alltoall", n, n, gpus, inplace=True, outofplace=False)


def ring_allreduce(n, k=1, *, inplace=True):
    """Reduce-scatter round the ring with rrs, the sum at the last rank, then allgather."""
    buffer = "i" if inplace else "o"
    gpus = []
    for r in range(n):
        at = [(r - hop) % n * k for hop in range(2 * n)]
        steps = [("s", "i", at[0], "i", at[0], k)]
        for hop in range(1, n - 1):
            steps.append(("rrs", "i", at[hop], "i", at[hop], k))
        if n > 1:
            steps.append(("rrcs", "i", at[n - 1], buffer, at[n - 1], k))
            for hop in range(n, 2 * n - 2):
                steps.append(("rcs", buffer, at[hop], buffer, at[hop], k))
            steps.append(("r", buffer, at[2 * n - 2], buffer, at[2 * n - 2], k))
        gpus.append((n * k, 0 if inplace else n * k, 0, [((r + 1) % n, (r - 1) % n, 0, steps)]))
    return program("allreduce", n, n * k, gpus, inplace=inplace, outofplace=not inplace)


def pair_allreduce():
    """Of ranks 0 and 1 of three; rank 2 has no part in it."""
    pair = ring_allreduce(2)
    return replace(pair, name="allreduce-3", ranks=3, gpus=(*pair.gpus, RankProgram(2, 0, 0, 0, ())))


# Of three ranks, rank 2 has the sum of two in its first chunk, nothing in its second, that of three in its third.
SUMS_OF_SOME = Collective(
    "custom", 3,
    (Chunk(((0, 0), (1, 0)), ((2, 0),)), Chunk(((0, 1), (1, 1), (2, 0)), ((2, 2),))),
    True, (2, 2, 1), (0, 0, 3), (None,) * 3, 1, 1,
)  # fmt: skip


def sums_of_some():
    """A program for these, down a chain."""
    gpus = [
        (2, 0, 0, [(1, -1, 0, [("s", "i", 0, "i", 0, 1), ("s", "i", 1, "i", 1, 1)])]),
        (2, 0, 0, [(2, 0, 0, [("rrs", "i", 0, "i", 0, 1), ("rrs", "i", 1, "i", 1, 1)])]),
        (1, 3, 0, [(-1, 1, 0, [("r", "o", 0, "o", 0, 1), ("rrc", "i", 0, "o", 2, 1)])]),
    ]
    return program("custom", 3, 1, gpus)


def ring_reducescatter(n, k=1):
    """Out of place: partial sums travel, the last addition lands in the output."""
    gpus = []
    for r in range(n):
        at = [(r - 1 - hop) % n * k for hop in range(n)]
        steps = [("s", "i", at[0], "i", at[0], k)]
        steps += [("rrs", "i", at[hop], "i", at[hop], k) for hop in range(1, n - 1)]
        steps.append(("rrc", "i", at[n - 1], "o", 0, k))
        gpus.append((n * k, k, 0, [((r + 1) % n, (r - 1) % n, 0, steps)]))
    return program("reducescatter", n, n * k, gpus)


def chain_broadcast(n, k=1, root=0):
    """Down a chain that begins at the root."""
    gpus = []
    for r in range(n):
        place = (r - root) % n
        before, after = (r - 1) % n, (r + 1) % n
        if place == 0:
            tbs = [
                (after, -1, 0, [("s", "i", c, "o", c, 1) for c in range(k)]),
                (-1, -1, 0, [("cpy", "i", 0, "o", 0, k)]),
            ]
        elif place == n - 1:
            tbs = [(-1, before, 0, [("r", "o", c, "o", c, 1) for c in range(k)])]
        else:
            tbs = [(after, before, 0, [("rcs", "o", c, "o", c, 1) for c in range(k)])]
        gpus.append((k, k, 0, tbs))
    return program("broadcast", n, k, gpus, root=root)


def scratch_reduce(n, k=1, root=0):
    """Everything to scratch at the root, then `re` into the output; exercises dependencies and nop."""
    gpus = []
    for r in range(n):
        if r != root:
            gpus.append((k, k, 0, [(root, -1, 0, [("s", "i", 0, "s", 0, k)])]))
            continue
        others = [p for p in range(n) if p != r]
        tbs = [(-1, p, 0, [("r", "i", 0, "s", x * k, k)]) for x, p in enumerate(others)]
        steps = [("cpy", "i", 0, "o", 0, k)]
        for x in range(len(others)):
            steps.append(("nop", "i", 0, "i", 0, 0, (x, 0)))
            steps.append(("re", "s", x * k, "o", 0, k))
        tbs.append((-1, -1, 0, steps))
        gpus.append((k, k, (n - 1) * k, tbs))
    return program("reduce", n, k, gpus, root=root)


def direct_gather(n, k=1, root=0):
    gpus = []
    for r in range(n):
        if r != root:
            gpus.append((k, 0, 0, [(root, -1, 0, [("s", "i", 0, "o", r * k, k)])]))
            continue
        tbs = [(-1, p, 0, [("r", "i", 0, "o", p * k, k)]) for p in range(n) if p != root]
        tbs.append((-1, -1, 0, [("cpy", "i", 0, "o", r * k, k)]))
        gpus.append((k, n * k, 0, tbs))
    return program("gather", n, n * k, gpus, root=root)


def direct_scatter(n, k=1, root=0):
    gpus = []
    for r in range(n):
        if r != root:
            gpus.append((0, k, 0, [(-1, root, 0, [("r", "i", r * k, "o", 0, k)])]))
            continue
        tbs = [(p, -1, 0, [("s", "i", p * k, "o", 0, k)]) for p in range(n) if p != root]
        tbs.append((-1, -1, 0, [("cpy", "i", r * k, "o", 0, k)]))
        gpus.append((n * k, k, 0, tbs))
    return program("scatter", n, n * k, gpus, root=root)


def shift(n, k=1):
    """sendrecv: every rank to the next."""
    gpus = [
        (k, k, 0, [((r + 1) % n, (r - 1) % n, 0, [("s", "i", 0, "o", 0, k), ("r", "i", 0, "o", 0, k)])])
        for r in range(n)
    ]
    return program("sendrecv", n, k, gpus)


def handed_on(n, k=1):
    """sendrecv, where each chunk goes through the same places of scratch memory and from threadblock to threadblock."""
    gpus = []
    for r in range(n):
        first, second, send, receive, last = [], [], [], [], []
        for c in range(k):
            first.append(("cpy", "i", c, "s", 0, 1, (1, 2 * c - 1) if c else None))
            second.append(("nop", "i", 0, "i", 0, 0, (0, c)))
            second.append(("cpy", "s", 0, "s", 1, 1, (2, c - 1) if c else None))
            send.append(("s", "s", 1, "s", 2, 1, (1, 2 * c + 1)))
            receive.append(("r", "s", 1, "s", 2, 1, (4, c - 1) if c else None))
            last.append(("cpy", "s", 2, "o", c, 1, (3, c)))
        tbs = [
            (-1, -1, 0, first), (-1, -1, 0, second), ((r + 1) % n, -1, 0, send), (-1, (r - 1) % n, 0, receive),
            (-1, -1, 0, last),
        ]  # fmt: skip
        gpus.append((k, k, 3, tbs))
    return program("sendrecv", n, k, gpus)


def direct_alltoallv(demand):
    n = len(demand)
    gpus = []
    for r in range(n):
        out = [sum(demand[r][:p]) for p in range(n)]
        into = [sum(row[r] for row in demand[:p]) for p in range(n)]
        tbs = []
        if demand[r][r]:
            tbs.append((-1, -1, 0, [("cpy", "i", out[r], "o", into[r], demand[r][r])]))
        for p in range(n):
            if p != r and (demand[r][p] or demand[p][r]):
                steps = []
                if demand[r][p]:
                    steps.append(("s", "i", out[p], "o", 0, demand[r][p]))
                if demand[p][r]:
                    steps.append(("r", "i", 0, "o", into[p], demand[p][r]))
                tbs.append((p if demand[r][p] else -1, p if demand[p][r] else -1, 0, steps))
        gpus.append((sum(demand[r]), sum(row[r] for row in demand), 0, tbs))
    total = max(1, *(max(g[0], g[1]) for g in gpus))
    return program("alltoallv", n, total, gpus)


def crossed():
    """Two ranks, two messages from 0 to 1, one back: each rank receives into what a message of its own still
    holds, so the first message of 0 arrives only once rank 0 has seen that its second one did."""
    zero = [
        (1, -1, 0, [("cpy", "i", 1, "s", 0, 1), ("s", "i", 0, "o", 0, 1), ("s", "s", 0, "o", 1, 1)]),
        (-1, 1, 0, [("r", "o", 0, "s", 0, 1, (0, 2)), ("cpy", "s", 0, "o", 0, 1)]),
    ]
    one = [
        (0, -1, 0, [("cpy", "i", 0, "o", 0, 1), ("s", "o", 0, "s", 0, 1)]),
        (-1, 0, 0, [("r", "i", 0, "o", 0, 1, (0, 1)), ("r", "s", 0, "o", 1, 1)]),
    ]
    return program("custom", 2, 2, [(2, 1, 1, zero), (1, 2, 0, one)])


# The collective of `crossed`.
CROSSED = """\
schema: taccl/collective/v1
ranks: 2
chunks:
  - {sources: [[0, 0]], destinations: [[1, 0]]}
  - {sources: [[0, 1]], destinations: [[1, 1]]}
  - {sources: [[1, 0]], destinations: [[0, 0]]}
"""

ALL = {
    "allgather": ring_allgather,
    "alltoall": direct_alltoall,
    "allreduce": lambda n, k=1: ring_allreduce(n, k, inplace=False),
    "reducescatter": ring_reducescatter,
    "broadcast": chain_broadcast,
    "reduce": scratch_reduce,
    "gather": direct_gather,
    "scatter": direct_scatter,
    "sendrecv": shift,
}
