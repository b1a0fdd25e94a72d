"""The rate search, against probes whose answer is known."""

import math
from random import Random

import pytest

from sarathi_tune.errors import UsageError
from sarathi_tune.goodput.search import search_capacity


@pytest.mark.parametrize("capacity", [0.01, 0.05, 0.7, 1.0, 37.0, 900.0])
@pytest.mark.parametrize("guess", [0.05, 0.9, 1.1, 30.0])
def test_a_sharp_capacity_is_found_to_five_percent(capacity: float, guess: float) -> None:
    # vllm #47651: rates below 1 per second; the guess may be far off on either side
    found = search_capacity(lambda rate, _: rate <= capacity, guess * capacity)
    assert found.is_confirmed
    assert found.rate_per_s is not None
    assert found.upper_per_s is not None
    assert found.rate_per_s <= capacity < found.upper_per_s
    assert found.upper_per_s <= 1.05 * found.rate_per_s
    assert len(found.probes) <= 22


def test_a_good_prediction_needs_few_probes() -> None:
    found = search_capacity(lambda rate, _: rate <= 1.0, 0.95)
    assert len(found.probes) <= 8


@pytest.mark.parametrize("seed", range(20))
def test_a_noisy_probe_does_not_lead_far_astray(seed: int) -> None:
    # the chance to meet falls from 98 % to 2 % within 16 % of the rate
    rng = Random(seed)
    found = search_capacity(lambda rate, _: rng.random() < 1 / (1 + math.exp(50 * math.log(rate))), 0.6)
    assert found.is_confirmed
    assert found.rate_per_s == pytest.approx(1.0, rel=0.15)


def test_one_wrong_answer_in_the_search_is_put_right() -> None:
    # the first attempt at 0.8 misses by bad luck; nothing else does
    found = search_capacity(lambda rate, attempt: attempt > 0 and rate <= 1.0, 0.8)
    assert found.is_confirmed
    assert found.rate_per_s == pytest.approx(1.0, rel=0.05)
    assert [probe.met for probe in found.probes if probe.rate_per_s == 0.8] == [False, True, True]


def test_every_attempt_is_new() -> None:
    attempts: list[int] = []

    def ask(rate: float, attempt: int) -> bool:
        attempts.append(attempt)
        return rate <= 1.0

    search_capacity(ask, 1.0)
    assert attempts == list(range(len(attempts)))


def test_no_rate_in_reach() -> None:
    found = search_capacity(lambda _rate, _attempt: False, 1.0, reach=16.0)
    assert found.rate_per_s is None
    assert found.is_confirmed
    assert found.upper_per_s is not None
    assert found.upper_per_s < 2 / 16


def test_every_rate_in_reach() -> None:
    found = search_capacity(lambda _rate, _attempt: True, 1.0, reach=16.0)
    assert found.upper_per_s is None
    assert found.rate_per_s is not None
    assert found.rate_per_s > 16 / 2
    assert found.is_confirmed


def test_running_out_of_probes_is_said() -> None:
    found = search_capacity(lambda rate, _: rate <= 1.0, 0.01, max_probes=4)
    assert not found.is_confirmed


@pytest.mark.parametrize("first", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_start_is_refused(first: float) -> None:
    with pytest.raises(UsageError, match="positive number"):
        search_capacity(lambda _rate, _attempt: True, first)
