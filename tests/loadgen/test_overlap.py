"""Stalled gaps as they can be told from outside, against runs whose steps are known."""

from typing import Any

from sarathi_tune.loadgen.inprocess import run_load
from sarathi_tune.loadgen.overlap import estimate_stalls, prefill_spans
from sarathi_tune.loadgen.record import RequestRecord
from tests.loadgen.doubles import at, make_engine


def record(request_id: int, sent_s: float | None, *token_s: float) -> RequestRecord:
    fields: dict[str, Any] = {"intended_s": sent_s or 0.0, "prompt_tokens": 8, "output_asked": len(token_s)}
    return RequestRecord(request_id, outcome="finished", sent_s=sent_s, token_s=token_s, **fields)


def test_a_gap_that_begins_while_a_prompt_is_computed_is_stalled() -> None:
    decoding = record(0, 0.0, 1.0, 1.1, 1.2, 1.7, 1.8)
    arriving = record(1, 1.15, 1.7, 1.8)
    first, second = estimate_stalls([decoding, arriving])
    # sent within the step that ends at 1.2; its prompt is in the step from 1.2 to 1.7
    assert first.stalled == (False, False, True, False)
    assert second.stalled == (False,)


def test_prompts_are_computed_one_after_the_other() -> None:
    waiting = [record(0, 0.0, 1.0), record(1, 0.1, 2.0), record(2, 0.2, 2.0), record(3, None)]
    assert prefill_spans(waiting) == [(0.0, 1.0), (1.0, 2.0)]


def test_without_stamps_nothing_is_stalled() -> None:
    assert estimate_stalls([record(0, 0.0), record(1, None)])[0].stalled == ()


def test_it_agrees_with_the_engines_own_steps() -> None:
    # decode steps of 10 ms, 50 ms more with a chunk; prompts of 40 tokens in chunks of at most 16
    engine, clock = make_engine(lambda shape: 0.01 + 0.05 * bool(shape.chunks), budget=16)
    requests = at(*(0.23 * index for index in range(12)), prompt_tokens=40, output_tokens=60)
    result = run_load(engine, clock, requests)
    truth = [stalled for seen in result.records for stalled in seen.stalled or ()]
    estimated = [stalled for seen in estimate_stalls(result.records) for stalled in seen.stalled or ()]
    assert sum(truth) > 20
    agreement = sum(a == b for a, b in zip(truth, estimated, strict=True)) / len(truth)
    assert agreement > 0.98
