"""The runner of a model that is spread over processes: like `runtime.runner.Runner`, and the engine can't tell."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from sarathi_tune.config.model import ModelConfig, RopeScaling
from sarathi_tune.config.parallel import Layout, check_layout
from sarathi_tune.config.source import ModelSource
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.machine.cpu import describe_cpu
from sarathi_tune.runtime.kvcache import KVCache
from sarathi_tune.runtime.parallel.mesh import Backend
from sarathi_tune.runtime.parallel.pipeline import PipelineTimes
from sarathi_tune.runtime.parallel.place import Place
from sarathi_tune.runtime.parallel.ranks import Ranks, check_launch
from sarathi_tune.runtime.parallel.wire import Command, decode_document, encode_document, encode_plan
from sarathi_tune.runtime.parallel.worker import ANSWER_NUMBERS, Answer, Worker
from sarathi_tune.runtime.runner import Runner, RunnerOptions, resolve_device, warm_up_plans


class ParallelRunner:
    """A model over all ranks of `ranks`, on rank 0. Implements `engine.executor.Executor`.

    `cache` is rank 0's part of the KV cache.
    """

    def __init__(self, ranks: Ranks, worker: Worker) -> None:
        self.cache: KVCache = worker.loaded.cache
        #: Steps on whose plan all ranks agreed.
        self.num_agreed = 0
        self._ranks = ranks
        self._worker = worker
        self._times = PipelineTimes()

    @classmethod
    def build(cls, ranks: Ranks, source: ModelSource, options: RunnerOptions) -> "ParallelRunner":
        """Load each rank's part of the model, and warm up. Raises UsageError for a model that can't be cut up so, what
        `Runner.build` raises, and RankError when another rank fails."""
        check_layout(source.config, ranks.setup.layout)
        with ranks.together(is_loading=True):
            ranks.tell(Command.BUILD, encode_document(_build_document(source, options)), num_answers=1)
            worker = Worker.build(ranks.mesh, ranks.place, source, options)
            ranks.mesh.answer([1])
        runner = cls(ranks, worker)
        for plan in warm_up_plans(options.num_pages, options.page_tokens):
            runner.execute(plan)
        runner._times = PipelineTimes()
        return runner

    @property
    def description(self) -> Mapping[str, Any]:
        """As a runner's, with the ranks, and with a pipeline's times so far. `threads` are each rank's."""
        layout = self._ranks.setup.layout
        known = dict(self._worker.loaded.description)
        known |= {"ranks": layout.num_ranks, "collectives": self._ranks.setup.backend}
        known["graphs"] = {"captured": [], "reason": "steps that are spread over processes aren't captured"}
        if layout.pipeline > 1:
            known["pipeline"] = self._times.as_dict()
        return MappingProxyType(known)

    def execute(self, plan: StepPlan) -> list[int]:
        """Compute a step on all ranks and return one token id per slice that samples, in the plan's order.

        Returns when the slowest rank is done. Raises RankError when a rank fails: all are gone then.
        """
        answers, _ = self._run(Command.STEP, plan)
        return answers[self._worker.sampling_rank].tokens

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Compute a step and return its logits instead, [slices that sample, vocab] float32 on the host."""
        _, logits = self._run(Command.LOGITS, plan)
        assert logits is not None, "rank 0 gets the logits"
        return logits

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()

    def _run(self, command: Command, plan: StepPlan) -> tuple[list[Answer], torch.Tensor | None]:
        with self._ranks.together():
            started_s = time.perf_counter()
            words = encode_plan(plan, self.cache.page_tokens)
            digest = self._worker.digest(words)
            num_tokens = sum(piece.samples for piece in plan)
            self._ranks.tell(command, words, ANSWER_NUMBERS + num_tokens, digest)
            answers, logits = self._worker.step(plan, digest, wants_logits=command is Command.LOGITS)
            took_ms = (time.perf_counter() - started_s) * 1e3
        self.num_agreed += 1
        self._times.add(took_ms, answers[0].num_micro_batches, self._stage_times(answers))
        return answers, logits

    def _stage_times(self, answers: list[Answer]) -> list[float]:
        """How long each stage computed: as long as its slowest rank."""
        size = self._ranks.setup.layout.tensor
        return [max(a.busy_ms for a in answers[first : first + size]) for first in range(0, len(answers), size)]


def build_runner(
    source: ModelSource, options: RunnerOptions, layout: Layout, threads: int | None = None
) -> Runner | ParallelRunner:
    """The runner of one process, or of several when the layout has them; with the compute threads of this machine, or
    `threads` of them, shared out equally. Raises what `Runner.build`, `Ranks.start` and `ParallelRunner.build` raise.
    """
    check_launch(Place.from_environment(), layout)
    if layout.num_ranks == 1:
        torch.set_num_threads(threads or describe_cpu().threads)
        return Runner.build(source, **asdict(options))
    check_layout(source.config, layout)
    backend: Backend = "nccl" if resolve_device(options.device).type == "cuda" else "gloo"
    ranks = Ranks.start(layout, backend=backend, threads=threads)
    return ParallelRunner.build(ranks, source, options)


def local_ranks(runner: Runner | ParallelRunner) -> int:
    """How many of a runner's processes compute on this machine."""
    place = Place.from_environment()
    return place.num_local if place is not None else int(runner.description.get("ranks", 1))


def _build_document(source: ModelSource, options: RunnerOptions) -> dict[str, Any]:
    directory = str(source.directory.resolve()) if source.directory is not None else None
    return {"config": asdict(source.config), "directory": directory, "options": asdict(options)}


def read_build_document(words: Any) -> tuple[ModelSource, RunnerOptions]:
    """What a follower is told to load."""
    document = decode_document(words)
    fields = document["config"]
    if fields["rope_scaling"] is not None:
        fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
    fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
    directory = Path(document["directory"]) if document["directory"] is not None else None
    return ModelSource(ModelConfig(**fields), directory), RunnerOptions(**document["options"])
