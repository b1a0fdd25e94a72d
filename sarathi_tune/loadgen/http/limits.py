"""Open files: one connection each, and the usual limit of 1,024 is below what a load may need."""

import os
from contextlib import suppress
from pathlib import Path

from sarathi_tune.errors import UsageError

#: What the process needs beside its connections.
_RESERVE = 64


def ensure_descriptors(connections: int, *, is_certain: bool) -> None:
    """Raise this process's limit so that `connections` fit, or as far as the system allows it where they only may be
    open all at once, and have the kernel make room for them. Raises UsageError when they are certain to be and don't
    fit."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _RESERVE
    if soft != resource.RLIM_INFINITY and soft < needed:
        if is_certain and hard != resource.RLIM_INFINITY and hard < needed:
            raise UsageError(
                f"{connections} connections at once need {needed} open files, and the system allows {hard}: raise the "
                f"limit (ulimit -Hn {needed}) or send fewer requests at once."
            )
        needed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    _make_room(needed)


def _make_room(files: int) -> None:
    """Let the process's table of open files grow now. Linux doubles it when it is full, and stands still for 10 to 20
    ms then if the process has threads: within a run, every request that is due would leave late by that."""
    import fcntl

    with Path(os.devnull).open("rb") as null, suppress(OSError):
        os.close(fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, files - 1))
