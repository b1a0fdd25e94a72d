"""One rank's part of every step: the same on rank 0 and on its followers."""

import time
from dataclasses import dataclass, replace

import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.source import ModelSource
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.errors import RankError, UsageError
from sarathi_tune.runtime.batch import build_batch, pad_rows
from sarathi_tune.runtime.kvcache import KVCache
from sarathi_tune.runtime.parallel.mesh import Mesh
from sarathi_tune.runtime.parallel.pipeline import split_plan
from sarathi_tune.runtime.parallel.place import Place
from sarathi_tune.runtime.parallel.wire import PlanDigest, Words
from sarathi_tune.runtime.runner import LoadedModel, RunnerOptions, load_model, resolve_device
from sarathi_tune.runtime.sampling import sample_tokens
from sarathi_tune.runtime.swap import SwapSpace

_FILL_SLOTS = 2048
#: Numbers of an answer before the tokens.
ANSWER_NUMBERS = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """What rank 0 hears from one rank about a step: how long it computed, in how many micro-batches; and the tokens, of
    which those of the rank that samples count."""

    busy_ms: float
    num_micro_batches: int
    tokens: list[int]


class Worker:
    """The part of a model that this rank computes."""

    def __init__(self, mesh: Mesh, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._mesh = mesh
        self._swap_space = SwapSpace(loaded.cache)
        self._digest = PlanDigest()
        self._num_steps = 0

    @classmethod
    def build(cls, mesh: Mesh, place: Place, source: ModelSource, options: RunnerOptions) -> "Worker":
        """Load this rank's part onto its own device. Raises what `load_model` raises."""
        device = _own_device(options.device, place)
        shared = 1.0 if device.startswith("cuda") else 1.0 / place.num_local
        loaded = load_model(
            source,
            replace(options, device=device),
            mesh.shard,
            mesh if mesh.shares_layers else None,
            shared,
        )
        _fill(loaded.cache, options.seed)
        return cls(mesh, loaded)

    @property
    def config(self) -> ModelConfig:
        """The whole model's."""
        return self.loaded.config

    def digest(self, words: Words) -> int:
        """The digest of all steps so far, with this one; once per step."""
        self._num_steps += 1
        return self._digest.add(words)

    def check(self, digest: int, digest_of_rank_0: int) -> None:
        """Raise RankError when this rank is about to compute something else than rank 0."""
        if digest != digest_of_rank_0:
            raise RankError(
                f"The ranks have different plans for step {self._num_steps - 1}, so their results would be wrong: that "
                "is a defect, or a machine that corrupts data."
            )

    def step(self, plan: StepPlan, digest: int, *, wants_logits: bool) -> tuple[list[Answer], torch.Tensor | None]:
        """Compute this rank's part of a step. On rank 0: all ranks' answers, and the logits when they are wanted."""
        with torch.inference_mode():
            logits, busy_ms, num_micro_batches = self._compute(plan)
            tokens = self._sample(plan, logits, wants_logits=wants_logits)
            self._synchronise()
        answers = self._mesh.answer([digest, round(busy_ms * 1e6), num_micro_batches, *tokens])
        for numbers in answers:
            self.check(numbers[0], digest)
        found = [Answer(numbers[1] / 1e6, numbers[2], numbers[3:]) for numbers in answers]
        return found, self._hand_over(plan, logits) if wants_logits else None

    @property
    def sampling_rank(self) -> int:
        """The rank that has the logits: the first one of the last stage."""
        layout = self._mesh.shard.layout
        return (layout.pipeline - 1) * layout.tensor

    def _compute(self, plan: StepPlan) -> tuple[torch.Tensor, float, int]:
        """Logits (where this rank has them), milliseconds of computing, and micro-batches."""
        shard, model, cache, device = self._mesh.shard, self.loaded.model, self.loaded.cache, self.loaded.device
        for swap in plan.swaps:
            self._swap_space.apply(swap)
        parts = split_plan(plan, shard.layout.pipeline)
        stopwatch = _Stopwatch(device)
        logits = []
        for part in parts:
            batch = build_batch(part, cache, device)
            batch = pad_rows(batch, model.linear.padded_rows(batch.num_tokens), cache)
            hidden = model.embed(batch) if shard.is_first_stage else self._mesh.receive(self._hidden(batch.num_tokens))
            stopwatch.start()
            hidden = model.compute(hidden, batch, cache)
            part_logits = model.finish(hidden) if shard.is_last_stage else None
            stopwatch.stop()
            if part_logits is None:
                self._mesh.hand_on(hidden)
            elif shard.rank == self.sampling_rank:
                logits.append(part_logits)
        self._mesh.finish_sending()
        return torch.cat(logits) if logits else torch.empty(0), stopwatch.busy_ms(), len(parts)

    def _hidden(self, num_tokens: int) -> torch.Tensor:
        cache = self.loaded.cache.layers[0].keys
        return torch.empty(num_tokens, self.config.hidden_size, dtype=cache.dtype, device=cache.device)

    def _sample(self, plan: StepPlan, logits: torch.Tensor, *, wants_logits: bool) -> list[int]:
        """One token per slice that samples; zeros where this rank doesn't have the logits, or nobody asked."""
        sampling = [piece for piece in plan if piece.samples]
        if wants_logits or not sampling or self._mesh.shard.rank != self.sampling_rank:
            return [0] * len(sampling)
        return sample_tokens(logits, sampling)

    def _hand_over(self, plan: StepPlan, logits: torch.Tensor) -> torch.Tensor | None:
        """The logits, on rank 0."""
        num_rows = sum(piece.samples for piece in plan)
        rank = self._mesh.shard.rank
        if rank == self.sampling_rank and rank != 0:
            self._mesh.send_logits(logits)
        if rank != 0:
            return None
        if self.sampling_rank == 0:
            return logits.float().cpu()
        return self._mesh.receive_logits(num_rows, self.config.vocab_size, self.sampling_rank)

    def _synchronise(self) -> None:
        if self.loaded.device.type == "cuda":
            torch.cuda.synchronize(self.loaded.device)


class _Stopwatch:
    """How long a device computed, without the time in which it waited for another stage."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._busy_s = 0.0
        self._started_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """A micro-batch begins."""
        if self._is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._events.append((start, end))
            self._events[-1][0].record()
        self._started_s = time.perf_counter()

    def stop(self) -> None:
        """It ends, or on a GPU will."""
        self._busy_s += time.perf_counter() - self._started_s
        if self._is_cuda:
            self._events[-1][1].record()

    def busy_ms(self) -> float:
        """The sum; waits for the GPU."""
        if not self._is_cuda:
            return self._busy_s * 1e3
        torch.cuda.synchronize()
        return sum(float(start.elapsed_time(end)) for start, end in self._events)


def _own_device(name: str, place: Place) -> str:
    """The device of this rank: on GPUs the one of its number on its machine."""
    device = resolve_device(name)
    if device.type == "cpu":
        return "cpu"
    if torch.cuda.device_count() < place.num_local:
        raise UsageError(
            f"{place.num_local} ranks on this machine need as many GPUs, and there are {torch.cuda.device_count()}: "
            "use fewer ranks, or --device cpu."
        )
    torch.cuda.set_device(place.local_rank)
    return f"cuda:{place.local_rank}"


@torch.inference_mode()
def _fill(cache: KVCache, seed: int) -> None:
    """Normally distributed keys and values in every slot, so that a step over pages that were never written reads real
    memory and numbers of ordinary size; rank 0 can't do it for the others."""
    first = cache.layers[0].keys
    block = torch.randn(
        (min(len(first), _FILL_SLOTS), *first.shape[1:]), generator=torch.Generator().manual_seed(seed)
    ).to(first.device, first.dtype)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            for start in range(0, len(tensor), len(block)):
                part = tensor[start : start + len(block)]
                part.copy_(block[: len(part)])
