"""When bytes arrived, by the kernel's clock: a client that is late to read them doesn't make them late.

Linux notes for each packet of a TCP connection when it came, and tells it with the bytes (SO_TIMESTAMPING, see
timestamping.rst in its documentation). A machine whose cores are busy elsewhere for some milliseconds delays the read,
and not that note. Where the kernel doesn't tell, the stamp is that of the read.
"""

import socket
import struct
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: As in the kernel's headers (asm-generic/socket.h, linux/net_tstamp.h); Python names none of them before 3.15.
_SO_TIMESTAMPING = 37
_WHEN_RECEIVED, _AS_SOFTWARE = 1 << 3, 1 << 4
#: Three times of seconds and nanoseconds, of which the first is the software's.
_TIMES = struct.Struct("@6l")
_ANCILLARY_BYTES = 64
#: Bytes that lay unread for longer are those of a clock that was set.
_OLDEST_S = 60.0


class ArrivalSocket(socket.socket):
    """A TCP socket that says when what it read last had arrived, in seconds of `time.perf_counter`."""

    __slots__ = ("_may_tell", "arrival_s", "is_told")

    def __init__(self, family: int) -> None:
        # asyncio sets TCP_NODELAY only where the protocol is named
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.setblocking(False)
        self.arrival_s = 0.0
        #: Whether the kernel told it.
        self.is_told = False
        self._may_tell = False
        if sys.platform == "linux":
            with suppress(OSError):  # an emulated kernel
                self.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, _WHEN_RECEIVED | _AS_SOFTWARE)
                self._may_tell = True

    def recv_into(self, buffer: "WriteableBuffer", nbytes: int = 0, flags: int = 0) -> int:
        """Read as `socket.recv_into` does, and note when the last of it had arrived."""
        if not self._may_tell:
            count = super().recv_into(buffer, nbytes, flags)
            self.arrival_s = time.perf_counter()
            return count
        view = memoryview(buffer)[:nbytes] if nbytes else buffer
        count, ancillary, _, _ = self.recvmsg_into([view], _ANCILLARY_BYTES, flags)
        now_s, clock_ns = time.perf_counter(), time.time_ns()
        age_s = _age_s(ancillary, clock_ns) if ancillary else None
        self.is_told = age_s is not None
        self.arrival_s = now_s if age_s is None else now_s - age_s
        return count


def _age_s(ancillary: list[tuple[int, int, bytes]], clock_ns: int) -> float | None:
    """How long ago the kernel had the bytes, from what came with them; None where it doesn't say."""
    for level, kind, data in ancillary:
        if (level, kind, len(data)) == (socket.SOL_SOCKET, _SO_TIMESTAMPING, _TIMES.size):
            seconds, nanoseconds, *_ = _TIMES.unpack(data)
            age_s = (clock_ns - (seconds * 1_000_000_000 + nanoseconds)) * 1e-9
            return age_s if seconds and 0.0 <= age_s <= _OLDEST_S else None
    return None
