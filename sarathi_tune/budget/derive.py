"""The budget from the SLO: the largest one whose worst step still meets it, the verdict, and what is next to it.

    budget = max n : p99[step(decodes B at context S, chunk n - B at prefix P)] * (1 + headroom) <= SLO - overhead

In vLLM the budget counts decodes, so a budget of 512 with 16 decodes is a chunk of 496. Works from documents: no torch,
no engine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sarathi_tune import notices
from sarathi_tune.budget.align import Alignment
from sarathi_tune.budget.question import BudgetQuestion, Derivation, LimitingStep, Neighbour, Verdict
from sarathi_tune.budget.rule_of_thumb import rule_of_thumb
from sarathi_tune.budget.rules import EngineSettings, binding_rule, smallest_legal_budget
from sarathi_tune.budget.steps import BEYOND_MEASURED, Steps, largest_where
from sarathi_tune.measure.profile import Profile
from sarathi_tune.notices import Notice
from sarathi_tune.stats import quantile
from sarathi_tune.stepmodel.model import StepModel
from sarathi_tune.stepmodel.resample import lack_of_fit, resample
from sarathi_tune.units import format_ms

__all__ = ["BudgetQuestion", "Derivation", "LimitingStep", "Neighbour", "Verdict", "derive"]

#: A hybrid step with a single prompt token that takes this many decode steps has a fixed part of its own.
FIXED_PART_RATIO = 1.5
#: Confidence of the interval, and the share of resampled models without a budget above which nothing is recommended.
INTERVAL_LEVEL = 0.9
DOUBTFUL_SHARE = 0.2
#: Beyond these the advice would be a guess: interval ends apart, hold-out error, noise between equal measurements.
WIDEST_INTERVAL = 3.0
LARGEST_ERROR = 0.25
LARGEST_NOISE = 0.15
#: Alignment may take this share of the budget without being asked whether it computes prompts faster.
MOST_ALIGNED_AWAY = 0.75
#: The ratio of a p99 to its median that no idle device shows; 1.05 to 1.3 were seen on idle ones.
LARGEST_SPREAD = 2.0
#: Without a measured hybrid row a hybrid step is composed of pure ones, and a lone decode row doesn't say which part of
#: its cost a chunk shares. On published tables (RTX 4090, A100) hybrid steps lie about 5 % off such a composition.
COMPOSED_SIGMA = 0.05


def derive(profile: Profile, model: StepModel, question: BudgetQuestion) -> Derivation:
    """Answer the question from the profile and the model that was fitted to it.

    Never raises for a bad SLO or a poor profile: those are verdicts.
    """
    desk = _Desk.of(profile, model, question)
    too_little = _too_little(profile, model)
    if too_little:
        return desk.answer("inconclusive", None, too_little)
    doubt = _too_noisy(profile, model) or _too_restless(model, desk)
    if doubt:
        return desk.inconclusive(doubt, desk.fitted())
    found = desk.found
    if found is None:
        return desk.answer(*desk.why_not())
    if desk.steps.worst_ms(desk.steps.widest_chunk) <= question.limit_ms:
        return desk.answer("not-binding", desk.unbound, desk.why_unbound())
    if found < desk.floor:
        return desk.answer("infeasible", None, desk.why_floor(found), largest_max_num_seqs=desk.seqs_within(found))
    return desk.recommend(found)


def _too_little(profile: Profile, model: StepModel) -> str | None:
    """Why this profile can't answer anything, or None."""
    timed = [sample.shape for sample in profile.samples if sample.times_ms and not sample.missing]
    widths = {shape.chunk for shape in timed if shape.chunk}
    if len(widths) < 2 or model.num_rows < 3:
        return (
            f"The profile has {model.num_rows} usable rows with {len(widths)} different chunk widths; at least 3 rows "
            "and 2 widths are needed to price a prompt token. Add rows."
        )
    return None


def _too_noisy(profile: Profile, model: StepModel) -> str | None:
    """Why the rows don't say enough about each other, or None."""
    if model.error.n >= 6 and model.error.median > LARGEST_ERROR:
        return (
            f"The step model misses shapes it hasn't seen by {model.error.median:.0%} (median of {model.error.n}), too "
            "much to advise. Measure again on an idle machine, with more shapes."
        )
    if profile.noise is not None and profile.noise > LARGEST_NOISE:
        return (
            f"The same step measured twice differed by {profile.noise:.0%}, too much to advise. "
            "Measure again on an idle machine."
        )
    return None


def _too_restless(model: StepModel, desk: _Desk) -> str | None:
    """Why the tail of the step times says more about the machine than about the steps, or None.

    When decode alone breaks the SLO in the median, no calmer machine would change the answer.
    """
    percentile = desk.question.percentile
    ratio = max(model.spread.ratio(has_chunk, percentile) for has_chunk in (False, True))
    if ratio <= LARGEST_SPREAD or desk.steps.centre_ms(0) > desk.question.limit_ms:
        return None
    return (
        f"Steps of the same shape took up to {ratio:.1f} times their median at p{percentile * 100:g}: something else "
        "used the machine, and such times say too little to recommend a budget. Measure again on an idle machine."
    )


def _measured_decodes(profile: Profile, model: StepModel) -> dict[tuple[int, int], float]:
    """Centres of the decode-only rows that the fit kept, by (decodes, context)."""
    return {
        (sample.shape.decodes, sample.shape.context): sample.median_ms
        for sample in profile.samples
        if sample.shape.kind == "decode"
        and sample.times_ms
        and not sample.missing
        and str(sample.shape) not in model.rejected
    }


@dataclass(frozen=True, slots=True)
class _Desk:
    """Everything that is known once the question has been laid beside the model."""

    profile: Profile
    model: StepModel
    question: BudgetQuestion
    steps: Steps
    alignment: Alignment
    settings: EngineSettings
    floor: int
    useful: int
    chunk_within: int | None

    @classmethod
    def of(cls, profile: Profile, model: StepModel, question: BudgetQuestion) -> _Desk:
        max_model_len = question.max_model_len or profile.max_model_len
        steps = Steps(
            model=model,
            decodes=question.decodes,
            context=question.context,
            prefix=question.prefix,
            percentile=question.percentile,
            max_model_len=max_model_len,
            measured_decodes=_measured_decodes(profile, model),
        )
        settings = EngineSettings(
            budget=question.default_budget,
            max_num_seqs=question.max_num_seqs or question.decodes,
            max_model_len=max_model_len,
            chunked_prefill=question.chunked_prefill,
            speculative_tokens=question.speculative_tokens,
            largest_mm_item=question.largest_mm_item,
        )
        return cls(
            profile=profile,
            model=model,
            question=question,
            steps=steps,
            alignment=Alignment.of(profile, model),
            settings=settings,
            floor=smallest_legal_budget(settings),
            useful=steps.useful_chunk(question.min_chunk_tokens, question.min_useful_share),
            chunk_within=steps.widest_within(question.limit_ms),
        )

    @property
    def found(self) -> int | None:
        """The largest budget whose worst step holds, before the engine's floor; None when no useful chunk fits."""
        if self.chunk_within is None or self.chunk_within < self.useful:
            return None
        return self.question.decodes + self.chunk_within

    # ---- what would do instead

    def smallest_slo_ms(self, decodes: int) -> float:
        """The smallest SLO that leaves these decodes a useful chunk, in ms, rounded up to a microsecond."""
        steps = replace(self.steps, decodes=decodes)
        useful = steps.useful_chunk(self.question.min_chunk_tokens, self.question.min_useful_share)
        return self.question.smallest_slo_for_ms(steps.worst_ms(useful))

    def largest_batch(self) -> int | None:
        """The most decodes, fewer than asked for, that leave a useful chunk within the SLO; None if none do."""
        slo_ms = self.question.slo_itl_ms
        return largest_where(lambda decodes: self.smallest_slo_ms(decodes) <= slo_ms, 1, self.question.decodes - 1)

    def largest_decode_batch(self) -> int | None:
        """The most decodes, fewer than asked for, whose decode-only step stays within the SLO; None if not even one."""
        limit_ms = self.question.limit_ms
        return largest_where(
            lambda decodes: replace(self.steps, decodes=decodes).p99_ms(0) <= limit_ms, 1, self.question.decodes - 1
        )

    def seqs_within(self, budget: int) -> int | None:
        """The largest max_num_seqs whose floor a budget meets; None when another rule sets the floor."""
        return largest_where(
            lambda seqs: smallest_legal_budget(replace(self.settings, max_num_seqs=seqs)) <= budget,
            1,
            self.settings.max_num_seqs,
        )

    # ---- why

    def why_not(self) -> tuple[Verdict, None, str]:
        """The verdict and its reason when no useful chunk fits."""
        question, steps = self.question, self.steps
        decode_ms, first_ms = steps.p99_ms(0), steps.p99_ms(1)
        asked = f"{question.decodes:,} decodes at {question.context:,} tokens of context"
        if question.limit_ms <= 0.0:
            why = (
                f"The overhead of {format_ms(question.overhead_ms)} per token alone uses up the SLO of "
                f"{format_ms(question.slo_itl_ms)}."
            )
            return "infeasible", None, why
        if decode_ms > question.limit_ms:
            why = (
                f"A decode-only step with {asked} takes {format_ms(decode_ms)} at {self._percentile}, more than the "
                f"{self._left}: no budget can help."
            )
            return "infeasible", None, f"{why} {self._instead()}"
        if first_ms >= FIXED_PART_RATIO * decode_ms:
            why = (
                f"A decode-only step takes {format_ms(decode_ms)}, but any step with prompt tokens takes at least "
                f"{format_ms(first_ms)}, at any chunk size: a smaller budget won't help. Such a fixed part is typical "
                "of steps outside CUDA graphs: check that graphs cover mixed steps of this size (cudagraph_mode and "
                "cudagraph_capture_sizes in vLLM, no --enforce-eager), then measure again."
            )
            return "not-the-budget", None, why
        why = (
            f"With {asked} the SLO leaves room for {self._room}; a chunk under {self.useful:,} tokens computes prompts "
            f"at less than {100 * question.min_useful_share:g} % of this machine's rate, or is smaller than a KV page."
        )
        return "infeasible", None, f"{why} {self._instead()}"

    @property
    def _room(self) -> str:
        return "no prompt token" if self.chunk_within is None else f"a chunk of only {self.chunk_within:,} tokens"

    @property
    def _left(self) -> str:
        words = self.question.headroom_words
        return f"{format_ms(self.question.limit_ms)} that the SLO leaves" + (f" with {words}" if words else "")

    @property
    def _limit(self) -> str:
        words = self.question.headroom_words
        return format_ms(self.question.limit_ms) + (f" ({words})" if words else "")

    @property
    def _percentile(self) -> str:
        return f"p{100 * self.question.percentile:g}"

    def _instead(self) -> str:
        batch, alone = self.largest_batch(), self.largest_decode_batch()
        fits = (
            "Not even one decode fits beside a useful chunk"
            if batch is None
            else f"At most {batch:,} decodes fit beside a useful chunk (--max-num-seqs {batch})"
        )
        if alone is not None and alone != batch:
            fits += f", {alone:,} without one"
        slo = format_ms(self.smallest_slo_ms(self.question.decodes))
        return f"{fits}; the smallest SLO in reach with {self.question.decodes:,} is {slo}."

    @property
    def unbound(self) -> int:
        """The budget that computes the longest prompt in one step beside all decodes."""
        return max(self.floor, self.question.decodes + self.steps.widest_chunk)

    def why_unbound(self) -> str:
        """Why the SLO doesn't bind."""
        widest = self.steps.widest_chunk
        limit = (
            f"a whole prompt of max_model_len ({widest:,} tokens)"
            if self.steps.max_model_len is not None
            else f"a chunk of {widest:,} tokens, {BEYOND_MEASURED} times the largest measured step,"
        )
        return (
            f"Even {limit} in one step takes {format_ms(self.steps.worst_ms(widest))} at {self._percentile}, within "
            f"the {self._left}: the SLO doesn't limit the budget; prompt "
            "length, TTFT and memory do."
        )

    def why_floor(self, found: int) -> str:
        """Why the engine's own rule makes the SLO infeasible."""
        seqs = self.seqs_within(found)
        remedy = "No max_num_seqs helps." if seqs is None else f"--max-num-seqs {seqs} is the largest that would do."
        return (
            f"The SLO allows a budget of at most {found:,} tokens, but the engine refuses less than {self.floor:,}: "
            f"{binding_rule(self.settings).words(self.settings)}. {remedy}"
        )

    # ---- answers

    def recommend(self, found: int) -> Derivation:
        """The recommendation for the largest budget that holds, unless its interval says that nothing is known."""
        budget, alignment = self._aligned(found)
        interval, hopeless = self._interval(budget)
        if hopeless > DOUBTFUL_SHARE:
            why = (
                f"{hopeless:.0%} of the models that the same data could have given allow no budget: the SLO is too "
                "close to the smallest step. Measure more, or leave more room."
            )
            return self.inconclusive(why, budget)
        if interval and interval[1] > WIDEST_INTERVAL * max(1, interval[0]):
            why = (
                f"The budget lies somewhere between {interval[0]:,} and {interval[1]:,} tokens, too wide to recommend "
                "one. Measure more shapes, more rounds, on an idle machine."
            )
            return replace(self.inconclusive(why, budget), interval=interval)
        return replace(
            self.answer("recommended", budget, self._why_recommended(budget, alignment), alignment=alignment),
            interval=interval,
            unaligned_budget=found,
        )

    def inconclusive(self, why: str, fitted: int | None) -> Derivation:
        """No recommendation; `fitted` is the budget by the fit alone."""
        return replace(self.answer("inconclusive", None, why), fitted_budget=fitted)

    def fitted(self) -> int | None:
        """The largest budget that holds by the fit alone, however little that is worth; None when there is none."""
        found = self.found
        return self._aligned(found)[0] if found is not None and found >= self.floor else None

    def _aligned(self, found: int) -> tuple[int, str]:
        """The budget after alignment, and why it moved."""
        aligned = self.alignment.down(found)
        if self.alignment.tile_tokens is None:
            return found, "not aligned: no stair was measured"
        if aligned - self.question.decodes < self.useful or aligned < self.floor:
            return max(found, self.floor), "not aligned: the aligned budget would be too small"
        if aligned == found:
            return found, "on a measured stair's edge"
        if aligned < MOST_ALIGNED_AWAY * found and self._rate(aligned) < self._rate(found):
            return found, "not aligned: no stair was measured nearby, and the aligned budget would be less efficient"
        return aligned, f"moved down from {found:,}: steps were measured to jump at {self._stairs_text} tokens"

    def _rate(self, budget: int) -> float:
        """Prompt tokens per millisecond at this budget."""
        chunk = budget - self.question.decodes
        return chunk / self.steps.centre_ms(chunk)

    @property
    def _stairs_text(self) -> str:
        return ", ".join(f"{stair:,}" for stair in self.model.stairs)

    def _why_recommended(self, budget: int, alignment: str) -> str:
        question = self.question
        chunk = budget - question.decodes
        moved = f" ({alignment})" if alignment.startswith("moved") else ""
        return (
            f"The largest budget whose step with {question.decodes:,} decodes at {question.context:,} tokens of "
            f"context beside a chunk of {chunk:,} at prefix {self.steps.prefix_of(chunk):,} stays within "
            f"{self._limit} at {self._percentile}: {format_ms(self.steps.p99_ms(chunk))}{moved}."
        )

    def _interval(self, budget: int) -> tuple[tuple[int, int] | None, float]:
        """The interval of the budget among resampled models that allow one, and the share of those that allow none.

        Bootstrap of rows and ratios (refitted), times a normal lack of fit of the size seen on held-out shapes. A step
        that is off by a factor meets the limit where the fitted one meets the limit over that factor.
        """
        if self.question.resamples < 2:
            return None, 0.0
        rng = random.Random(self.question.seed)
        sigma = lack_of_fit(self.model)
        wide = sigma if self.model.error.additive_n else max(sigma, COMPOSED_SIGMA)
        found, hopeless = [], 0
        for model in resample(self.profile, self.model, self.question.resamples, self.question.seed):
            steps, luck = replace(self.steps, model=model), rng.gauss(0.0, 1.0)
            hopeless += steps.worst_ms(self.useful) > self.question.limit_ms * math.exp(-sigma * luck)
            chunk = steps.widest_within(self.question.limit_ms * math.exp(-wide * luck)) or 0
            if chunk >= self.useful:
                found.append(self._aligned(self.question.decodes + chunk)[0])
        tail = (1.0 - INTERVAL_LEVEL) / 2.0
        low, high = int(quantile(found or [budget], tail)), int(quantile(found or [budget], 1.0 - tail))
        return (min(low, budget), max(high, budget)), hopeless / self.question.resamples

    def answer(
        self,
        verdict: Verdict,
        budget: int | None,
        why: str,
        *,
        alignment: str = "",
        largest_max_num_seqs: int | None = None,
    ) -> Derivation:
        """A derivation with everything that doesn't depend on how the verdict came about."""
        question, steps = self.question, self.steps
        deciding = steps.decodes + self.useful if budget is None else budget
        refused = verdict in ("infeasible", "not-the-budget")
        return Derivation(
            verdict=verdict,
            budget=budget,
            chunk_tokens=None if budget is None else budget - question.decodes,
            interval=None,
            interval_level=INTERVAL_LEVEL,
            rule_of_thumb=rule_of_thumb(self.profile, self.model, question.decodes, question.context),
            limiting=self._step(deciding - question.decodes),
            decode_step=self._step(0),
            largest_batch=self.largest_batch() if refused and largest_max_num_seqs is None else None,
            largest_decode_batch=self.largest_decode_batch() if verdict == "infeasible" else None,
            largest_max_num_seqs=largest_max_num_seqs,
            smallest_slo_ms=self.smallest_slo_ms(question.decodes),
            unaligned_budget=budget,
            fitted_budget=None,
            alignment=alignment,
            floor=self.floor,
            min_chunk_tokens=self.useful,
            serial_chunk=steps.widest_serial_chunk(question.limit_ms, question.min_chunk_tokens),
            neighbours=self._neighbours(budget, deciding),
            why=why,
            notices=self.model.notices + tuple(self._notices(budget)),
        )

    def _step(self, chunk: int) -> LimitingStep:
        return LimitingStep(
            decodes=self.question.decodes,
            context=self.question.context,
            chunk=chunk,
            prefix=self.steps.prefix_of(chunk) if chunk else 0,
            centre_ms=self.steps.centre_ms(chunk),
            p99_ms=self.steps.p99_ms(chunk),
        )

    def _neighbours(self, budget: int | None, deciding: int) -> tuple[Neighbour, ...]:
        """The budget between its half, its aligned neighbours, its double and the engine's default; each once."""
        unit = self.alignment.tile_tokens or self.profile.tile_tokens
        labelled = [("recommended" if budget is not None else "smallest useful", deciding)]
        labelled.append(("engine default", self.question.default_budget))
        if budget is not None:
            labelled += [
                ("half", budget // 2),
                ("next below", (budget - 1) // unit * unit),
                ("next above", (budget // unit + 1) * unit),
                ("double", budget * 2),
            ]
        most = self.question.decodes + self.steps.widest_chunk
        seen: dict[int, str] = {}
        for label, value in labelled:
            if self.question.decodes < value <= max(most, deciding):
                seen.setdefault(value, label)
        return tuple(self._neighbour(label, value) for value, label in sorted(seen.items()))

    def _neighbour(self, label: str, budget: int) -> Neighbour:
        chunk = budget - self.question.decodes
        prompt = self._reference_prompt()
        steps, ttft_ms = self._prompt_time(prompt, chunk)
        worst = self.steps.worst_ms(chunk)
        return Neighbour(
            label=label,
            budget=budget,
            chunk_tokens=chunk,
            p99_step_ms=self.steps.p99_ms(chunk),
            meets_slo=worst <= self.question.slo_step_ms and budget >= self.floor,
            prompt_tokens=prompt,
            prompt_steps=steps,
            ttft_ms=ttft_ms,
        )

    def _reference_prompt(self) -> int:
        asked = self.question.reference_prompt_tokens or max(self.question.prefix, self.question.context)
        return min(asked, self.steps.max_model_len or asked)

    def _prompt_time(self, prompt: int, chunk: int) -> tuple[int, float]:
        """Steps and milliseconds until the first token of a prompt that has the whole chunk for itself."""
        decodes = self.question.decodes
        starts: Sequence[int] = range(0, prompt, chunk)
        step_ms = (
            self.model.centre_ms(decodes, decodes * self.question.context, ((start, min(chunk, prompt - start)),))
            + self.question.overhead_ms
            for start in starts
        )
        return len(starts), math.fsum(step_ms)

    def _notices(self, budget: int | None) -> list[Notice]:
        """What a reader should know about this answer."""
        shapes = [sample.shape for sample in self.profile.samples if sample.times_ms]
        question, found = self.question, []
        if not any(shape.decodes for shape in shapes):
            found.append(notices.decode_cost_unknown())
        else:
            measured = {"decodes": max(s.decodes for s in shapes), "context": max(s.context for s in shapes)}
            for what, most in measured.items():
                if getattr(question, what) > most * 1.25:
                    found.append(notices.load_extrapolated(what, getattr(question, what), most))
        if not any(shape.decodes and shape.chunk for shape in shapes):
            found.append(notices.hybrid_not_measured())
        most_prefix = max((shape.prefix + shape.chunk for shape in shapes), default=0)
        if question.prefix > most_prefix * 1.25:
            found.append(notices.load_extrapolated("prefix", question.prefix, most_prefix))
        chunked = [shape.num_tokens for shape in shapes if shape.chunk]
        if budget is not None and chunked and not 0.8 * min(chunked) <= budget <= 1.25 * max(chunked):
            found.append(notices.budget_extrapolated(budget, max(chunked) if budget > max(chunked) else min(chunked)))
        if budget is not None and self.settings.max_num_seqs > question.decodes:
            found.append(notices.seqs_beyond_decodes(self.settings.max_num_seqs, question.decodes))
        return found
