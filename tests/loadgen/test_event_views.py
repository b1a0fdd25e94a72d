"""Fluidity and the views of events that aren't tokens, by hand."""

from typing import Any

import pytest

from sarathi_tune.config.slo import Slo
from sarathi_tune.loadgen.latency import event_views, fluidity, token_gaps_ms
from sarathi_tune.loadgen.record import RequestRecord


def record(*token_s: float, **changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {"prompt_tokens": 8, "output_asked": len(token_s), "token_s": token_s, "sent_s": 0.0}
    return RequestRecord(0, 0.0, outcome="finished", **(fields | changes))


def test_the_gap_before_an_event_is_shared_out() -> None:
    # vllm #27485: T(a)@1 T(bcde)@1.4
    assert token_gaps_ms(record(1.0, 1.4, event_tokens=(1, 4))) == pytest.approx([100] * 4)
    assert token_gaps_ms(record(1.0, 1.4)) == []


def test_fluidity() -> None:
    slo = Slo(100, ttft_ms=1000)
    assert fluidity(record(1.0, 1.1, 1.2), slo) == 1.0
    # early tokens are slack for later ones: due at 1.0, 1.1, 1.2
    assert fluidity(record(0.5, 0.6, 1.2), slo) == 1.0
    # late at 1.3 instead of 1.1; the next is due at 1.4
    assert fluidity(record(1.0, 1.3, 1.4), slo) == pytest.approx(2 / 3)
    assert fluidity(record(1.5, 1.6), slo) == 0.5
    assert fluidity(record(1.5, 1.6), Slo(100)) == 1.0, "no TTFT was promised"
    assert fluidity(record(), slo) is None
    # four tokens at once: the first is late, the others come before they are due
    assert fluidity(record(1.0, 1.4, event_tokens=(1, 4)), slo) == pytest.approx(4 / 5)


def test_views() -> None:
    views = event_views([record(1.0, 1.4, event_tokens=(1, 4)), record(1.0, 1.2, 1.2, num_coalesced=1)], Slo(100))
    assert views.events == 5
    assert (views.counted_requests, views.tokens_per_event_mean, views.tokens_per_event_max) == (1, 2.5, 4)
    assert views.itl_per_token.n == 4
    assert views.coalesced_share == pytest.approx(1 / 3)
    assert event_views([], Slo(100)).fluidity_index is None
