"""Messages of the engine's thread, and how long it waits for their tokens to be written."""

import asyncio
import threading
import time

import pytest

from sarathi_tune.engine.loop import Emission, StepResult
from sarathi_tune.engine.plan import StepShape
from sarathi_tune.engine.request import Request
from sarathi_tune.server import mail as mail_module
from sarathi_tune.server.engine_thread import Idle, Message, Stepped
from sarathi_tune.server.mail import Mail

TOKEN = Emission(Request(1, (5,), 4, 0.0), 100, is_first=False, is_last=False)
WRITERS = 3


def stepped(*emissions: Emission) -> Stepped:
    return Stepped(StepResult(0, StepShape((6,)), 0.0, 0.1, emissions, 0, 1, 0), num_free_pages=3)


class Writers:
    """Tasks that sleep until a message comes, and then write. Reading it takes `reading_s`."""

    def __init__(self, reading_s: float) -> None:
        self.num_written = 0
        self._reading_s = reading_s
        self._came = [asyncio.get_running_loop().create_future() for _ in range(WRITERS)]
        self._tasks = [asyncio.create_task(self._write(future)) for future in self._came]

    def receive(self, _: Message) -> None:
        time.sleep(self._reading_s)
        for future in self._came:
            future.set_result(None)

    async def _write(self, came: asyncio.Future[None]) -> None:
        await came
        self.num_written += 1


def written_when_told(message: Message, *, waits: bool, reading_s: float = 0.02) -> int:
    """How many writers were done with `message` when the engine's thread went on."""

    async def told() -> int:
        mail = Mail(asyncio.get_running_loop())
        writers = Writers(reading_s)
        await asyncio.sleep(0)
        mail.forward_to(writers, waits_for_writing=waits)
        seen: list[int] = []

        def engine() -> None:
            mail.tell(message)
            seen.append(writers.num_written)

        thread = threading.Thread(target=engine)
        thread.start()
        while thread.is_alive() or writers.num_written < WRITERS:
            await asyncio.sleep(0.001)
        return seen[0]

    return asyncio.run(told())


def test_on_full_cores_a_step_begins_when_the_tokens_of_the_last_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_module, "WRITING_LIMIT_S", 20.0)
    assert written_when_told(stepped(TOKEN), waits=True) == WRITERS


@pytest.mark.parametrize(
    ("message", "waits"),
    [(stepped(TOKEN), False), (stepped(), True), (Idle(3), True)],
    ids=["a core is left", "a step without tokens", "no step"],
)
def test_else_nobody_waits(message: Message, *, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_module, "WRITING_LIMIT_S", 20.0)
    assert written_when_told(message, waits=waits) == 0


def test_a_busy_event_loop_holds_nobody_up() -> None:
    assert written_when_told(stepped(TOKEN), waits=True, reading_s=5 * mail_module.WRITING_LIMIT_S) == 0


def test_a_loop_that_has_ended_is_told_nothing() -> None:
    async def made() -> Mail:
        return Mail(asyncio.get_running_loop())

    asyncio.run(made()).tell(stepped(TOKEN))
