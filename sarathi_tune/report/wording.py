"""The verdict in one line, and the line to paste. Each verdict has its own words."""

import shlex
from dataclasses import dataclass
from typing import Literal

from sarathi_tune.report.figures import rate_figure
from sarathi_tune.report.result import Advice, Objective, Result, Run, Verdict
from sarathi_tune.units import format_ms, format_tokens

Tone = Literal["good", "bad", "unsure"]


@dataclass(frozen=True, slots=True)
class Headline:
    """One line that answers the question, and how it should look."""

    text: str
    tone: Tone


def sentence(text: str) -> str:
    """`text` with a full stop, unless it ends like a sentence already."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def headline(result: Result) -> Headline:
    """The verdict in one line."""
    match result.advice.verdict:
        case "recommended":
            return _recommended(result)
        case "infeasible":
            return Headline(_infeasible(result), "bad")
        case "not-binding":
            return Headline(_not_binding(result), "good")
        case "not-the-budget":
            return Headline(_not_the_budget(result), "bad")
        case "inconclusive":
            return Headline("Inconclusive: the measurement can't decide between budgets; see why below.", "unsure")


def in_reach(result: Result) -> list[str]:
    """What could be promised instead, when the objective can't be met."""
    advice, lines = result.advice, []
    if advice.verdict not in ("infeasible", "not-the-budget"):
        return []
    slo = format_ms(result.objective.itl_ms)
    if advice.largest_batch is not None:
        lines.append(f"In reach at {slo}: a batch of {advice.largest_batch} (--max-num-seqs {advice.largest_batch}).")
    if advice.largest_decode_batch is not None and advice.largest_decode_batch != advice.largest_batch:
        lines.append(f"In reach at {slo} without prompts beside them: {advice.largest_decode_batch} decodes.")
    if advice.largest_max_num_seqs is not None:
        lines.append(f"In reach at {slo}: --max-num-seqs {advice.largest_max_num_seqs}.")
    if advice.smallest_slo_ms is not None:
        seqs = advice.max_num_seqs
        lines.append(f"In reach with --max-num-seqs {seqs}: an SLO of {format_ms(advice.smallest_slo_ms)}.")
    return lines


def serve_line(result: Result) -> str | None:
    """The command to paste, or None when no budget is advised."""
    advice = result.advice
    if advice.budget_tokens is None:
        return None
    return shlex.join(
        [
            *("vllm", "serve", result.model_name),
            *("--max-num-batched-tokens", str(advice.budget_tokens)),
            *("--max-num-seqs", str(advice.max_num_seqs)),
        ]
    )


def why_title(advice: Advice) -> str:
    """The heading above the reason."""
    titles: dict[Verdict, str] = {
        "recommended": f"Why {format_tokens(advice.budget_tokens or 0)}",
        "infeasible": "Why it is infeasible",
        "not-binding": "What limits instead",
        "not-the-budget": "What it is instead",
        "inconclusive": "Why it is inconclusive",
    }
    return titles[advice.verdict]


def fitted_words(tokens: int) -> str:
    """What is said of a budget that the fit has and the data are too uncertain to advise."""
    return f"By the fit alone it would be {tokens:,} tokens: worth a try under load, not a recommendation."


def _recommended(result: Result) -> Headline:
    budget, promise = result.advice.budget_tokens, _promise(result.objective)
    assert budget is not None, "a recommendation has a budget"
    run = result.run("recommended")
    if run is None or run.measured is None:
        return Headline(f"Token budget {budget} meets {promise}. Derived, not verified.", "good")
    tested = f"Token budget {run.budget_tokens}"
    if run.problems or run.meets_slo is None:
        return Headline(f"{tested} is for {promise}; its verification doesn't count, see below.", "unsure")
    rate = f"{rate_figure(run.rate_per_s)} req/s"
    if run.meets_slo:
        measured_ms = run.measured.itl_p99_ms
        seen = f"{format_ms(measured_ms)} measured" if measured_ms is not None else "measured"
        return Headline(f"{tested} meets {promise}: {seen} at {rate}.", "good")
    misses = "; ".join(run.misses) or promise
    return Headline(f"{tested} misses the objective at {rate}: {misses}.", "bad")


def _promise(objective: Objective) -> str:
    percent = f"p{objective.percentile * 100:g}"
    ttft = f" and TTFT {format_ms(objective.ttft_ms)}" if objective.ttft_ms is not None else ""
    return f"{percent} ITL {format_ms(objective.itl_ms)}{ttft}"


def _infeasible(result: Result) -> str:
    advice, slo = result.advice, format_ms(result.objective.itl_ms)
    decode = advice.decode_step
    if decode is not None and decode.step_p99_ms > result.objective.limit_ms:
        return f"Infeasible: p99 ITL {slo}, and {decode.decodes} decodes alone take {format_ms(decode.step_p99_ms)}."
    return f"Infeasible: p99 ITL {slo} leaves {advice.max_num_seqs} decodes no room for a useful chunk."


def _not_binding(result: Result) -> str:
    return f"Not binding: every budget meets p99 ITL {format_ms(result.objective.itl_ms)}; something else limits."


def _not_the_budget(result: Result) -> str:
    return f"Not the budget: p99 ITL {format_ms(result.objective.itl_ms)} is missed by a hybrid step of any size."


def run_verdict(run: Run) -> str:
    """`yes`, `no`, `void` for a run that doesn't count, `?` for one that can't tell, for a narrow column."""
    if run.problems:
        return "void"
    if run.meets_slo is None:
        return "?"
    return "yes" if run.meets_slo else "no"
