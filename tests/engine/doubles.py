"""Test doubles for the engine: a clock that moves only when told, and an executor that checks the books.

`LedgerExecutor` keeps a pretended KV cache: one (position, token) per slot of every page. Before each slice it checks
that the pages named by the request still hold exactly the tokens that the scheduler says are computed, which is what a
real attention would silently get wrong. The sampled token is a function of the whole history, so that outputs are the
same for every schedule if and only if every schedule computed the same thing.
"""

import zlib
from collections.abc import Callable

from sarathi_tune.config.engine import EngineConfig, PreemptionMode, SchedulerName
from sarathi_tune.engine.loop import Engine, StepResult
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.engine.request import Request

VOCAB = 50_000


def next_token(history: list[int]) -> int:
    """The token that follows a history, for every executor of these tests."""
    return zlib.crc32(repr(history).encode()) % VOCAB


def expected_output(prompt: list[int], length: int) -> list[int]:
    """What a request must answer, computed without any engine."""
    history = list(prompt)
    for _ in range(length):
        history.append(next_token(history))
    return history[len(prompt) :]


class ManualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def sleep_until_s(self, when_s: float) -> None:
        self.time_s = max(self.time_s, when_s)


class LedgerExecutor:
    """Pretends to compute a plan; asserts that the plan is legal against its own KV ledger."""

    def __init__(self, page_tokens: int, clock: ManualClock, cost_s: Callable[[StepPlan], float] = lambda _: 1.0):
        self.page_tokens = page_tokens
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        self.host: dict[int, list[tuple[int, int] | None]] = {}
        self.reached: list[tuple[int, int]] = []
        self.clock = clock
        self.cost_s = cost_s
        self.plans: list[list[tuple[int, int, int, bool]]] = []

    def execute(self, plan: StepPlan) -> list[int]:
        self.plans.append([(p.request.request_id, p.start, p.count, p.is_decode) for p in plan])
        self.reached = [(p.stop, p.request.num_tokens) for p in plan]
        assert len({piece.request.request_id for piece in plan}) == len(plan), "a request stands twice in a plan"
        self._swap(plan)
        tokens = []
        for piece in plan:
            request = piece.request
            assert piece.start == request.num_computed
            assert len(request.pages) * self.page_tokens >= piece.stop, "the slice has no page to write to"
            history = request.token_ids(0, piece.stop)
            for position in range(piece.start, piece.stop):
                self.slots[self._slot(request, position)] = (position, history[position])
            for position in range(piece.stop):
                held = self.slots.get(self._slot(request, position))
                assert held == (position, history[position]), f"request {request.request_id} lost token {position}"
            assert piece.samples == (piece.stop == request.num_tokens)
            if piece.samples:
                tokens.append(next_token(history))
        self.clock.time_s += self.cost_s(plan)
        return tokens

    def _swap(self, plan: StepPlan) -> None:
        size = self.page_tokens
        for swap in plan.swaps:
            if swap.direction == "out":
                assert swap.request_id not in self.host, "swapped out twice"
                kept = [self.slots.get((page, offset)) for page in swap.pages for offset in range(size)]
                self.host[swap.request_id] = kept
            elif swap.direction == "in":
                kept = self.host.pop(swap.request_id)
                for index, held in enumerate(kept[: len(swap.pages) * size]):
                    slot = (swap.pages[index // size], index % size)
                    if held is not None:
                        self.slots[slot] = held
            else:
                del self.host[swap.request_id]

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self.page_tokens)
        return request.pages[page], offset


def make_engine(
    budget: int = 8,
    max_num_seqs: int = 4,
    num_pages: int = 64,
    page_tokens: int = 4,
    max_model_len: int = 10_000,
    scheduler: SchedulerName = "sarathi",
    prefix_cache: bool = False,
    preemption: PreemptionMode = "recompute",
) -> tuple[Engine, LedgerExecutor, ManualClock]:
    """An engine over the ledger, one second per step."""
    clock = ManualClock()
    executor = LedgerExecutor(page_tokens, clock)
    config = EngineConfig(
        token_budget=budget,
        max_num_seqs=max_num_seqs,
        num_pages=num_pages,
        page_tokens=page_tokens,
        max_model_len=max_model_len,
        scheduler=scheduler,
        prefix_cache=prefix_cache,
        preemption=preemption,
    )
    return Engine(config, executor, clock), executor, clock


def make_request(request_id: int, prompt_tokens: int, output_tokens: int = 3, shared_tokens: int = 0) -> Request:
    """A request whose prompt is unlike that of every other id, but for the first `shared_tokens` tokens."""
    shared = [(17 + position * 13) % VOCAB for position in range(min(shared_tokens, prompt_tokens))]
    prompt = shared + [(request_id * 7919 + position * 31) % VOCAB for position in range(len(shared), prompt_tokens)]
    return Request(request_id, prompt, output_tokens)


def run_until_idle(engine: Engine, limit: int = 10_000) -> list[StepResult]:
    """Step until nothing is left, checking the pages after every step."""
    results = []
    while engine.has_work:
        result = engine.step()
        assert result is not None
        engine.check_integrity()
        results.append(result)
        assert len(results) < limit, "the engine makes no progress"
    engine.check_idle()
    return results
