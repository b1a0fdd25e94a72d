"""How often prompts come in the steady load of `compare`."""

from dataclasses import replace

import pytest

from sarathi_tune.config.compare import SteadyConfig
from sarathi_tune.stepmodel.features import Term
from sarathi_tune.stepmodel.model import HoldOutError, Spread, StepModel
from sarathi_tune.tune.comparing.pace import Pacer, settle_pace

NOT_TESTED = HoldOutError("none", *[0.0] * 2, 0, *[0.0] * 2, 0, *[0.0] * 2, 0)
#: 10 ms and a quarter of a millisecond per token.
LINEAR = StepModel((Term("host", 0, 0), Term("tokens", 0, 0)), (10.0, 0.25), Spread(), NOT_TESTED)


#: A fast device: 8 ms and 0.02 ms per token.
FAST = replace(LINEAR, coefficients=(8.0, 0.02))


def pacer(budget_tokens: int, model: StepModel = LINEAR) -> Pacer:
    return Pacer(model, streams=8, context=512, budget_tokens=budget_tokens, loop_ms=0.0)


def test_there_is_a_prompt_in_fifty_steps() -> None:
    # 20 steps of 10 + 108/4 = 37 ms, and 30 decode steps of 12 ms between them
    pace = settle_pace(SteadyConfig(), pacer(108), 2000)
    assert pace.every_s == pytest.approx((20 * 37 + 30 * 12) / 1e3)
    # what a scheduler that stops everybody for each prompt does to more than 1 % of the gaps
    assert pace.num_prompts / (pace.answer_tokens - 1) > 0.015


def test_prompts_of_few_steps_take_half_of_the_time() -> None:
    # one step of 8 + 2008/50 = 48.16 ms: with a prompt in 50 steps the device would idle
    pace = settle_pace(SteadyConfig(), pacer(2048, FAST), 2000)
    assert pace.every_s == pytest.approx(2.2 * 0.04816)


def test_prompts_of_many_steps_do_not_pile_up() -> None:
    # 250 steps of 10 + 16/4 = 14 ms
    pace = settle_pace(SteadyConfig(), pacer(16), 2000)
    assert pace.every_s == pytest.approx(1.2 * 250 * 0.014)


def test_what_is_given_stays() -> None:
    assert settle_pace(SteadyConfig(every_s=7.0), pacer(108), 2000).every_s == 7.0
