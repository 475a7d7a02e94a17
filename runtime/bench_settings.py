"""What `taccl run` is to measure."""

from __future__ import annotations

from dataclasses import dataclass

from taccl.runtime.dtypes import DType

MODES = ("out_of_place", "in_place")
RAW = "raw"  # in place of a codec's name: messages are not coded


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure."""

    sizes_bytes: tuple[int, ...]  # nccl-tests sizes
    dtypes: tuple[DType, ...]
    ops: tuple[str, ...]  # used by combining collectives only
    modes: tuple[str, ...]  # of MODES, those that the program claims
    iterations: int
    warmup: int
    checks: int  # runs whose result is compared; 0: no check
    device: str  # "host" | "cuda"
    transport: str  # "shm" | "tcp" | "mpi" | "cuda-ipc" | "staged-shm" | "nccl" | "mpi-cuda" | "staged-mpi"
    buffers: str  # "private" | "shared": whether the collective's buffers lie in memory that other ranks read
    pace: bool  # between nodes, of messages in host memory
    turns: bool  # of paced ones, where a model of the cluster says whose they are
    accumulate: str  # "type" | "float32": in which 16-bit floats are reduced on their way
    reference: bool
    calibrate: bool = False  # note when the messages of the last run started and arrived
    deadline_s: float | None = None  # without progress; None: `patience_s` of the size
    codecs: tuple[str, ...] = (RAW,)  # RAW: messages are not coded
    codec_links: str = (
        "nodes"  # "nodes": messages between nodes are coded, "all", "planned": those of the file's plan
    )
    codec_at: str = "collective"  # "collective": once from source to destination, "hop": at every hop
    recode: bool = False  # partial sums may be coded at every hop
    others: str = (
        "mpi"  # beside "shm", "cuda-ipc" and "staged-shm": how messages reach the ranks that these do not
    )
