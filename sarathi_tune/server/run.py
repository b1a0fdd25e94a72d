"""Start the server, run it until it is told to stop or its engine fails, and end everything that was started."""

import asyncio
import gc
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sarathi_tune.config.presets import resolve_model
from sarathi_tune.config.source import ModelSource
from sarathi_tune.errors import ExitCode, UsageError
from sarathi_tune.machine.cpu import describe_cpu
from sarathi_tune.server.engine_thread import Built, EngineThread, Ready
from sarathi_tune.server.mail import Mail
from sarathi_tune.server.record import StepRecord, save_record
from sarathi_tune.server.settings import API_KEY_VARIABLE, ServeConfig, engine_config
from sarathi_tune.server.text import Text, WordText, load_text

if TYPE_CHECKING:
    from uvicorn import Server

    from sarathi_tune.server.desk import Desk

#: How long /health goes on saying 503 once the engine has failed, so that whoever watches it sees it.
FAILED_LINGER_S = 1.0
#: How long the ends of answers may take to reach their clients when the server ends.
_FLUSH_S = 3
#: How long the end waits for a step that runs, and for a model that is being loaded.
_LAST_STEP_S, _LOADING_S = 30.0, 2.0
_KEEP_ALIVE_S = 75
_BACKLOG = 2048
#: A thread that needs the interpreter waits this long until the one that has it gives way. With Python's 5 ms the
#: engine's thread, which gives way in every operator, would stand still while tokens are written to clients.
_SWITCH_INTERVAL_S = 0.0005

Say = Callable[[str], None]


def serve(config: ServeConfig, say: Say) -> ExitCode:
    """Serve until SIGINT (130) or SIGTERM (0). `say` gets the lines for stderr.

    Raises UsageError for an address that is taken or a library that is missing, ModelError and OutOfMemoryError for
    the model, and whatever the engine raised.
    """
    _require_libraries()
    source = resolve_model(config.model)
    with bind(config.host, config.port) as listener:
        session = Session(config, source, load_text(source), listener, say)
        _raise_file_limit()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        return asyncio.run(_watched(session, lambda: build_engine(config, source)))


def build_engine(config: ServeConfig, source: ModelSource) -> Built:
    """The engine on its device. Called in the thread that will run it, whose OpenMP threads it starts."""
    import torch

    from sarathi_tune.engine.loop import Engine
    from sarathi_tune.loadgen.clock import SystemClock
    from sarathi_tune.runtime.runner import Runner, fitting_kv_pages, resolve_device

    device = config.device
    torch.set_num_threads(device.threads or describe_cpu().threads)
    kind = "cuda" if resolve_device(device.device).type == "cuda" else "cpu"
    fitting = fitting_kv_pages(source, device.page_tokens, device.device, device.dtype)
    engine = engine_config(config, source.config, fitting, kind)
    runner = Runner.build(
        source,
        num_pages=engine.num_pages,
        page_tokens=engine.page_tokens,
        device=device.device,
        dtype=device.dtype,
        attention=device.attention,
        seed=config.seed,
        max_num_seqs=engine.max_num_seqs,
    )
    return Built(Engine(engine, runner, SystemClock()), runner.description)


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the address and doesn't listen yet. Raises UsageError when it can't be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UsageError(f"--host {host} is no address of this machine ({error.strerror or error}).") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise UsageError(
            f"{host}:{port} can't be served ({reason}): stop what has it, or choose another --port (0: a free one)."
        ) from None
    return listener


class Signals:
    """SIGINT and SIGTERM on an event loop. `first` is the one that came first; `wait` returns once `count` came."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._num = 0
        self._events = (asyncio.Event(), asyncio.Event())

    @contextmanager
    def watched(self) -> Iterator["Signals"]:
        """Signals are counted instead of ending the process."""
        loop = asyncio.get_running_loop()
        watched = (signal.SIGINT, signal.SIGTERM)
        for number in watched:
            loop.add_signal_handler(number, self.came, number)
        try:
            yield self
        finally:
            for number in watched:
                loop.remove_signal_handler(number)

    def came(self, number: signal.Signals) -> None:
        """Count one."""
        self.first = self.first or number
        self._num += 1
        for event in self._events[: self._num]:
            event.set()

    async def wait(self, count: int = 1) -> None:
        """Return at the first or the second signal."""
        await self._events[count - 1].wait()

    @property
    def exit_code(self) -> ExitCode:
        """Ctrl-C is an interruption; SIGTERM is how a service is ended."""
        return ExitCode.INTERRUPTED if self.first is signal.SIGINT else ExitCode.MET


@dataclass(frozen=True, slots=True)
class Session:
    """What one run of the server is made of."""

    config: ServeConfig
    source: ModelSource
    text: Text
    listener: socket.socket
    say: Say

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model, the name it is listed under first."""
        config, source = self.config, self.source
        if config.served_name is not None:
            return (config.served_name,)
        names = (config.model, str(source.directory or ""), source.config.name, source.config.hub_id)
        return tuple(name for name in dict.fromkeys(names) if name)


async def _watched(session: Session, build: Callable[[], Built]) -> ExitCode:
    with Signals().watched() as signals:
        return await run_session(session, build, signals)


async def run_session(session: Session, build: Callable[[], Built], signals: Signals) -> ExitCode:
    """Serve what `build` makes until a signal comes. Raises what `build` or the engine raised."""
    mail = Mail(asyncio.get_running_loop())
    thread = EngineThread(build, mail.tell)
    patience_s = _LOADING_S
    thread.start()
    try:
        await _first_of(mail.ready, signals.wait())
        if not mail.ready.done():
            return signals.exit_code
        ready, patience_s = mail.ready.result(), _LAST_STEP_S
        gc.collect()
        gc.freeze()  # what is there now stays: no collection looks at it again
        return await _answer(session, thread, ready, mail, signals)
    finally:
        thread.stop(patience_s)


async def _answer(session: Session, thread: EngineThread, ready: Ready, mail: Mail, signals: Signals) -> ExitCode:
    """Answer requests until a signal comes or the engine fails."""
    from sarathi_tune.server.app import Service, make_app
    from sarathi_tune.server.desk import Desk
    from sarathi_tune.server.metrics import ServerMetrics

    config, text, names = session.config, session.text, session.names
    metrics = ServerMetrics(names[0], ready.config)
    record = None if config.record is None else StepRecord()
    desk = Desk(ready.config, thread, text, metrics, max_queue=config.max_queue, seed=config.seed, record=record)
    mail.forward_to(desk, waits_for_writing=_fills_every_core(ready))
    vocab_size = session.source.config.vocab_size
    app = make_app(Service(desk, text, metrics, names, vocab_size, int(time.time()), config.api_key))
    server = make_http_server(app, lambda: _greet(session, ready))
    http = asyncio.create_task(server.serve(sockets=[session.listener]))
    await _first_of(http, signals.wait(), desk.failed.wait())
    if desk.state != "failed":
        await _wind_down(config, desk, signals, session.say)
    if desk.state == "failed":
        await asyncio.sleep(FAILED_LINGER_S)
    server.should_exit = True
    await http
    try:
        if record is not None and config.record is not None:
            session.say(save_record(record, config.record, session.source, ready.description))
    finally:
        if desk.error is not None:
            raise desk.error
    return signals.exit_code


async def _wind_down(config: ServeConfig, desk: "Desk", signals: Signals, say: Say) -> None:
    """Let what runs come to its end, for a while."""
    desk.stop_taking()
    if desk.num_open:
        say(f"Stopping: {desk.num_open} requests may go on for {config.stop_timeout_s:g} s; once more stops them now.")
        await _first_of(desk.drain(config.stop_timeout_s), signals.wait(2), desk.failed.wait())
    if desk.num_open:
        say(f"{desk.num_open} requests were stopped.")
        desk.cancel_all()


def _fills_every_core(ready: Ready) -> bool:
    """Whether the engine's threads leave no core to the event loop and to clients on this machine."""
    steps = ready.description
    return steps["device"] == "cpu" and int(steps["threads"]) >= describe_cpu().threads


def make_http_server(app: object, on_start: Callable[[], None]) -> "Server":
    """uvicorn, with our own handling of signals. `on_start` is called once it listens."""
    import uvicorn

    class HttpServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_start()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return HttpServer(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FLUSH_S,
        )
    )


async def _first_of(*things: Awaitable[object]) -> None:
    """Return when the first of some awaitables is done; those that became tasks here are cancelled."""
    given = [thing for thing in things if isinstance(thing, asyncio.Future)]
    made = [asyncio.ensure_future(thing) for thing in things if not isinstance(thing, asyncio.Future)]
    await asyncio.wait([*given, *made], return_when=asyncio.FIRST_COMPLETED)
    for task in made:
        task.cancel()


def _greet(session: Session, ready: Ready) -> None:
    """The first lines: where the server is, and what it runs with."""
    config, say, engine, steps = session.config, session.say, ready.config, ready.description
    host, port = session.listener.getsockname()[:2]
    say(f"Serving {session.names[0]} on http://{f'[{host}]' if ':' in host else host}:{port}")
    say(
        f"{engine.token_budget:,} tokens per step, {engine.max_num_seqs:,} sequences, context {engine.max_model_len:,}"
        f", KV cache {engine.num_pages * engine.page_tokens:,} tokens, prefix cache "
        f"{'on' if engine.prefix_cache else 'off'}, scheduler {engine.scheduler}"
    )
    say(f"{steps['dtype']} on {steps['device']} with {steps['threads']} threads, attention {steps['attention']}")
    model_len = session.source.config.max_model_len
    if engine.max_model_len < model_len and config.max_model_len is None:
        say(f"The context is what the KV cache holds; the model has {model_len:,}. See --kv-tokens.")
    if isinstance(session.text, WordText):
        say("The model has no tokenizer: texts are words that stand for token ids (w17 is token 17).")
    if config.api_key is not None:
        say(f"Clients must send the key of {API_KEY_VARIABLE}.")


def _require_libraries() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"The server needs the package {error.name}: install it with pip install 'sarathi-tune[server]'."
        ) from None


def _raise_file_limit() -> None:
    """Every client is a file descriptor, and the usual limit is 1024."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
