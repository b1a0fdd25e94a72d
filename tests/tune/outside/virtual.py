"""A server whose budget is known: the built-in engine on a virtual clock, its tokens stamped as a client would."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.engine.loop import Engine
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.engine.request import Request
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.stepmodel.virtual import VirtualClock
from sarathi_tune.tune.outside.seen import Prompt, Scene, SteadyStream
from tests.profiles import Truth, cpu_like


@dataclass
class TruthExecutor:
    """Steps take what `truth` says, give or take `noise`; one in `spike_every` takes five times as long."""

    truth: Truth
    clock: VirtualClock
    noise: float
    spike_every: int | None
    rng: random.Random

    def execute(self, plan: StepPlan) -> list[int]:
        contexts = [piece.stop for piece in plan if piece.is_decode]
        chunks = [(piece.start, piece.count) for piece in plan if not piece.is_decode]
        tokens = sum(count for _, count in chunks)
        keys = sum(count * (prefix + count / 2) for prefix, count in chunks)
        # the chunk that costs as much: of so many tokens, behind a prefix that gives it the same keys
        prefix = round(keys / tokens - tokens / 2) if tokens else 0
        mean = round(sum(contexts) / len(contexts)) if contexts else 0
        step_ms = self.truth(Shape(len(contexts), mean, tokens, max(0, prefix)))
        step_ms *= max(0.5, self.rng.gauss(1.0, self.noise))
        if self.spike_every and self.rng.randrange(self.spike_every) == 0:
            step_ms *= 5.0
        self.clock.advance_s(step_ms / 1e3)
        return [7 for piece in plan if piece.samples]


@dataclass
class VirtualServer:
    """Plays one scene. `jitter_ms`: how late each stamp may be."""

    budget: int
    truth: Truth = cpu_like
    noise: float = 0.03
    jitter_ms: float = 0.4
    spike_every: int | None = None
    seed: int = 0
    max_model_len: int = 16_384
    rng: random.Random = field(init=False)
    stamps: dict[int, list[float]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.clock = VirtualClock()
        config = EngineConfig(self.budget, 64, 8192, max_model_len=self.max_model_len)
        executor = TruthExecutor(self.truth, self.clock, self.noise, self.spike_every, self.rng)
        self.engine = Engine(config, executor, self.clock)
        self.next_id = 0

    def play(
        self, decodes: int, injections: Sequence[tuple[int, ...]], *, context: int = 64, num_plain: int = 20
    ) -> Scene:
        streams = [self._add(context, self.max_model_len // 2) for _ in range(decodes)]
        while not all(len(self.stamps[stream]) > 3 for stream in streams):
            self._step()
        self._steps(num_plain)
        answered = []
        for lengths in injections:
            sent_s = self._step_and_think_back()
            prompts = [self._add(length, 1) for length in lengths]
            while not all(self.stamps[prompt] for prompt in prompts):
                self._step()
            answered.append(
                tuple(
                    Prompt(length, sent_s, self.stamps[prompt][0])
                    for length, prompt in zip(lengths, prompts, strict=True)
                )
            )
            self._steps(6)
        for stream in streams:
            self.engine.abort(stream)
        seen = tuple(SteadyStream(context, tuple(self.stamps[stream])) for stream in streams)
        return Scene("virtual", seen, tuple(answered))

    def _step_and_think_back(self) -> float:
        """A moment in the middle of a step: prompts that come then are met by the next one."""
        before_s = self.clock.now_s()
        self._step()
        return before_s + self.rng.random() * (self.clock.now_s() - before_s)

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        result = self.engine.step()
        assert result is not None
        for emission in result.emissions:
            late_s = self.rng.random() * self.jitter_ms / 1e3
            self.stamps[emission.request.request_id].append(result.end_s + late_s)

    def _add(self, prompt_tokens: int, output_tokens: int) -> int:
        request = Request(self.next_id, [self.next_id + 1] * prompt_tokens, output_tokens)
        self.engine.add(request)
        self.stamps[self.next_id] = []
        self.next_id += 1
        return request.request_id
