"""Stamps to steps, on stamps written by hand."""

import pytest

from sarathi_tune.tune.outside.seen import Prompt, Scene, SteadyStream
from sarathi_tune.tune.outside.steps import find_steps, timeline


def stream(*stamps: float, prompt: int = 10, tokens: tuple[int, ...] | None = None) -> SteadyStream:
    return SteadyStream(prompt, stamps, tokens)


def test_each_stream_has_one_token_in_each_step() -> None:
    steps = find_steps([stream(1.0, 1.02, 1.05, 1.07), stream(1.001, 1.021, 1.051, 1.071)])
    assert [round(step.duration_ms, 6) for step in steps] == [20.0, 30.0, 20.0]
    assert {step.decodes for step in steps} == {2}
    # the token of the second stamp was computed from the prompt and the first token
    assert [step.context for step in steps] == [11.0, 12.0, 13.0]


def test_steps_begin_with_the_last_stream_and_end_with_the_first() -> None:
    early = stream(0.0, 0.01, 0.02, 0.03, 0.04, 0.05)
    late = stream(0.0201, 0.0301, 0.0401)
    ends = [step.end_s for step in find_steps([early, late])]
    assert [round(end, 3) for end in ends] == [0.03, 0.04]


def test_a_stream_that_is_read_late_does_not_count() -> None:
    on_time = [stream(1.0, 1.02, 1.04, 1.06, 1.08) for _ in range(3)]
    delayed = stream(1.0, 1.02, 1.055, 1.06, 1.08)
    durations = [step.duration_ms for step in find_steps([*on_time, delayed])]
    assert durations == pytest.approx([20.0] * len(durations))


def test_a_straggler_does_not_shift_what_follows() -> None:
    """The second token of the last stream comes behind the third tokens of the others."""
    others = [stream(1.0, 1.02, 1.04, 1.06, 1.08, 1.12) for _ in range(4)]
    late = stream(1.0, 1.0402, 1.0404, 1.06, 1.08, 1.12)
    durations = [step.duration_ms for step in find_steps([*others, late])]
    assert durations == pytest.approx([20.0, 20.0, 20.0, 20.0, 40.0])


def test_two_tokens_in_one_event_are_two_keys() -> None:
    (step,) = find_steps([stream(1.0, 1.02, tokens=(2, 1))])
    assert step.context == 12


def test_an_injection_lies_between_its_sending_and_its_answer() -> None:
    stamps = (0.0, 0.01, 0.02, 0.03, 0.04, 0.09, 0.12, 0.13, 0.14, 0.15)
    scene = Scene("a", (stream(*stamps), stream(*stamps)), ((Prompt(80, 0.035, 0.1201),),))
    line = timeline(scene)
    (found,) = line.injections
    assert [round(step.duration_ms, 6) for step in found.steps] == [10.0, 50.0, 30.0]
    assert found.answered_at == (2,)
    assert found.plain_ms == pytest.approx(10.0)
    # the step behind the answer doesn't count as plain
    assert [round(step.end_s, 3) for step in line.plain] == [0.01, 0.02, 0.03, 0.14, 0.15]


def test_what_a_cache_knew_was_not_computed() -> None:
    stamps = (0.0, 0.01, 0.02, 0.03, 0.05, 0.06, 0.07)
    scene = Scene("a", (stream(*stamps),), ((Prompt(80, 0.025, 0.05, cached_tokens=64),),))
    assert timeline(scene).injections[0].prompts == (16,)


def test_an_answer_behind_the_end_of_the_streams_is_left_out() -> None:
    scene = Scene("a", (stream(0.0, 0.01, 0.02),), ((Prompt(80, 0.005, 0.5),),))
    assert timeline(scene).injections == ()


def test_without_streams_there_are_no_steps() -> None:
    assert timeline(Scene("a", ())).plain == ()
    assert find_steps([stream(1.0)]) == []
