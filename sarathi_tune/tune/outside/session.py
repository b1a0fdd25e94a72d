"""The measuring itself: streams that decode on a live server, and prompts sent among them.

Nothing is worked out while streams run, because a busy client stamps late; between scenes the server is idle.
"""

import asyncio
import contextlib
import random
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from sarathi_tune.errors import TargetError
from sarathi_tune.loadgen.http.dialogue import Answer, Dialogue
from sarathi_tune.loadgen.record import is_stamped_on_arrival
from sarathi_tune.report.progress import Phase
from sarathi_tune.tune.outside.evidence import Exposition, own_gap_ms, read_exposition
from sarathi_tune.tune.outside.plan import Limits
from sarathi_tune.tune.outside.seen import Alone, Prompt, Scene, SteadyStream
from sarathi_tune.workload.spec import RequestSpec

#: Decode steps between the answer to a prompt and the next prompt.
PAUSE_STEPS = 4
#: Token ids of prompts stay below the first of these that the server takes; small models have small vocabularies.
_VOCABULARIES = (30_000, 2_000, 250)
_FIRST_ID = 16
#: Whoever looks more often takes the cores of a server on the same machine: at 5 ms a poll cost it 2 % of a short step.
_POLL_S, _LAG_EVERY_S = 0.02, 0.02
#: epoll counts in whole milliseconds and rounds a sleep up.
_TIMER_S = 0.001
#: A scene whose streams ended early is opened again this many times.
_MOST_OPENINGS = 3
#: How long the server may take to free what was given up; with other traffic it never is idle.
_IDLE_WITHIN_S = 2.0


@dataclass(slots=True, eq=False)
class Observer:
    """An open line to a server, and what was seen over it. `deadline_s` (of `time.perf_counter`): no prompt is sent
    after it. `most_decodes` is set when fewer streams ran than were asked for."""

    dialogue: Dialogue
    limits: Limits
    deadline_s: float
    phase: Phase
    #: Prompts are new in every run, whatever the seed: no cache may know them.
    salt: random.Random = field(default_factory=random.Random)
    vocabulary: int = _VOCABULARIES[0]
    alone: list[Alone] = field(default_factory=list)
    scenes: list[Scene] = field(default_factory=list)
    lags_ms: list[float] = field(default_factory=list)
    #: Reads of the streams, those of them that the kernel stamped, and events that lay unread with the one before them.
    reads: int = 0
    kernel_stamped_reads: int = 0
    coalesced: int = 0
    prompt_tokens: int = 0
    #: Tokens of the prompts that were sent in one moment, for each time that some were.
    prompts: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    most_decodes: int | None = None
    #: Tokens per event of the answer that was read to its end, as the server counted them; None: it didn't.
    tokens_per_event: float | None = None

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return time.perf_counter() > self.deadline_s

    @property
    def is_stamped_on_arrival(self) -> bool:
        """Whether the stamps of the streams say when events arrived, however late this client read them."""
        return is_stamped_on_arrival(self.reads, self.kernel_stamped_reads, self.coalesced / max(1, self.reads))

    async def metrics(self) -> Exposition | None:
        """The server's metrics, once nothing of ours runs any more."""
        until_s = time.perf_counter() + _IDLE_WITHIN_S
        while True:
            text = await self.dialogue.metrics()
            if text is None:
                return None
            reading = read_exposition(text)
            if not reading.value("vllm:num_requests_running") or time.perf_counter() > until_s:
                return reading
            await asyncio.sleep(0.1)

    async def _reading(self) -> Exposition:
        """The metrics as they are; empty where there are none."""
        text = await self.dialogue.metrics()
        return Exposition() if text is None else read_exposition(text)

    async def warm_up(self) -> None:
        """One prompt with an answer of some tokens, read to its end. Finds token ids that the server takes."""
        for vocabulary in _VOCABULARIES:
            self.vocabulary = vocabulary
            (answer,) = self.dialogue.send(self._spec(min(256, self.limits.longest_prompt // 2 or 1), 8))
            try:
                await answer.ended()
            except TargetError:
                if vocabulary == _VOCABULARIES[-1] or "(4" not in str(answer.refusal):
                    raise
                continue
            reading = answer.reading()
            if not reading.token_s:
                raise TargetError("The server answered a prompt without a token: look into its log.")
            if reading.output_tokens is not None:
                self.tokens_per_event = reading.output_tokens / len(reading.token_s)
            self.prompt_tokens += answer.spec.prompt_tokens
            self.prompts.append(answer.spec.prompt_tokens)
            return

    async def time_alone(self, tokens: int, *, keep: bool = True) -> float:
        """The time to the first token of a prompt on the idle server, in ms."""
        prompts = await self._inject((tokens,))
        assert prompts is not None, "an idle server has room"
        prompt = prompts[0]
        ttft_ms = (prompt.first_s - prompt.sent_s) * 1e3
        if keep:
            self.alone.append(Alone(tokens, ttft_ms))
        self.phase.advance()
        return ttft_ms

    async def play(
        self,
        name: str,
        decodes: int,
        context: int,
        *,
        tokens: int,
        num_plain: int,
        injections: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Open streams, let them decode `num_plain` steps, then send each injection and wait for its answer. Streams of
        up to `tokens` tokens that end before are opened again, one fewer where they left prompts no room."""
        left = list(injections)
        self.phase.describe(f"{name}: {decodes} x {context:,}")
        for opening in range(_MOST_OPENINGS):
            before = await self._reading()
            async with self._streams(decodes, context, tokens, has_prompts=bool(injections)) as streams:
                since_s = 0.0
                if not injections:  # with all of them begun, only decode steps are left; it costs one of them
                    before, since_s = await self._reading(), time.perf_counter()
                async with self._watching():
                    num_first = num_plain if opening == 0 else PAUSE_STEPS
                    answered, has_room = await self._run_scene(streams, num_first, left)
                scene = Scene(name, tuple(self._steady(stream) for stream in streams), tuple(answered))
            own_ms = own_gap_ms(before, await self._reading())
            self.scenes.append(replace(scene, own_gap_ms=own_ms, own_since_s=since_s))
            del left[: len(answered)]
            if not has_room:
                self.most_decodes = len(streams)
                decodes = len(streams) - 1
            if not left or self.is_late or decodes < 1:
                break
        self.phase.advance(len(left))

    async def _run_scene(
        self, streams: Sequence[Answer], num_plain: int, injections: Sequence[tuple[int, ...]]
    ) -> tuple[list[tuple[Prompt, ...]], bool]:
        """The prompts that were answered while all streams ran, and whether the server took them beside the streams."""
        answered: list[tuple[Prompt, ...]] = []
        await self._wait_steps(streams, num_plain)
        for lengths in injections:
            if self.is_late or any(stream.is_over for stream in streams):
                break
            self.phase.describe(f"{len(streams)} decodes + {' + '.join(f'{length:,}' for length in lengths)}")
            prompts = await self._inject(lengths, streams)
            if prompts is None:
                return answered, False
            answered.append(prompts)
            self.phase.advance()
            await self._wait_steps(streams, PAUSE_STEPS)
        return answered, True

    async def _inject(self, lengths: Sequence[int], beside: Sequence[Answer] = ()) -> tuple[Prompt, ...] | None:
        """The answers to prompts that are sent in the same moment; None when the streams go on and on without one."""
        answers = self.dialogue.send(*(self._spec(length, 1) for length in lengths))
        if beside and not await self._is_taken(answers, beside[0]):
            return None
        self.prompts.append(sum(lengths))
        prompts = []
        for answer in answers:
            await answer.ended()
            reading = answer.reading()
            if not reading.token_s:
                raise TargetError("The server answered a prompt without a token: look into its log.")
            tokens = reading.prompt_tokens or answer.spec.prompt_tokens
            self.prompt_tokens += tokens
            self.cached_tokens += reading.cached_tokens or 0
            prompts.append(Prompt(tokens, answer.sent_s, reading.token_s[0], reading.cached_tokens))
        return tuple(prompts)

    async def _is_taken(self, answers: Sequence[Answer], beside: Answer) -> bool:
        """Wait for the answers; False, and all are given up, when they wait for a stream to end."""
        before = beside.num_reads
        patience = _patience(sum(answer.spec.prompt_tokens for answer in answers))
        while not all(answer.is_over for answer in answers):
            if beside.is_over or beside.num_reads - before > patience:
                for answer in answers:
                    await answer.give_up()
                return False
            await asyncio.sleep(_POLL_S)
        return True

    @asynccontextmanager
    async def _streams(
        self, decodes: int, context: int, tokens: int, *, has_prompts: bool
    ) -> AsyncIterator[list[Answer]]:
        streams = list(self.dialogue.send(*(self._spec(context, tokens) for _ in range(decodes))))
        try:
            yield await self._running(streams, has_prompts=has_prompts)
        finally:
            for stream in streams:
                await stream.give_up()
            await self._settled()

    async def _running(self, streams: list[Answer], *, has_prompts: bool) -> list[Answer]:
        """Wait until all decode, or until it is clear that some wait for the others to end; those are given up, and one
        more, so that prompts have a place."""
        num_started, since = 0, 0
        while True:
            for stream in streams:
                if stream.is_over:
                    stream.check()
            started = [stream for stream in streams if stream.num_reads]
            progress = max((stream.num_reads for stream in started), default=0)
            if len(started) > num_started:
                num_started, since = len(started), progress
            has_waited = progress - since > _patience(streams[0].spec.prompt_tokens)
            if num_started == len(streams) or has_waited or any(stream.is_over for stream in started):
                break
            await asyncio.sleep(_POLL_S)
        kept = started
        if len(started) < len(streams):
            self.most_decodes = len(started)
            kept = started[: len(started) - 1] if has_prompts and len(started) > 1 else started
        for stream in streams:
            if stream not in kept:
                await stream.give_up()
        self.prompt_tokens += sum(stream.spec.prompt_tokens for stream in started)
        # any of them may have ended in a step of its own
        self.prompts += [sum(stream.spec.prompt_tokens for stream in started)] * len(started)
        return kept

    async def _wait_steps(self, streams: Sequence[Answer], steps: int) -> None:
        """Until every stream has got so many more events, or one has ended."""
        goals = [(stream, stream.num_reads + steps) for stream in streams]
        while any(stream.num_reads < goal for stream, goal in goals):
            if any(stream.is_over for stream in streams):
                return
            await asyncio.sleep(_POLL_S)

    async def _settled(self) -> None:
        """Until the server has freed what was given up; where it doesn't say, as long as that takes elsewhere."""
        if (await self._reading()).value("vllm:num_requests_running") is None:
            await asyncio.sleep(0.3)
            return
        await self.metrics()

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        """Note how late this client's loop wakes up meanwhile: stamps of its own are late by as much."""

        async def watch() -> None:
            while True:
                due_s = time.perf_counter() + _LAG_EVERY_S + _TIMER_S
                await asyncio.sleep(_LAG_EVERY_S)
                self.lags_ms.append(max(0.0, time.perf_counter() - due_s) * 1e3)

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _steady(self, answer: Answer) -> SteadyStream:
        answer.check()
        reading = answer.reading()
        self.reads += answer.num_reads
        self.kernel_stamped_reads += answer.num_kernel_stamped
        self.coalesced += reading.coalesced
        return SteadyStream(reading.prompt_tokens or answer.spec.prompt_tokens, reading.token_s, reading.event_tokens)

    def _spec(self, prompt_tokens: int, output_tokens: int) -> RequestSpec:
        ids = array("i", self.salt.choices(range(_FIRST_ID, self.vocabulary), k=prompt_tokens))
        return RequestSpec(0, ids, output_tokens)


def _patience(prompt_tokens: int) -> int:
    """Decode steps after which a prompt of this length was surely not taken: the smallest budgets take this many."""
    return 60 + prompt_tokens // 16
