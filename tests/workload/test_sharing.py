"""Workloads whose prompts share a prefix and grow turn by turn, and what a prefix cache makes of them."""

from pathlib import Path
from statistics import fmean

import pytest

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.engine.loop import Engine
from sarathi_tune.errors import DocumentError
from sarathi_tune.loadgen.inprocess import run_load, timed
from sarathi_tune.loadgen.record import LoadResult
from sarathi_tune.stepmodel.fit import fit_step_model
from sarathi_tune.stepmodel.virtual import VirtualClock, VirtualExecutor
from sarathi_tune.workload.lengths import Fixed
from sarathi_tune.workload.load import load_workload, parse_workload
from sarathi_tune.workload.sharing import UNDER_WAY, Sharing
from sarathi_tune.workload.spec import Workload
from tests.profiles import cpu_like, measured


def agents(turns: int = 3, num_prefixes: int = 2) -> Workload:
    sharing = Sharing(prefix_tokens=100, num_prefixes=num_prefixes, turns=turns)
    return Workload("agents", Fixed(tokens=20), Fixed(tokens=5), sharing=sharing)


def test_a_turn_repeats_the_last_one_and_its_answer() -> None:
    requests = agents().draw(0, 3 * UNDER_WAY, vocab_size=1000, max_model_len=4096).requests
    first, second, third = (requests[turn * UNDER_WAY] for turn in range(3))
    # 100 of prefix and 20 of its own; then 5 of answer and 20 more per turn
    assert [request.prompt_tokens for request in (first, second, third)] == [120, 145, 170]
    assert second.prompt[:120] == first.prompt
    assert third.prompt[:145] == second.prompt


def test_conversations_share_one_of_the_prefixes_and_nothing_else() -> None:
    requests = agents().draw(0, UNDER_WAY, vocab_size=1000, max_model_len=4096).requests
    assert len({tuple(request.prompt[:100]) for request in requests}) == 2
    assert requests[0].prompt[:100] == requests[2].prompt[:100]
    assert len({tuple(request.prompt[100:]) for request in requests}) == UNDER_WAY


def test_lengths_are_the_same_without_a_vocabulary_and_tokens_are_shared_too() -> None:
    read = agents().draw(1, 24, vocab_size=1000, max_model_len=4096).requests
    unread = agents().draw(1, 24, vocab_size=None, max_model_len=4096).requests
    assert [r.prompt_tokens for r in read] == [r.prompt_tokens for r in unread]
    assert unread[0].prompt == unread[UNDER_WAY].prompt[:120]


def test_statistics_include_prefix_and_history() -> None:
    workload = load_workload("agentic")
    requests = workload.draw(2, 480, vocab_size=None, max_model_len=8192).requests
    assert workload.mean_prompt_tokens == pytest.approx(fmean(r.prompt_tokens for r in requests), rel=0.05)
    assert workload.quantile_prompt(0.5) > 2000


def test_a_prompt_that_outgrows_the_context_loses_its_end_and_that_is_said() -> None:
    draw = agents(turns=6).draw(0, 6 * UNDER_WAY, vocab_size=1000, max_model_len=200)
    longest = draw.requests[5 * UNDER_WAY]
    assert longest.prompt_tokens + longest.output_tokens == 200
    assert longest.prompt[:120] == draw.requests[0].prompt
    # turns 4 to 6 want 195, 220 and 245 tokens of prompt, and 195 fits with its answer of 5
    assert draw.num_clamped == 2 * UNDER_WAY
    assert draw.notices[0].code == "prompts-clamped"


def serve(prefix_cache: bool) -> LoadResult:
    workload = load_workload("agentic")
    requests = workload.draw(0, 6 * UNDER_WAY, vocab_size=None, max_model_len=8192).requests
    config = EngineConfig(512, 8, 8192, max_model_len=8192, prefix_cache=prefix_cache)
    clock = VirtualClock()
    executor = VirtualExecutor(fit_step_model(measured(cpu_like, 0.0, 1, 0)), clock)
    result = run_load(
        Engine(config, executor, clock), clock, timed(requests, [None] * len(requests)), in_flight=4, freeze_heap=False
    )
    assert all(record.outcome == "finished" for record in result.records)
    return result


def test_a_prefix_cache_computes_what_agents_share_once() -> None:
    cold, warm = serve(prefix_cache=False), serve(prefix_cache=True)
    prompt_tokens = sum(record.prompt_tokens for record in warm.records)
    cached = sum(record.cached_tokens or 0 for record in warm.records)
    assert not any(record.cached_tokens for record in cold.records)
    # Four prefixes of 2,000 tokens are computed once, and each turn's own tokens: most of the rest is found.
    assert cached > 0.75 * prompt_tokens
    assert warm.elapsed_s < 0.5 * cold.elapsed_s


def test_fields_of_a_file(tmp_path: Path) -> None:
    document = {
        "name": "mine",
        "prompt": {"kind": "fixed", "tokens": 8},
        "output": {"kind": "fixed", "tokens": 2},
        "prefix": {"tokens": 64, "distinct": 3},
        "turns": 2,
    }
    assert parse_workload(document, str(tmp_path)).sharing == Sharing(64, 3, 2)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"turns": 0}, "turns"),
        ({"prefix": {"distinct": 2}}, "prefix.tokens"),
        ({"prefix": {"tokens": 10, "distinct": 0}}, "prefix.distinct"),
        ({"prefix": {"tokens": 10, "number": 1}}, "prefix.number"),
        ({"prefix": 10}, "prefix"),
        ({"prefix": {"tokens": 100}, "total_cap": 50}, "total_cap"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, object], where: str) -> None:
    lengths = {"kind": "fixed", "tokens": 8}
    with pytest.raises(DocumentError, match=f"'{where}'"):
        parse_workload({"name": "mine", "prompt": lengths, "output": lengths, **fields}, "mine.yaml")
