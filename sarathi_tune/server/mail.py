"""The way from the engine's thread to the event loop."""

import asyncio
import threading
from typing import Protocol

from sarathi_tune.server.engine_thread import Failed, Message, Ready, Stepped

#: Longest that a step waits for the tokens of the one before to be written: an event loop that is busy with something
#: longer holds nobody up.
WRITING_LIMIT_S = 0.05


class Recipient(Protocol):
    """Who reads the messages, on the event loop."""

    def receive(self, message: Message) -> None:
        """Another message."""
        ...


class Mail:
    """From the engine's thread to the event loop. `ready` is the first message: the engine, or why there is none.

    Where the engine's threads use every core, the next step waits until the tokens of the last are written. Written
    meanwhile they would stop one thread of the step in its middle, again and again, while the others spin and wait for
    it: the writing is paid either way, and the stops on top.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self._loop = loop
        self._recipient: Recipient | None = None
        self._waits_for_writing = False
        self._written = threading.Event()

    def tell(self, message: Message) -> None:
        """Called in the engine's thread."""
        if self._loop.is_closed():
            return
        has_tokens = isinstance(message, Stepped) and bool(message.result.emissions)
        self._written.clear()
        self._loop.call_soon_threadsafe(self._deliver, message)
        if has_tokens and self._waits_for_writing:
            self._written.wait(WRITING_LIMIT_S)

    def forward_to(self, recipient: Recipient, *, waits_for_writing: bool) -> None:
        """Where messages go from now on, and whether a step's tokens are written before the next step begins."""
        self._recipient = recipient
        self._waits_for_writing = waits_for_writing

    def _deliver(self, message: Message) -> None:
        if self._recipient is not None:
            self._recipient.receive(message)
            self._loop.call_soon(self._written.set)  # behind the tasks that the message has woken, and that write
        elif isinstance(message, Ready):
            self.ready.set_result(message)
        elif isinstance(message, Failed):
            self.ready.set_exception(message.error)
