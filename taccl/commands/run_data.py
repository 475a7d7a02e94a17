"""The values of `taccl run --data` and `taccl profile --data`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taccl.errors import Diagnostic, InvalidInput, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from taccl.runtime.dtypes import DType

LIMIT_BYTES = 64 << 20  # of one type; ranks start at different places and repeat them


@dataclass(frozen=True, slots=True)
class Data:
    """Values by type, and what all ranks must have alike."""

    values: Mapping[str, Any]
    digest: str


def read_data(path: str | None, dtypes: Sequence[DType]) -> Data | None:
    """The values for each type that is run; floats are rounded to it where the file has none of it.

    Raises UsageError when the file has nothing for a type, InvalidInput for one that cannot be read.
    """
    import hashlib

    import numpy as np

    from taccl.runtime.codecs.samples import read_samples

    if path is None:
        return None
    try:
        samples, others = read_samples(path, dtypes[0], LIMIT_BYTES)
    except OSError as error:
        raise InvalidInput([Diagnostic(path, 0, 0, "R100", error.strerror or str(error))]) from error
    known = {sample.dtype.name: sample.values for sample in samples}
    floats = next((sample.values for sample in samples if not sample.dtype.integer), None)
    values: dict[str, Any] = {}
    digest = hashlib.sha256()
    for dtype in dtypes:
        found = known.get(dtype.name, None if dtype.integer else floats)
        if found is None:
            raise UsageError(
                f"--data {path}: nothing in it can be run as {dtype.name}; it holds "
                f"{', '.join([*known, *others]) or 'no values'}"
            )
        with np.errstate(all="ignore"):
            values[dtype.name] = np.ascontiguousarray(found.astype(dtype.numpy))
        digest.update(values[dtype.name].view(np.uint8).data)
    return Data(values, digest.hexdigest())
