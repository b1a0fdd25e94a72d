"""Who waits, who runs, and who owns which pages. Schedulers decide over this; it keeps the books right.

Pages are taken chunk by chunk, but a prompt is admitted only when *all* the pages it still needs are there beside what
the admitted ones still need (vLLM #18115: checking the next chunk alone lets two long prompts preempt each other for
ever), and beside the pages that running decodes grow into while the prompt is computed. So a decode is never preempted
because a prefill arrived, and the pages of a prompt in progress are never taken away.
"""

from collections import deque
from collections.abc import Iterable

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.engine.pages import PagePool
from sarathi_tune.engine.plan import Swap
from sarathi_tune.engine.prefix import Chain, PrefixCache, TokenHash, chain_hash
from sarathi_tune.engine.request import Request, RequestState
from sarathi_tune.errors import RequestRefusedError


class RequestQueue:
    """Waiting requests in order of arrival, running ones in order of admission, and the page pool they share."""

    def __init__(self, config: EngineConfig, token_hash: TokenHash = chain_hash) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages, config.page_tokens)
        self.cache = PrefixCache(config.page_tokens, token_hash) if config.prefix_cache else None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._known: dict[int, Request] = {}
        self._chains: dict[int, Chain] = {}
        self._swaps: list[Swap] = []

    @property
    def num_available_pages(self) -> int:
        """Pages that can be had: free ones, and cached ones that nobody uses."""
        return self.pool.num_free + (self.cache.num_idle if self.cache else 0)

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
        chain = self._look_up(request)
        needed = self.pool.pages_for(request.num_tokens) - len(chain.pages)
        return needed + self._pages_promised(request) <= self.num_available_pages - self._idle_among(chain.pages)

    def admit(self) -> Request:
        """Move the first waiting request to the running ones, give it the cached pages of its prefix or its swapped
        pages, and return it."""
        request = self.waiting.popleft()
        if request.state is RequestState.SWAPPED:
            computed = request.num_computed
            self.grow(request, computed)
            self._swaps.append(Swap("in", request.request_id, tuple(request.pages)))
        elif self.cache is not None:
            chain = self._look_up(request)
            self._chains[request.request_id] = chain
            self._use(chain.pages)
            request.pages = list(chain.pages)
            request.num_computed = len(chain.pages) * self.config.page_tokens
            request.num_cached += request.num_computed
        request.state = RequestState.RUNNING
        self.running.append(request)
        return request

    def grow(self, request: Request, num_tokens: int) -> None:
        """Give the request the pages for its first `num_tokens` tokens. The caller knows that they can be had."""
        missing = self.pool.pages_for(num_tokens) - len(request.pages)
        if missing > 0:
            self._evict(missing - self.pool.num_free)
            request.pages += self.pool.allocate(missing, after=request.pages[-1] if request.pages else None)

    def can_grow(self, request: Request) -> bool:
        """Whether one more token of a decode has a page, without touching what prompts in progress still need."""
        missing = self.pool.pages_for(request.num_computed + 1) - len(request.pages)
        return missing <= 0 or missing <= self.num_available_pages - self._pages_owed_to_prompts()

    def preempt(self, request: Request) -> None:
        """Take a running request's pages away and put it first in the waiting line; it keeps its output.

        With `recompute` it comes back as a prompt of all its tokens, less what the prefix cache still holds; with
        `swap` its K and V go to host memory and come back as they were.
        """
        self.running.remove(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        if self.config.preemption == "swap":
            self._swaps.append(Swap("out", request.request_id, tuple(request.pages)))
            request.state = RequestState.SWAPPED
        else:
            request.num_computed = 0
            request.state = RequestState.WAITING
        self._release(request)
        self.waiting.appendleft(request)

    def finish(self, request: Request, state: RequestState = RequestState.FINISHED) -> None:
        """End a request, wherever it is, and free its pages."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        if request.state is RequestState.SWAPPED:
            self._swaps.append(Swap("drop", request.request_id, ()))
        self._release(request)
        request.state = state
        del self._known[request.request_id]

    def computed(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a running request are computed: remember it, and publish full pages."""
        request.num_computed = num_tokens
        if self.cache is not None:
            chain = self._chains.setdefault(request.request_id, Chain())
            if num_tokens // self.config.page_tokens > len(chain.pages):
                self.cache.publish(chain, request.token_ids(0, num_tokens), request.pages)

    def take_swaps(self) -> tuple[Swap, ...]:
        """The K and V transfers since the last call, in order; they belong before the next step's computation."""
        swaps, self._swaps = tuple(self._swaps), []
        return swaps

    def forget_cache(self) -> None:
        """Free every cached page that nobody uses: the next prompts find nothing."""
        if self.cache is not None:
            self._evict(self.cache.num_idle)

    def check_integrity(self) -> None:
        """Assert that every page is owned exactly as often as it is referenced, and the rest is free or cached."""
        owners = [request.pages for request in self._known.values()]
        self.pool.check_integrity([*owners, self.cache.idle_pages() if self.cache else []])

    def _look_up(self, request: Request) -> Chain:
        if self.cache is None or request.state is RequestState.SWAPPED:
            return Chain()
        return self.cache.match(request.token_ids(0, request.num_tokens))

    def _idle_among(self, pages: Iterable[int]) -> int:
        return sum(self.cache.is_idle(page) for page in pages) if self.cache else 0

    def _use(self, pages: Iterable[int]) -> None:
        """Own cached pages. An idle one keeps the reference that the cache had on it."""
        assert self.cache is not None
        for page in pages:
            if self.cache.is_idle(page):
                self.cache.use(page)
            else:
                self.pool.retain([page])

    def _release(self, request: Request) -> None:
        """Give the request's pages back, the last one first, so that a chain loses its end before its beginning."""
        for page in reversed(request.pages):
            if self.cache is not None and self.cache.holds(page) and self.pool.references(page) == 1:
                self.cache.rest(page)
            else:
                self.pool.release([page])
        request.pages = []
        self._chains.pop(request.request_id, None)

    def _evict(self, count: int) -> None:
        for _ in range(count):
            assert self.cache is not None, "more pages were taken than there are"
            self.pool.release([self.cache.evict()])

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
            final = max(request.num_tokens, min(request.max_tokens, request.num_tokens + steps))
            held = pages_for(request.num_tokens) if request is newcomer else len(request.pages)
            promised += pages_for(final) - held
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
