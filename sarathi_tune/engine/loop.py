"""The engine: plan a step, have it computed, and give the tokens out."""

from dataclasses import dataclass, replace

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.engine.executor import Clock, Executor
from sarathi_tune.engine.plan import StepPlan, StepShape
from sarathi_tune.engine.queue import RequestQueue
from sarathi_tune.engine.request import Request, RequestState
from sarathi_tune.engine.schedulers import SCHEDULERS


@dataclass(frozen=True, slots=True)
class Emission:
    """A token that a step gave to a request."""

    request: Request
    token_id: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step computed and emitted. Times in seconds on the engine's clock: `start_s` before scheduling,
    `end_s` when the device was done."""

    index: int
    shape: StepShape
    start_s: float
    end_s: float
    emissions: tuple[Emission, ...]
    num_waiting: int
    num_running: int
    num_preempted: int

    @property
    def duration_ms(self) -> float:
        """Milliseconds from before scheduling to the end of execution."""
        return (self.end_s - self.start_s) * 1e3


class Engine:
    """One scheduler, one page pool, one executor. Not thread-safe: one caller adds, aborts and steps."""

    def __init__(self, config: EngineConfig, executor: Executor, clock: Clock) -> None:
        self.config = config
        self._queue = RequestQueue(config)
        self._scheduler = SCHEDULERS[config.scheduler](self._queue)
        self._executor = executor
        self._clock = clock
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._queue.running or self._queue.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self._queue.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting line."""
        return len(self._queue.waiting)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the engine was made."""
        return self._queue.num_preemptions

    @property
    def num_free_pages(self) -> int:
        """Pages that no request owns; cached ones included."""
        return self._queue.num_available_pages

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestRefusedError when it can never be served."""
        self._queue.add(request)

    def abort(self, request_id: int) -> None:
        """End a request at once and free its pages; a request that is gone already is no error."""
        request = self._queue.find(request_id)
        if request is not None:
            self._queue.finish(request, RequestState.ABORTED)

    def step(self) -> StepResult | None:
        """Run one step; None when there is nothing to do. When the executor fails no request has advanced: the
        caller can abort requests and go on, or step again."""
        if not self.has_work:
            return None
        start_s = self._clock.now_s()
        preempted_before = self._queue.num_preemptions
        plan = replace(self._scheduler.plan(), swaps=self._queue.take_swaps())
        assert len(plan) > 0, "work is waiting and nothing was scheduled"
        tokens = self._executor.execute(plan)
        end_s = self._clock.now_s()
        result = StepResult(
            index=self._num_steps,
            shape=plan.shape,
            start_s=start_s,
            end_s=end_s,
            emissions=self._apply(plan, tokens),
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            num_preempted=self._queue.num_preemptions - preempted_before,
        )
        self._num_steps += 1
        return result

    def forget_cache(self) -> None:
        """Empty the prefix cache of every page that no request uses."""
        self._queue.forget_cache()

    def check_idle(self) -> None:
        """Assert that nothing is queued and every page is free."""
        assert not self.has_work, "the engine is not idle"
        self._queue.check_integrity()
        assert self._queue.num_available_pages == self.config.num_pages, "a page is lost"

    def check_integrity(self) -> None:
        """Assert that the page pool and the requests agree; costs time in proportion to the pool."""
        self._queue.check_integrity()

    def _apply(self, plan: StepPlan, tokens: list[int]) -> tuple[Emission, ...]:
        sampled = iter(tokens)
        emissions = []
        for piece in plan:
            self._queue.computed(piece.request, piece.stop)
            if piece.samples:
                emissions.append(self._emit(piece.request, next(sampled)))
        assert next(sampled, None) is None, "the executor returned more tokens than slices that sample"
        return tuple(emissions)

    def _emit(self, request: Request, token_id: int) -> Emission:
        request.output.append(token_id)
        is_last = len(request.output) >= request.max_output_tokens or token_id in request.stop_token_ids
        if is_last:
            self._queue.finish(request)
        return Emission(request, token_id, is_first=len(request.output) == 1, is_last=is_last)
