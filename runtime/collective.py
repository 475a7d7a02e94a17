"""A collective in one's own MPI program: one program, the caller's arrays, run again and again."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from taccl.errors import UsageError
from taccl.runtime import gpu
from taccl.runtime.bench import Loaded
from taccl.runtime.bench_settings import Settings
from taccl.runtime.bind import Bound, Buffers, buffer_elements, compile_program
from taccl.runtime.codecs import Codec, ErrorFeedback
from taccl.runtime.coded import PARTS, Coding
from taccl.runtime.device_memory import DeviceMemory
from taccl.runtime.device_transport import device_transport
from taccl.runtime.dtypes import DTYPES, DType
from taccl.runtime.host_transport import agreed_turns, host_kind, host_transport
from taccl.runtime.job import Job, Neighbours, fingerprint
from taccl.runtime.layout import Layout, layout_of

Array = np.ndarray[Any, Any]


class BoundCollective:
    """This rank's part of a collective on two arrays. Call it as often as wanted; a context manager, or close it.

    All ranks of the job make it, call it and close it together, and no two collectives at the same time. Messages go as
    `taccl run` sends them by default: through shared memory within nodes, in confirmed segments between them. Errors of
    all ranks alike are raised on rank 0, and the others leave with its exit code; what goes wrong later ends the job
    (`Job`).

    job: entered and not left. input, output: contiguous (n,) arrays of one of dtypes.DTYPES, of numpy, or of CuPy on
    the current device, as long as the collective wants them; in place the same array (allreduce), or views of one. op:
    one of dtypes.OPS, None for collectives that move data. codec: None for none; links: "nodes", "all", or "planned",
    which `loaded` then has. recode: whether a lossy codec may code partial sums again. feedback: for float32 sums and
    averages that a lossy codec codes. reach: how device memory travels, for arrays there, as `with_transport` of `taccl
    run` has found it; a run then comes after what is on the current stream, and has ended when the call returns. Raises
    UsageError for arrays and options that do not fit.
    """

    def __init__(
        self,
        job: Job,
        loaded: Loaded,
        input: Array,
        output: Array,
        op: str | None,
        codec: Codec | None = None,
        links: str = "nodes",
        feedback: ErrorFeedback | None = None,
        reach: tuple[Settings, Neighbours] | None = None,
        recode: bool = False,
    ) -> None:
        collective = loaded.collective
        shares = job.together("the check of the arrays", lambda: check_arrays(input, output, op, feedback))
        inplace = bool(job.gather_bytes(np.array([shares], np.uint8), "the check of the arrays").any())
        dtype, shape = job.together(
            "the check of the arrays", lambda: fit(loaded, job.rank, input, output, inplace)
        )
        blocks = job.gather_bytes(
            np.array([shape.block_elements], np.int64).view(np.uint8), "the check of the arrays"
        )
        if not collective.input_chunks[job.rank] + collective.output_chunks[job.rank]:
            # A rank that has no part in it has no arrays that could tell how long the others' are.
            shape = replace(shape, block_elements=int(blocks.view(np.int64).max()))
        plan = loaded.planned if links == "planned" else None
        facts = (
            collective, dtype.name, op, shape, inplace, None if codec is None else codec.name, links,
            None if plan is None else plan.facts(), feedback is not None, reach is not None,
            loaded.topology is None, loaded.turns, recode,
        )  # fmt: skip
        job.agree_on(fingerprint(loaded.program, facts), "program or arrays")
        self._job, self._closed, self._coded = job, False, (0, 0)
        self._bound: Bound | None = None
        self._nccl, self._coder = None, None
        if not shape.block_elements:  # on all ranks
            return
        neighbours = job.reach_nodes(job.share_memory()) if reach is None else reach[1]
        coding = None
        if codec is not None:
            nodes, near = (neighbours.nodes, neighbours.near) if links == "nodes" else (None, None)
            hops = None if plan is None else plan.hops
            # On devices each rank decodes for itself; what would be quicker there is not known.
            on_host = reach is None
            parts = PARTS if on_host and hops is None else 1
            coding = Coding(
                nodes, codec.lossless, recode=recode, hops=hops, near=near if on_host else None, parts=parts
            )
        compiled = job.together(
            "the compilation of the program",
            lambda: compile_program(
                loaded.program, collective, inplace, [job.rank], loaded.order,
                neighbours.nodes if reach is None else None, coding,
                None if neighbours.nccl is None else neighbours.apart,
                ahead=loaded.topology is not None and neighbours.tcp is not None,
                sorts=neighbours.tcp is not None,
            ),
        )  # fmt: skip
        self._nccl = neighbours.nccl
        if self._nccl is not None:
            self._nccl.connect(job, {(source, target) for source, target, _ in compiled.rounds})
        self._coder = None if codec is None or reach is not None else job.coder()
        chunk_bytes = shape.chunk_elements * dtype.bytes
        cuda = None
        if reach is None:
            known, taken = loaded.topology, None
            if known is not None and codec is None:
                taken = agreed_turns(job, compiled, chunk_bytes, neighbours, known, loaded.turns)
            self._transport, empty = host_transport(
                job, compiled, chunk_bytes, neighbours, host_kind(neighbours), taken=taken, topology=known
            )
        else:
            cuda = gpu.Cuda(gpu.load())
            self._transport, empty = device_transport(
                job, compiled, chunk_bytes, *reach, cuda, DeviceMemory(cuda)
            )
        self._bound = job.together(
            "the binding of the program",
            lambda: Bound(
                compiled, job.rank, shape, Buffers(input, output), dtype, op, self._transport, empty=empty,
                codec=codec, coder=self._coder, cuda=cuda, feedback=feedback,
            ),
        )  # fmt: skip
        job.connect(self._bound)

    def __call__(self) -> None:
        """Do it once: the result is in the output. Raises UsageError when it has been closed, or its job left."""
        if self._closed:
            raise UsageError("this collective has been closed; open it again to call it")
        if self._job.left:
            raise UsageError("the job of this collective has been left; call it inside `with Job(...)`")
        if self._bound is not None:
            self._job.run(self._bound)

    @property
    def coded_bytes(self) -> tuple[int, int]:
        """Of this rank's messages in the last run: bytes of the values that were coded, and of their frames."""
        return self._coded if self._bound is None else self._bound.executor.coded_bytes()

    def close(self) -> None:
        """Free what it needed, not the arrays; once."""
        if self._closed:
            return
        self._coded, self._closed = self.coded_bytes, True
        if self._bound is None:
            return
        with self._job.waiting("it waits for the other ranks to free a collective"):
            self._bound.close()
            self._transport.close()
            if (
                self._bound.on_device
            ):  # other processes may have memory of this one open until they too have closed
                self._job.control.Barrier()
                del self._transport
            self._bound = None
        if self._nccl is not None:
            self._nccl.close(self._job)
        if self._coder is not None:
            self._coder.close()

    def __enter__(self) -> BoundCollective:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # else the job ends
            self.close()


def check_kinds(*arrays: Any) -> None:
    """Raise UsageError for what is no array of numpy or CuPy; a masked one is not, since what is masked would be
    sent."""
    cupy = gpu.load()
    kinds = (np.ndarray,) if cupy is None else (np.ndarray, cupy.ndarray)
    for array in arrays:
        if not isinstance(array, kinds) or isinstance(array, np.ma.MaskedArray):
            raise UsageError(
                f"input and output must be arrays of numpy or CuPy; one is a {type(array).__name__}"
            )


def on_device(array: Any) -> bool:
    """Whether it is an array of CuPy. Raises UsageError for one on another device than the current one."""
    cupy = gpu.load()
    if isinstance(array, np.ndarray) or cupy is None or not isinstance(array, cupy.ndarray):
        return False
    current = int(cupy.cuda.runtime.getDevice())
    if array.device.id != current:
        raise UsageError(f"an array lies on device {array.device.id}; the current one is {current}")
    return True


def _share(one: Array, other: Array) -> bool:
    """Whether two contiguous arrays have memory in common."""
    first, second = gpu.address(one), gpu.address(other)
    return min(one.nbytes, other.nbytes) > 0 and first < second + other.nbytes and second < first + one.nbytes


def check_arrays(input: Array, output: Array, op: str | None, feedback: ErrorFeedback | None) -> bool:
    """Whether input and output share memory. Raises UsageError for arrays that no program takes."""
    there = on_device(input)
    if on_device(output) != there:
        raise UsageError("input and output must both be of numpy, or both of CuPy")
    for array, name in ((input, "input"), (output, "output")):
        if array.ndim != 1 or not array.flags.c_contiguous or array.dtype not in _TYPES:
            raise UsageError(
                f"the {name} must be a contiguous array of one dimension and one of {', '.join(DTYPES)}; it is "
                f"{array.dtype} of shape {array.shape}"
            )
    if input.dtype != output.dtype:
        raise UsageError(f"the input is {input.dtype} and the output {output.dtype}; they must be alike")
    if not there and not output.flags.writeable:
        raise UsageError("the output cannot be written")
    if feedback is not None:
        if op not in ("sum", "avg") or input.dtype != np.float32:
            raise UsageError("error feedback is for sums and averages of float32")
        if on_device(feedback.residual) != there:
            raise UsageError(
                "the feedback must lie where the arrays do: ErrorFeedback(elements, cupy) on a device"
            )
        if feedback.residual.shape != input.shape:
            raise UsageError(
                f"the feedback is for {feedback.residual.shape} values; the input has {input.shape}"
            )
    return _share(input, output)


def fit(loaded: Loaded, rank: int, input: Array, output: Array, inplace: bool) -> tuple[DType, Layout]:
    """Type and layout of the arrays. Raises UsageError when they do not fit the program."""
    collective, dtype = loaded.collective, _TYPES[input.dtype]
    mode = "in_place" if inplace else "out_of_place"
    if mode not in loaded.modes and len(input) + len(output):  # nothing cannot share memory
        raise UsageError(f"{loaded.program.name} does not claim to work {mode.replace('_', ' ')}")
    chunks = collective.input_chunks[rank], collective.output_chunks[rank]
    # Of scatter and gather one of the two is empty on most ranks.
    longer = int(chunks[1] > chunks[0])
    shape = layout_of(collective, chunks[longer], (len(input), len(output))[longer])
    wanted = buffer_elements(collective, shape, rank)
    if (len(input), len(output)) != wanted:
        raise UsageError(
            f"the input has {len(input)} elements and the output {len(output)}; with blocks of {shape.block_elements} "
            f"{collective.name} wants {wanted[0]} and {wanted[1]}"
        )
    pair = collective.inplace[rank] if inplace else None
    shares = _share(input, output)
    if pair is None:
        if shares:
            raise UsageError(
                f"input and output share memory; {collective.name} keeps them apart on this rank"
            )
        return dtype, shape
    first = [
        gpu.address(array) - shape.start(chunk) * dtype.bytes
        for array, chunk in zip((input, output), pair, strict=True)
    ]
    if min(wanted) and (not shares or first[0] != first[1]):
        by = shape.start(pair[0]) - shape.start(pair[1])
        others = "" if shares else "another rank's share memory, and this one's do not; "
        raise UsageError(
            f"in place the input begins {by} elements after the output; {others}give views of one array that do"
        )
    return dtype, shape


_TYPES = {dtype.numpy: dtype for dtype in DTYPES.values()}
