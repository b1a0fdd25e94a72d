"""The one thread that touches the engine and its device.

Commands come in through a queue and are carried out between steps; after each step one message goes out, whatever the
number of requests in it, so that the event loop is woken once per step. An exception ends the thread: which requests
it spoiled can't be known.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.engine.loop import Engine, StepResult
from sarathi_tune.engine.request import Request
from sarathi_tune.errors import OutOfMemoryError, RequestRefusedError
from sarathi_tune.measure.failures import out_of_memory_reason

#: The pool is checked once nothing has come for so long, so that the check delays no request that follows at once.
_IDLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Add:
    """Command: queue a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Command: end a request; one that is gone already is no error."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Command: end the thread."""


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and what computes its steps (`Runner.description`)."""

    engine: Engine
    description: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ready:
    """Message: the engine is built, with these limits, and its steps are computed by that."""

    config: EngineConfig
    description: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stepped:
    """Message: a step is done. Of the requests in its emissions only what never changes may be read."""

    result: StepResult
    num_free_pages: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Message: nothing is queued, and every page is back in the pool."""

    num_free_pages: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Message: the engine didn't take a request."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Message, the last one: the engine raised."""

    error: Exception


Command = Add | Abort | Stop
Message = Ready | Stepped | Idle | Refused | Failed


class EngineThread:
    """Builds an engine in a thread of its own and steps it while it has work. Its methods may be called from
    anywhere; `tell` is called in the thread."""

    def __init__(self, build: Callable[[], Built], tell: Callable[[Message], None]) -> None:
        self._build = build
        self._tell = tell
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start building; `Ready` or `Failed` is told."""
        self._thread.start()

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._commands.put(Add(request))

    def abort(self, request_id: int) -> None:
        """Take a request out."""
        self._commands.put(Abort(request_id))

    def stop(self, timeout_s: float) -> bool:
        """End the thread behind the step that runs; False when that step takes longer than `timeout_s`."""
        self._commands.put(Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            built = self._build()
            self._tell(Ready(built.engine.config, built.description))
            self._serve(built.engine)
        except Exception as error:
            self._tell(Failed(_typed(error)))

    def _serve(self, engine: Engine) -> None:
        while True:
            command = self._next(engine)
            while command is not None:
                if isinstance(command, Stop):
                    return
                self._obey(engine, command)
                command = self._waiting()
            result = engine.step()
            if result is not None:
                self._tell(Stepped(result, engine.num_free_pages))

    def _next(self, engine: Engine) -> Command | None:
        """A command that is there; without work, the next one that comes."""
        if engine.has_work:
            return self._waiting()
        try:
            return self._commands.get(timeout=_IDLE_S)
        except Empty:
            engine.check_idle()
            self._tell(Idle(engine.num_free_pages))
            return self._commands.get()

    def _waiting(self) -> Command | None:
        try:
            return self._commands.get_nowait()
        except Empty:
            return None

    def _obey(self, engine: Engine, command: Add | Abort) -> None:
        if isinstance(command, Abort):
            engine.abort(command.request_id)
            return
        try:
            engine.add(command.request)
        except RequestRefusedError as error:
            self._tell(Refused(command.request.request_id, str(error)))


def _typed(error: Exception) -> Exception:
    """An allocator's failure as the error that has an exit code."""
    reason = out_of_memory_reason(error)
    if reason is None or isinstance(error, OutOfMemoryError):
        return error
    return OutOfMemoryError(f"A step ran out of memory ({reason}): lower --max-num-batched-tokens or --kv-tokens.")
