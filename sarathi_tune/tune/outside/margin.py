"""How far the worst step is from the steps of a steady load.

The advice holds for a full batch beside a full chunk. A server that is kept busy by the workload alone settles
elsewhere: each step takes in C - d prompt tokens, and a request of P prompt and O output tokens decodes for O - 1
steps, so that d = (C - d) (O - 1) / P decodes run beside prompts. Where that is far below the batch, larger budgets
meet the objective too, until a burst of decodes meets a prompt.
"""

from dataclasses import dataclass

from sarathi_tune.budget.question import BudgetQuestion
from sarathi_tune.budget.steps import Steps, largest_where
from sarathi_tune.stepmodel.fit import StepModel
from sarathi_tune.workload.spec import Workload

#: A steady load with this share of the batch is about the batch itself.
_ALMOST = 0.75


@dataclass(frozen=True, slots=True)
class Margin:
    """A steady load with the advised budget: decodes beside prompts and their step's time at the percentile; and the
    largest budget whose steady step still meets the objective."""

    decodes: int
    step_ms: float
    largest_budget: int


def steady_decodes(workload: Workload, budget: int, most: int) -> int:
    """Decodes beside prompts when the workload keeps the server busy, at most `most`."""
    decode_steps = max(0.0, workload.mean_output_tokens - 1)
    share = decode_steps / (workload.mean_prompt_tokens + decode_steps)
    return max(1, min(most, round(budget * share)))


def margin(model: StepModel, question: BudgetQuestion, workload: Workload, budget: int) -> Margin | None:
    """The margin of an advised budget; None where a steady load is about as bad as the worst step."""
    decodes = steady_decodes(workload, budget, question.decodes)
    if decodes >= _ALMOST * question.decodes:
        return None

    def step_ms(tokens: int) -> float:
        count = steady_decodes(workload, tokens, question.decodes)
        steps = Steps(model, count, question.context, question.prefix, question.percentile, question.max_model_len)
        return steps.worst_ms(max(1, tokens - count))

    largest = largest_where(lambda tokens: step_ms(tokens) <= question.limit_ms, budget, 8 * budget)
    return None if largest is None else Margin(decodes, step_ms(budget), largest)
