"""Which exit code a result means."""

from dataclasses import replace

import pytest

from sarathi_tune.cli.output import exit_code_of
from tests.report import examples


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (examples.recommended(), 0),
        (examples.recommended(verified=False), 0),
        (examples.recommended(met=False), 1),
        (examples.infeasible(), 3),
        (examples.not_binding(), 0),
        (examples.not_the_budget(), 1),
        (examples.inconclusive(), 4),
    ],
    ids=["met", "derived", "missed", "infeasible", "not-binding", "not-the-budget", "inconclusive"],
)
def test_every_verdict_has_its_exit_code(result, code: int) -> None:
    assert exit_code_of(result) == code


def test_a_verification_that_does_not_count_is_inconclusive() -> None:
    result = examples.recommended()
    for changes in ({"problems": ("client lag",)}, {"meets_slo": None}):
        assert exit_code_of(replace(result, runs=(replace(result.runs[0], **changes),))) == 4


def test_a_control_that_misses_does_not_decide() -> None:
    result = examples.recommended()
    assert result.runs[1].meets_slo is False
    assert exit_code_of(result) == 0
