"""The order of the scenes: each rests on what the ones before have shown."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sarathi_tune.config.outside import OutsideConfig
from sarathi_tune.notices import Notice, context_shortened, server_runs_fewer
from sarathi_tune.report.progress import Phase
from sarathi_tune.stats import median
from sarathi_tune.tune.outside import plan
from sarathi_tune.tune.outside.plan import Limits, PromptCost, Question
from sarathi_tune.tune.outside.rows import FULL
from sarathi_tune.tune.outside.running import RunningBudget, infer_budget
from sarathi_tune.tune.outside.session import PAUSE_STEPS, Observer
from sarathi_tune.tune.outside.steps import find_steps, timeline

#: Decode-only steps at the beginning of a scene.
_PLAIN_STEPS = 30
#: Prompts on the idle server are timed in so many rounds, of which the first warms up; short ones several times in
#: each and beside the few, because they cost little and a delay of a millisecond is a large part of them.
_ALONE_ROUNDS, _SHORT_TIMES = 3, 3
#: The refining goes on until the ends of the budget's interval are this close, as long as this share of the time isn't
#: over.
_NARROW, _REFINE_UNTIL = 1.03, 0.9
_MOST_REFINEMENTS = 3
#: All scenes are played again where they took no more than this share of the time: a machine that was slower for a few
#: seconds, or a step that something fell into, is then one of two.
_AGAIN_UNTIL = 0.45


@dataclass(slots=True, eq=False)
class Play:
    """All scenes of a measurement. `question` follows what the server turns out to do."""

    config: OutsideConfig
    observer: Observer
    question: Question
    phase: Phase
    notices: list[Notice] = field(default_factory=list)
    total: int = 0
    started_s: float = field(default_factory=time.perf_counter)

    async def run(self) -> None:
        """Everything, in the time that there is."""
        observer = self.observer
        self._expect(len(plan.ALONE_TOKENS) * _ALONE_ROUNDS + 6)
        await observer.warm_up()
        cost = await self._alone()
        longest = plan.longest_prompt(self.limits, cost)
        # one place of the batch is left to the prompts
        few = max(1, min(plan.FEW, self.question.decodes - 1))
        prompts = plan.in_turns(_short_ones_again(plan.ladder(longest)), 1, self.config.seed)
        await self._all_scenes(few, prompts, cost, longest)
        running = self._running()
        for _ in range(_MOST_REFINEMENTS):
            if self._is_settled(running) or self._passed > _REFINE_UNTIL:
                break
            assert running is not None, "without injections it counts as settled"
            found = plan.refining_prompts(running, few, longest)
            await self._scene("refine", few, plan.SHORT_TOKENS, found, running)
            running = self._running()
        if self._passed <= _AGAIN_UNTIL:
            await self._all_scenes(few, prompts[::-1], cost, longest)

    async def _all_scenes(self, few: int, prompts: Sequence[int], cost: PromptCost, longest: int) -> None:
        """Every number of decodes once, with prompts beside the few and the full batch."""
        ladder = [(length,) for length in prompts]
        await self._scene("few", few, plan.SHORT_TOKENS, ladder, self._running())
        await self._full(cost, longest, self._running())
        running = self._running()
        for name, count, context in self._others(self.question.decodes):
            if not self.observer.is_late:
                await self._scene(name, count, context, [], running)

    @property
    def _passed(self) -> float:
        """The share of the time that is over."""
        return (time.perf_counter() - self.started_s) / self.seconds

    @property
    def limits(self) -> Limits:
        """What the server and the user allow."""
        return self.observer.limits

    @property
    def seconds(self) -> float:
        """The time that there is in all."""
        return self.limits.seconds

    async def _alone(self) -> PromptCost:
        """Prompts on the idle server, longer and longer until one takes too long; then again, those that count."""
        lengths: list[int] = []
        longest_ms = 0.0
        for tokens in plan.ALONE_TOKENS:
            if tokens > self.limits.longest_prompt or longest_ms > plan.alone_limit_ms(self.limits):
                break
            self.phase.describe(f"{tokens:,} alone")
            longest_ms = await self.observer.time_alone(tokens, keep=False)
            lengths.append(tokens)
        each_round = _short_ones_again(lengths)
        self._expect(len(lengths) - len(plan.ALONE_TOKENS) * _ALONE_ROUNDS + len(each_round) * (_ALONE_ROUNDS - 1))
        for tokens in each_round * (_ALONE_ROUNDS - 1):
            self.phase.describe(f"{tokens:,} alone")
            await self.observer.time_alone(tokens)
        return PromptCost.of(self.observer.alone)

    async def _full(self, cost: PromptCost, longest: int, running: RunningBudget | None) -> None:
        """The batch that the advice is about, beside prompts around the objective."""
        asked = self.question.decodes
        context, reason = plan.full_context(self.question, self.limits, cost, longest)
        told = context_shortened(self.question.context, context, reason)
        if reason and told not in self.notices:
            self.notices.append(told)
        few_ms = self._decode_ms()
        slo_ms = self.config.slo.itl_ms - self.config.overhead_ms
        lengths = plan.full_prompts(running, self.question, slo_ms, few_ms, cost, longest)
        # nobody knows yet what a step of the full batch takes; a third of the objective is a fair guess
        step_ms = max(few_ms, slo_ms / 3)
        rounds = plan.affordable_rounds(lengths, step_ms, PAUSE_STEPS, cost, self.limits)
        prompts = plan.in_turns(lengths, rounds, self.config.seed)
        plain = plan.full_plain_steps(_PLAIN_STEPS, step_ms, self.limits)
        grown = (plain + len(prompts) * (PAUSE_STEPS + 3)) // 2
        decodes, context = max(1, asked - 1), max(1, context - grown)
        await self._scene(FULL, decodes, context, [(length,) for length in prompts], running, num_plain=plain)
        if self.observer.most_decodes is not None and self.observer.most_decodes < asked:
            seen = max(1, self.observer.most_decodes)
            self.question = replace(self.question, decodes=seen)
            self.notices.append(server_runs_fewer(seen, asked))

    def _others(self, decodes: int) -> list[tuple[str, int, int]]:
        """Decode-only scenes: (name, decodes, context)."""
        scenes = [("one", 1, plan.SHORT_TOKENS), ("short", decodes, plan.SHORT_TOKENS)]
        if decodes // 2 > plan.FEW:
            scenes.append(("half", decodes // 2, max(plan.SHORT_TOKENS, self.question.context // 2)))
        return scenes

    async def _scene(
        self,
        name: str,
        decodes: int,
        context: int,
        injections: Sequence[tuple[int, ...]],
        running: RunningBudget | None,
        *,
        num_plain: int = _PLAIN_STEPS,
    ) -> None:
        self._expect(len(injections))
        context = max(1, min(context, self.limits.max_model_len // 2))
        tokens = plan.stream_tokens(
            num_plain,
            [sum(lengths) for lengths in injections],
            running.budget if running else None,
            PAUSE_STEPS,
            self.limits,
        )
        if self.limits.kv_tokens is not None:
            tokens = max(8, min(tokens, self.limits.kv_tokens // (2 * decodes) - context))
        await self.observer.play(name, decodes, context, tokens=tokens, num_plain=num_plain, injections=injections)

    def _expect(self, more: int) -> None:
        self.total += more
        self.phase.expect(self.total)

    def _running(self) -> RunningBudget | None:
        return infer_budget([item for scene in self.observer.scenes for item in timeline(scene).injections])

    def _is_settled(self, running: RunningBudget | None) -> bool:
        if running is None:
            return True
        low, high = running.interval
        return high is not None and high <= _NARROW * low

    def _decode_ms(self) -> float:
        """A decode step of the few."""
        scene = self.observer.scenes[-1]
        return median([step.duration_ms for step in find_steps(scene.streams)] or [0.0])


def _short_ones_again(lengths: Sequence[int]) -> list[int]:
    return [tokens for tokens in lengths for _ in range(_SHORT_TIMES if tokens <= plan.SHORT_TOKENS else 1)]
