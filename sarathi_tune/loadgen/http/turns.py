"""An event loop that takes a few sockets at a time, so that a request that is due leaves between two reads.

asyncio handles everything that is ready before it looks at its timers again. An engine's step brings an event to each
of its streams at one moment; with 300 of them these are 20 ms in which no request could leave. A read may wait, because
the kernel has noted when its bytes came (see `arrival`); a send may not.
"""

import asyncio
import math
import os
import select
import selectors
import sys
from collections.abc import Coroutine
from typing import Any

#: Sockets that are handled before the timers are looked at: about 0.2 ms.
AT_ONCE = 8

if sys.platform == "linux":

    class TurnSelector(selectors.EpollSelector):
        """Tells of at most `AT_ONCE` ready files; epoll tells of the others first when it is asked again."""

        def __init__(self) -> None:
            super().__init__()
            self._turns = select.epoll.fromfd(os.dup(self.fileno()))

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """As that of `selectors.EpollSelector`, a few at a time. `timeout` in seconds; None waits for ever."""
            # rounded up to whole milliseconds, which is what epoll counts in
            wait_s = -1.0 if timeout is None else math.ceil(max(0.0, timeout) * 1e3) * 1e-3
            keys = self.get_map()
            ready = []
            for descriptor, event in self._turns.poll(wait_s, AT_ONCE):
                key = keys.get(descriptor)
                if key is None:  # closed, and not yet gone from the epoll
                    continue
                mask = (selectors.EVENT_WRITE if event & ~select.EPOLLIN else 0) | (
                    selectors.EVENT_READ if event & ~select.EPOLLOUT else 0
                )
                ready.append((key, mask & key.events))
            return ready

        def close(self) -> None:
            """Close both descriptors of the epoll."""
            self._turns.close()
            super().close()


def run_in_turns(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run`, in a loop that takes a few sockets at a time where the system has epoll."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(main)


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "linux":
        return asyncio.SelectorEventLoop(TurnSelector())
    return asyncio.new_event_loop()
