"""How many files this process may have open: pieces of shared memory and connections are files, too."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def allow(files: int) -> None:
    """Raise the process's own limit as far as that is needed and allowed, with room for what the MPI library opens.
    Raises OSError where it is not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4 * files:
        most = 4 * files if hard == resource.RLIM_INFINITY else min(4 * files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < files:
        raise OSError(errno.EMFILE, f"it may not open {files} files at once (ulimit -n)")


def opened(make: Callable[[], T]) -> T:
    """What `make` opens; with a higher limit where that is reached and may be raised. Raises OSError."""
    try:
        return make()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == hard:
            raise OSError(errno.EMFILE, f"more than {soft} files would be open (ulimit -n)") from error
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if 0 < hard < 2 * soft else 2 * soft, hard))
    return opened(make)
