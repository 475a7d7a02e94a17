"""Print the table of docs/benchmarks.md: synthesis on the topologies and sizes that the project promises. `make bench`.

Arguments, all optional: topologies, e.g. `python docs/benchmarks.py ndv2:1 ring:8`. Every row is made by
`taccl.produce`, so it was lowered, verified and priced by the simulator. All of it takes about an hour.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from taccl.errors import TacclError
from taccl.produce import Order, produce
from taccl.product_document import document

TOPOLOGIES = (
    "ndv2:1", "ndv2:2", "dgx2:1", "dgx-a100:1", "dgx-a100:2", "ring:8", "torus2d:4x4", "mesh2d:3x3",
    "docs/topologies/ndv2-slow-link.yaml", "docs/topologies/ndv2-missing-link.yaml",
    "docs/topologies/unequal-nics.yaml",
)  # fmt: skip
COLLECTIVES = (
    "allgather", "alltoall", "reducescatter", "allreduce", "broadcast", "reduce", "gather", "scatter", "sendrecv",
)  # fmt: skip
SIZES = {"1 KB": 10**3, "1 MB": 10**6, "64 MB": 64 * 10**6}
TIME_LIMIT_S = 6.0

HEAD = """\
| topology | collective | size | time (us) | simulated (us) | bound (us) | gap | status | engine | total (s) |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def rows(topologies: list[str]) -> Iterator[str]:
    """One line of Markdown for each topology, collective and size, as it is found."""
    for topology in topologies:
        for collective in COLLECTIVES:
            for label, size in SIZES.items():
                began = time.monotonic()
                try:
                    product = produce(Order(topology, collective, size, time_limit_s=TIME_LIMIT_S))
                except TacclError as error:
                    reason = str(error).replace("\n", " ").replace("|", "/")
                    yield f"| {topology} | {collective} | {label} | {reason} | | | | | | |"
                    continue
                took = time.monotonic() - began
                d = document(product, None)
                yield (
                    f"| {topology} | {collective} | {label} | {d['time_us']:.3f} | {d['simulated_us']:.3f} "
                    f"| {d['lower_bound_us']:.3f} | {100 * d['gap']:.1f} % | {d['status']} | {d['engine']} "
                    f"| {took:.1f} |"
                )


if __name__ == "__main__":
    print(HEAD)
    for row in rows(sys.argv[1:] or list(TOPOLOGIES)):
        print(row, flush=True)
