"""How many steps and prompts the time allows."""

import pytest

from sarathi_tune.tune.outside.plan import Limits, full_plain_steps


@pytest.mark.parametrize(
    ("step_ms", "seconds", "steps"),
    [
        (70.0, 100.0, 142),  # a tenth of the time: 10 s
        (10.0, 100.0, 200),  # more tell nothing more
        (500.0, 60.0, 30),  # what every scene has
        (0.0, 60.0, 200),  # nothing known yet
    ],
)
def test_the_full_batch_has_a_tenth_of_the_time_to_itself(step_ms: float, seconds: float, steps: int) -> None:
    assert full_plain_steps(30, step_ms, Limits(8192, None, seconds)) == steps
