"""CUDA graphs of decode steps: one launch replays a whole step's kernels, so that the host's time per kernel is gone.

A graph reads and writes fixed addresses. So each step's tensors are copied into persistent buffers, and a step of n
decodes replays the smallest captured size that holds it; the rows behind the n-th are decodes of one key on the dummy
page. Lengths are in the buffers too: a graph is right for other lengths than it was captured with, provided that the
attention back end reads them on the device (`graph_safe`). Steps with prefill tokens run outside of graphs. How many
steps did is counted, since they are the slower kind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from sarathi_tune.errors import OutOfMemoryError
from sarathi_tune.runtime.attention.base import Attention
from sarathi_tune.runtime.batch import RaggedBatch, Sequence
from sarathi_tune.runtime.kvcache import KVCache

#: Computes a step: `runtime.model.Model` is one. Returns logits [slices that sample, vocab].
Step = Callable[[RaggedBatch, KVCache], torch.Tensor]

#: Runs before a capture: kernels are compiled and libraries make their workspaces at the first, never while capturing.
WARM_UPS = 2


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """The numbers of decodes that are captured, ascending: 1, 2, 4, then every eighth, from 256 on every sixteenth.

    As vLLM's default `cudagraph_capture_sizes`, so that steps are padded as they will be in production; and `max_rows`
    itself.
    """
    assert max_rows >= 1, "a decode step has a row"
    listed = [1, 2, 4, *range(8, 256, 8), *range(256, max_rows + 1, 16)]
    return (*(size for size in listed if size < max_rows), max_rows)


def padded_size(num_rows: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest captured size that holds so many decodes, or None when there are too many."""
    return next((size for size in sizes if size >= num_rows), None)


def is_decode_step(batch: RaggedBatch) -> bool:
    """Whether every slice is one token and samples: the only kind of step that is captured."""
    return batch.max_count == 1 and len(batch.sample_rows) == batch.num_tokens


def graph_obstacle(attention: Attention, device: torch.device) -> str | None:
    """Why decode steps can't be captured, or None."""
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device and this is {device.type}"
    if not getattr(attention, "graph_safe", False):
        return "this attention back end takes lengths from the host, which a graph would freeze"
    return None


class StepBuffers:
    """The tensors of a decode step of up to `max_rows` requests of up to `max_key_length` keys, at fixed addresses."""

    def __init__(self, cache: KVCache, max_rows: int, max_key_length: int, device: torch.device) -> None:
        max_pages = -(-max_key_length // cache.page_tokens)
        self._dummy_page = cache.dummy_page
        self._dummy_slot = cache.dummy_slot
        self._max_key_length = max_key_length
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._slots = torch.full((max_rows,), self._dummy_slot, dtype=torch.int64, device=device)
        self._rows = torch.arange(max_rows, dtype=torch.int64, device=device)
        self._counts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._key_starts = self._counts.clone()
        self._page_table = torch.full((max_rows, max_pages), self._dummy_page, dtype=torch.int32, device=device)
        self._sequences = tuple(Sequence(row, 1, 0, ()) for row in range(max_rows))

    def holds(self, batch: RaggedBatch) -> bool:
        """Whether the batch's keys are few enough."""
        return batch.max_key_length <= self._max_key_length

    def fill(self, batch: RaggedBatch, size: int) -> None:
        """Copy a decode step in and pad it to `size` rows. Launches copies; waits for nothing."""
        rows, pages = batch.page_table.shape
        self._token_ids[:rows].copy_(batch.token_ids)
        self._positions[:rows].copy_(batch.positions)
        self._slots[:rows].copy_(batch.slots)
        self._key_starts[: rows + 1].copy_(batch.key_starts)
        self._page_table[:rows, :pages].copy_(batch.page_table)
        if rows < size:
            self._pad(batch, rows, size)

    def view(self, size: int) -> RaggedBatch:
        """The first `size` rows as the batch that is captured. Its `sequences` know rows only, no lengths or pages."""
        return RaggedBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_starts=self._counts[: size + 1],
            key_starts=self._key_starts[: size + 1],
            page_table=self._page_table[:size],
            sample_rows=self._rows[:size],
            sequences=self._sequences[:size],
            max_count=1,
            max_key_length=self._max_key_length,
        )

    def _pad(self, batch: RaggedBatch, rows: int, size: int) -> None:
        """Rows behind the step's own: token 0 at position 0 in the dummy page, which sees itself only."""
        self._token_ids[rows:size].zero_()
        self._positions[rows:size].zero_()
        self._slots[rows:size].fill_(self._dummy_slot)
        self._page_table[rows:size, 0].fill_(self._dummy_page)
        torch.add(batch.key_starts[rows], self._counts[1 : size - rows + 1], out=self._key_starts[rows + 1 : size + 1])


@dataclass(slots=True)
class GraphCoverage:
    """How many steps were replayed from a graph, and how many ran kernel by kernel: decode steps too large for any
    graph, and steps with prefill tokens."""

    replayed: int = 0
    eager_decode: int = 0
    eager_prefill: int = 0

    @property
    def num_steps(self) -> int:
        """All steps."""
        return self.replayed + self.eager_decode + self.eager_prefill

    def as_dict(self) -> Mapping[str, int]:
        """The counts as they stand in a JSON document."""
        return {"replayed": self.replayed, "eager_decode": self.eager_decode, "eager_prefill": self.eager_prefill}


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Launch it again."""
        ...


#: Captures what a function launches, without running it.
Capture = Callable[[Callable[[], object]], Graph]


class GraphedStep:
    """A model's step with its decode steps captured; called like the model itself."""

    def __init__(self, step: Step, buffers: StepBuffers) -> None:
        self.coverage = GraphCoverage()
        self._step = step
        self._buffers = buffers
        self._graphs: dict[int, Graph] = {}
        self._sizes: tuple[int, ...] = ()
        self._logits: torch.Tensor | None = None

    @classmethod
    def build(
        cls, step: Step, cache: KVCache, device: torch.device, *, max_rows: int, max_key_length: int
    ) -> "GraphedStep":
        """Capture the decode steps of up to `max_rows` requests of up to `max_key_length` keys on a CUDA device.

        Raises OutOfMemoryError when there is no room left for them.
        """
        graphed = cls(step, StepBuffers(cache, max_rows, max_key_length, device))
        try:
            graphed.capture(cache, graph_sizes(max_rows), _CudaCapture(device))
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"There is no memory left to capture decode steps of {max_rows} requests on {device}: use fewer KV "
                "pages or a smaller --max-num-seqs."
            ) from error
        return graphed

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured numbers of decodes, ascending."""
        return self._sizes

    def capture(self, cache: KVCache, sizes: tuple[int, ...], capture: Capture) -> None:
        """Capture one graph per size, the largest first: the others then fit into the memory it took.

        The logits are copied out inside the graph: holding each graph's own would keep `sum(sizes)` rows of them.
        """
        for size in sorted(sizes, reverse=True):
            view = self._buffers.view(size)
            for _ in range(WARM_UPS):
                logits = self._step(view, cache)
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            del logits
            self._graphs[size] = capture(lambda view=view: self._run(view, cache))  # type: ignore[misc]
        self._sizes = tuple(sorted(self._graphs))

    def __call__(self, batch: RaggedBatch, cache: KVCache) -> torch.Tensor:
        """Compute a step, from a graph if there is one for it. Logits of a replay are overwritten by the next one."""
        is_decode = is_decode_step(batch)
        size = padded_size(batch.num_tokens, self._sizes) if is_decode and self._buffers.holds(batch) else None
        if size is None:
            self.coverage.eager_decode += is_decode
            self.coverage.eager_prefill += not is_decode
            return self._step(batch, cache)
        self.coverage.replayed += 1
        self._buffers.fill(batch, size)
        self._graphs[size].replay()
        assert self._logits is not None
        return self._logits[: batch.num_tokens]

    def _run(self, view: RaggedBatch, cache: KVCache) -> None:
        assert self._logits is not None
        self._logits[: view.num_tokens].copy_(self._step(view, cache))


class _CudaCapture:
    """Captures on a CUDA device, all graphs into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], object]) -> Graph:
        """Capture what `work` launches."""
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        return graph
