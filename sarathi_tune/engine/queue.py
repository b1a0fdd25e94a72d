"""Who waits, who runs, and who owns which pages. Schedulers decide over this; it keeps the books right.

Pages are taken chunk by chunk, but a prompt is admitted only when *all* the pages it still needs are there beside what
the admitted ones still need (vLLM #18115: checking the next chunk alone lets two long prompts preempt each other for
ever), and beside the pages that running decodes grow into while the prompt is computed. So a decode is never preempted
because a prefill arrived, and the pages of a prompt in progress are never taken away.
"""

from collections import deque

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.engine.pages import PagePool
from sarathi_tune.engine.request import Request, RequestState
from sarathi_tune.errors import RequestRefusedError


class RequestQueue:
    """Waiting requests in order of arrival, running ones in order of admission, and the page pool they share."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages, config.page_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._known: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises RequestRefusedError when it could never run: an empty prompt, no output wanted, more tokens than the
        model's context, or more pages than the pool has.
        """
        self._refuse_impossible(request)
        assert request.request_id not in self._known, f"request id {request.request_id} is in use"
        self._known[request.request_id] = request
        self.waiting.append(request)

    def find(self, request_id: int) -> Request | None:
        """The unfinished request with this id, if there is one."""
        return self._known.get(request_id)

    def can_admit(self, request: Request) -> bool:
        """Whether a place and the pages for all of the request's tokens are there, running decodes' growth included."""
        if len(self.running) >= self.config.max_num_seqs:
            return False
        needed = self.pool.pages_for(request.num_tokens)
        return needed + self._pages_promised(request) <= self.pool.num_free

    def admit(self) -> Request:
        """Move the first waiting request to the running ones and return it."""
        request = self.waiting.popleft()
        request.state = RequestState.RUNNING
        self.running.append(request)
        return request

    def grow(self, request: Request, num_tokens: int) -> None:
        """Give the request the pages for its first `num_tokens` tokens. The caller knows that they are free."""
        missing = self.pool.pages_for(num_tokens) - len(request.pages)
        if missing > 0:
            request.pages += self.pool.allocate(missing, after=request.pages[-1] if request.pages else None)

    def can_grow(self, request: Request) -> bool:
        """Whether one more token of a decode has a page, without touching what prompts in progress still need."""
        missing = self.pool.pages_for(request.num_computed + 1) - len(request.pages)
        return missing <= 0 or missing <= self.pool.num_free - self._pages_owed_to_prompts()

    def preempt(self, request: Request) -> None:
        """Take a running request's pages away and put it first in the waiting line; it keeps its output and is
        recomputed from its first token when it comes back."""
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.num_preemptions += 1
        request.state = RequestState.WAITING
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def finish(self, request: Request, state: RequestState = RequestState.FINISHED) -> None:
        """End a request, wherever it is, and free its pages."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request)
        request.state = state
        del self._known[request.request_id]

    def check_integrity(self) -> None:
        """Assert that every page is owned exactly as often as it is referenced, and the rest is free."""
        self.pool.check_integrity(request.pages for request in self._known.values())

    def _release(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = []

    def _pages_owed_to_prompts(self) -> int:
        """Pages that admitted prompts will still take."""
        return sum(
            self.pool.pages_for(request.num_tokens) - len(request.pages)
            for request in self.running
            if not request.is_decoding
        )

    def _pages_promised(self, newcomer: Request) -> int:
        """Pages that must stay free beside the newcomer's prompt: what prompts in progress still take, and what every
        request grows by until the last of these prompts is done."""
        prefilling = [request for request in self.running if not request.is_decoding]
        uncomputed = newcomer.num_uncomputed + sum(request.num_uncomputed for request in prefilling)
        num_decodes = len(self.running) - len(prefilling)
        chunk = max(1, self.config.token_budget - num_decodes)
        steps = -(-uncomputed // chunk) + 1
        pages_for = self.pool.pages_for
        promised = 0
        for request in (*self.running, newcomer):
            final = min(request.max_tokens, request.num_tokens + steps)
            held = pages_for(request.num_tokens) if request is newcomer else len(request.pages)
            promised += max(0, pages_for(max(final, request.num_tokens)) - held)
        return promised

    def _refuse_impossible(self, request: Request) -> None:
        limit, pool_tokens = self.config.max_model_len, self.pool.num_pages * self.pool.page_tokens
        if not request.prompt:
            raise RequestRefusedError("The prompt is empty: send at least one token.")
        if request.max_output_tokens < 1:
            raise RequestRefusedError("The request asks for no output: ask for at least one token.")
        wanted = request.num_prompt_tokens + request.max_output_tokens
        if wanted > limit:
            raise RequestRefusedError(
                f"The request needs {wanted} tokens (prompt {request.num_prompt_tokens}, output "
                f"{request.max_output_tokens}) and the context is {limit}: shorten it or raise the context."
            )
        if self.pool.pages_for(request.max_tokens) > self.pool.num_pages:
            raise RequestRefusedError(
                f"The request needs {request.max_tokens} tokens of KV cache and the whole pool holds {pool_tokens}: "
                "shorten it or give the KV cache more memory."
            )
