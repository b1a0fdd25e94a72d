"""The client's event loop: reads that are many at once delay nothing that is due."""

import asyncio
import selectors
import socket
import sys
import threading
import time

import pytest

from sarathi_tune.loadgen.http import turns
from sarathi_tune.loadgen.http.turns import AT_ONCE, run_in_turns

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no epoll")


def test_many_ready_sockets_are_read_a_few_at_a_time() -> None:
    pairs = [socket.socketpair() for _ in range(5 * AT_ONCE + 3)]
    order: list[int | str] = []

    def read(number: int) -> None:
        assert pairs[number][0].recv(16) == b"event"
        order.append(number)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number, (ours, theirs) in enumerate(pairs):
            ours.setblocking(False)
            theirs.send(b"event")
            loop.add_reader(ours, read, number)
        while len(order) - order.count("turn") < len(pairs):
            order.append("turn")
            await asyncio.sleep(0)

    run_in_turns(main())
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
    reads = [item for item in order if item != "turn"]
    assert sorted(reads, key=int) == list(range(len(pairs))), "each once"
    between = [len(part.split()) for part in " ".join(map(str, order)).split("turn")]
    assert max(between) == AT_ONCE


def test_a_socket_that_always_has_something_keeps_no_other_from_its_turn() -> None:
    busy = [socket.socketpair() for _ in range(3 * AT_ONCE)]
    quiet, other = socket.socketpair()
    told = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for ours, theirs in busy:
            theirs.send(b"x" * 1000)
            loop.add_reader(ours, ours.recv, 1)
        loop.add_reader(quiet, lambda: told.append(quiet.recv(1)))
        await asyncio.sleep(0)
        other.send(b"q")
        for _ in range(8):  # four turns are all sockets
            await asyncio.sleep(0)

    run_in_turns(main())
    for ours, theirs in [*busy, (quiet, other)]:
        ours.close()
        theirs.close()
    assert told == [b"q"]


def test_how_long_it_waits() -> None:
    ours, theirs = socket.socketpair()
    with turns.TurnSelector() as selector, ours, theirs:
        selector.register(ours, selectors.EVENT_READ, "data")
        for asked_s in (-1.0, 0.0, 0.0004, 0.02):
            before_s = time.perf_counter()
            assert selector.select(asked_s) == []
            assert time.perf_counter() - before_s >= asked_s, "what is shorter than a millisecond is not nothing"
        threading.Timer(0.05, theirs.send, (b"x",)).start()
        ((key, events),) = selector.select(None)
        assert (key.fileobj, key.data, events) == (ours, "data", selectors.EVENT_READ)


def test_what_is_ready_for_both_is_told_as_asked() -> None:
    ours, theirs = socket.socketpair()
    with turns.TurnSelector() as selector, ours, theirs:
        theirs.send(b"x")
        selector.register(ours, selectors.EVENT_READ | selectors.EVENT_WRITE)
        assert [events for _, events in selector.select(0)] == [selectors.EVENT_READ | selectors.EVENT_WRITE]
        selector.modify(ours, selectors.EVENT_WRITE)
        assert [events for _, events in selector.select(0)] == [selectors.EVENT_WRITE]
        selector.unregister(ours)
        assert selector.select(0) == []
