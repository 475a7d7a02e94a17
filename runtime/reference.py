"""MPI's own collective on the same buffers, to compare times with.

Groups of ranks call it at the same time, each on a communicator of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from taccl.runtime.bind import Buffers
from taccl.runtime.dtypes import UFUNCS, DType, divide
from taccl.runtime.layout import Layout
from taccl.synth.collective import COMBINING, Collective, build

COUNT_LIMIT = 2**31 - 1  # of one call before MPI 4


class Reference:
    """The library's call for a collective; `call` is None where MPI has none (custom, 32-bit counts).

    Collective over `comm` where there are groups. A rank in no group has a call that does nothing.
    """

    def __init__(
        self,
        MPI: Any,
        comm: Any,
        collective: Collective,
        layout: Layout,
        buffers: Buffers,
        dtype: DType,
        op: str | None,
        inplace: bool,
    ) -> None:
        self._own_op: Any = None
        self.call: Callable[[], Any] | None = None
        self._own_comm: Any = None
        longest = layout.elements * dtype.bytes  # of all ranks' buffers, so that all decide alike
        if collective.name == "custom" or (MPI.VERSION < 4 and longest > COUNT_LIMIT):
            return
        if collective.groups:
            rank = comm.Get_rank()
            number, group = next(
                ((i, group) for i, group in enumerate(collective.groups) if rank in group),
                (MPI.UNDEFINED, ()),
            )
            comm = self._own_comm = comm.Split(number, group.index(rank) if group else 0)
            if not group:
                self.call = lambda: None
                return
            collective = build(collective.name, len(group), root=collective.root)
            layout = replace(layout, block_elements=layout.elements // len(group), blocks=len(group))
        if collective.name in COMBINING:
            self.call = self._combining(MPI, comm, collective, buffers, dtype, op or "sum", inplace)
        else:
            self.call = _moving(MPI, comm, collective, layout, buffers, dtype, inplace)

    def close(self) -> None:
        """Free the reduction that was made for a type MPI does not know, and the group's communicator."""
        if self._own_op is not None:
            self._own_op.Free()
        if self._own_comm:  # not that of a rank in no group, which is none
            self._own_comm.Free()

    def _combining(
        self,
        MPI: Any,
        comm: Any,
        collective: Collective,
        buffers: Buffers,
        dtype: DType,
        op: str,
        inplace: bool,
    ) -> Callable[[], Any]:
        types = {
            "float32": MPI.FLOAT, "float64": MPI.DOUBLE, "int32": MPI.INT32_T, "int64": MPI.INT64_T,
            "uint8": MPI.UINT8_T,
        }  # fmt: skip
        if dtype.name in types:
            mpi_type = types[dtype.name]
            mpi_op = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}[op]
        else:  # 16-bit floats: MPI moves them as integers and calls back to reduce
            mpi_type = MPI.UINT16_T
            ufunc = getattr(np, UFUNCS[op])

            def combine(received: Any, result: Any, _: Any) -> None:
                total = np.frombuffer(result, np.uint8).view(dtype.numpy)
                ufunc(np.frombuffer(received, np.uint8).view(dtype.numpy), total, out=total)

            mpi_op = self._own_op = MPI.Op.Create(combine, commute=True)
        rank, ranks, root = comm.Get_rank(), collective.ranks, collective.root

        def spec(array: Any) -> list[Any]:
            return [array.view(np.uint8), len(array), mpi_type]

        name = collective.name
        source = MPI.IN_PLACE if inplace else spec(buffers.input)
        if name == "allreduce":
            target = spec(buffers.output)

            def call() -> None:
                comm.Allreduce(source, target, op=mpi_op)
        elif name == "reducescatter":
            # MPI's in-place form has its result at the start of the memory; for the time it is all one.
            target = spec(buffers.input if inplace else buffers.output)
            target[1] = len(buffers.output)
            if not inplace:
                source[1] = len(buffers.output)  # counts are of one block

            def call() -> None:
                comm.Reduce_scatter_block(source, target, op=mpi_op)
        else:
            result = spec(buffers.output) if rank == root else None
            given = source if rank == root else spec(buffers.input)

            def call() -> None:
                comm.Reduce(given, result, op=mpi_op, root=root)

        if op != "avg" or (name == "reduce" and rank != root):
            return call

        def average() -> None:
            call()
            divide(buffers.output, ranks)

        return average


def _moving(
    MPI: Any, comm: Any, collective: Collective, layout: Layout, buffers: Buffers, dtype: DType, inplace: bool
) -> Callable[[], Any] | None:
    rank, ranks, root, name = comm.Get_rank(), collective.ranks, collective.root, collective.name
    block = layout.block_elements * dtype.bytes

    def spec(array: Any) -> list[Any]:
        return [array.view(np.uint8), array.nbytes, MPI.BYTE]

    source, target = spec(buffers.input), spec(buffers.output)
    if name == "allgather":
        each = [target[0], block, MPI.BYTE]
        return lambda: comm.Allgather(MPI.IN_PLACE if inplace else source, each)
    if name == "alltoall":
        out, into = [source[0], block, MPI.BYTE], [target[0], block, MPI.BYTE]
        return lambda: comm.Alltoall(MPI.IN_PLACE if inplace else out, into)
    if name == "broadcast":
        if inplace:
            return lambda: comm.Bcast(target, root=root)

        def broadcast() -> None:
            if rank == root:
                np.copyto(buffers.output, buffers.input)
            comm.Bcast(target, root=root)

        return broadcast
    if name == "gather":
        each = [target[0], block, MPI.BYTE]
        given = MPI.IN_PLACE if inplace and rank == root else source
        return lambda: comm.Gather(given, each if rank == root else None, root=root)
    if name == "scatter":
        each = [source[0], block, MPI.BYTE]
        taken = MPI.IN_PLACE if inplace and rank == root else target
        return lambda: comm.Scatter(each if rank == root else None, taken, root=root)
    pairs = [(chunk.sources[0][0], d) for chunk in collective.chunks for d, _ in chunk.destinations]
    if name == "sendrecv":
        to = next((d for s, d in pairs if s == rank), MPI.PROC_NULL)
        of = next((s for s, d in pairs if d == rank), MPI.PROC_NULL)
        return lambda: comm.Sendrecv(source, dest=to, recvbuf=target, source=of)
    if name == "alltoallv" and not inplace:
        sent = [pairs.count((rank, d)) // collective.partition * block for d in range(ranks)]
        received = [pairs.count((s, rank)) // collective.partition * block for s in range(ranks)]
        sent_at = [sum(sent[:d]) for d in range(ranks)]
        received_at = [sum(received[:s]) for s in range(ranks)]
        return lambda: comm.Alltoallv(
            [source[0], sent, sent_at, MPI.BYTE], [target[0], received, received_at, MPI.BYTE]
        )
    return None
