"""What every scheduling policy does: look at the queue, admit or preempt, and say what the next step computes."""

from abc import ABC, abstractmethod

from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.engine.queue import RequestQueue
from sarathi_tune.engine.request import Request


class Scheduler(ABC):
    """A policy over one queue. `plan` may admit and preempt, and takes the pages that the plan's slices need."""

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue
        self.config = queue.config

    @abstractmethod
    def plan(self) -> StepPlan:
        """The next step; empty only when nothing is waiting or running."""

    def decode_slice(self, request: Request) -> Slice:
        """The one token of a decode; takes a page when the last one is full."""
        self.queue.grow(request, request.num_tokens)
        return Slice(request, request.num_computed, 1, is_decode=True, samples=True)

    def chunk_slice(self, request: Request, limit_tokens: int) -> Slice:
        """The next chunk of a prompt, at most `limit_tokens` long; takes its pages."""
        count = min(request.num_uncomputed, limit_tokens)
        stop = request.num_computed + count
        self.queue.grow(request, stop)
        return Slice(request, request.num_computed, count, is_decode=False, samples=stop == request.num_tokens)

    def split_running(self) -> tuple[list[Request], list[Request]]:
        """Running requests as (decodes, prefills in progress), each in the order of admission."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.queue.running:
            (decodes if request.is_decoding else prefills).append(request)
        return decodes, prefills

    def admit_whole_prompts(self, limit_tokens: int) -> list[Slice]:
        """Admit waiting requests whose whole prompts fit into `limit_tokens` together; a single longer one is taken
        alone, since without chunking it has to be computed at some time."""
        slices: list[Slice] = []
        granted = 0
        queue = self.queue
        while queue.waiting and queue.can_admit(queue.waiting[0]):
            if slices and granted + queue.waiting[0].num_uncomputed > limit_tokens:
                break
            request = queue.admit()
            slices.append(self.chunk_slice(request, request.num_uncomputed))
            granted += slices[-1].count
        return slices

    def make_room_for_decodes(self) -> None:
        """Preempt decodes, the one admitted last first, until every other one has a page for its next token."""
        queue = self.queue
        for request in [request for request in queue.running if request.is_decoding]:
            while request.pages and not queue.can_grow(request):
                victim = next(other for other in reversed(queue.running) if other.is_decoding)
                queue.preempt(victim)
            if request.pages:
                queue.grow(request, request.num_tokens)
