"""Profile, advice and doubts, from scenes of a virtual server whose costs are known."""

import re
from dataclasses import replace

import pytest

from sarathi_tune.config.outside import OutsideConfig
from sarathi_tune.config.slo import Slo
from sarathi_tune.loadgen.http.openai import Dialect
from sarathi_tune.loadgen.http.probe import ServerFacts
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.report.outside import running_now, seen_facts
from sarathi_tune.tune.outside.evidence import Exposition, Sent
from sarathi_tune.tune.outside.findings import Observation, conclude
from sarathi_tune.tune.outside.plan import ladder, settle
from sarathi_tune.tune.outside.seen import Alone, Scene, Seen, SteadyStream
from tests.profiles import cpu_like
from tests.tune.outside.virtual import VirtualServer

DECODES, CONTEXT = 8, 512


def config(slo_ms: float = 60.0, **options: object) -> OutsideConfig:
    settings = {"workload": "fixed:512:64", "max_num_seqs": DECODES, "context_tokens": CONTEXT, "prefix_tokens": 0}
    return OutsideConfig("http://127.0.0.1:8000", Slo(slo_ms), **(settings | options))  # type: ignore[arg-type]


def observation(budget: int = 1024, *, noise: float = 0.02, request: OutsideConfig | None = None) -> Observation:
    """What a measurement of a virtual server leaves behind."""
    asked = request or config()
    server = VirtualServer(budget, noise=noise, seed=budget)

    def scene(name: str, decodes: int, context: int, lengths: list[int]) -> Scene:
        return replace(server.play(decodes, [(length,) for length in lengths], context=context), name=name)

    around = [32, 64, 128, 256, 384, 512] * 3
    scenes = (
        scene("one", 1, 64, []),
        scene("few", 4, 64, ladder(4000)),
        scene("full", DECODES - 1, CONTEXT - 60, around),
        scene("short", DECODES, 64, []),
    )
    alone = tuple(Alone(tokens, 5.0 + cpu_like(Shape(chunk=tokens))) for tokens in (1, 64, 256, 1024) for _ in range(2))
    facts = ServerFacts(Dialect("m"), ("m",), 8192, "uvicorn")
    sent = Sent(10_000)
    return Observation(
        facts=facts,
        url="http://127.0.0.1:8000/v1",
        question=settle(asked, 8192),
        seen=Seen(alone, scenes),
        before=Exposition(),
        after=Exposition(),
        sent=sent,
        lags_ms=(0.1,) * 100,
        tokens_per_event=1.0,
    )


def truth_ms(budget: int) -> float:
    return cpu_like(Shape(DECODES, CONTEXT, budget - DECODES))


def test_the_steps_of_the_server_are_recovered() -> None:
    profile, result = conclude(config(), observation())
    assert result.server is not None
    assert result.server.budget_tokens == pytest.approx(1024, rel=0.05)
    assert result.server.step_ms == pytest.approx(truth_ms(1024), rel=0.1)
    timed = {sample.shape: sample.median_ms for sample in profile.samples if sample.shape.kind != "prefill"}
    errors = [abs(ms / cpu_like(shape) - 1) for shape, ms in timed.items()]
    # contexts are rounded and single steps scatter by 2 %
    assert sorted(errors)[len(errors) // 2] < 0.03
    assert max(errors) < 0.12


def test_prefill_rows_have_no_request_overhead() -> None:
    profile, _ = conclude(config(), observation())
    prefills = {sample.shape.chunk: sample.median_ms for sample in profile.samples if sample.shape.kind == "prefill"}
    assert set(prefills) == {64, 256}, "1,024 don't fit into a step for sure"
    for chunk, ms in prefills.items():
        assert ms == pytest.approx(cpu_like(Shape(chunk=chunk)), rel=0.1)


def test_the_advice_is_the_largest_step_within_the_objective() -> None:
    _, result = conclude(config(60.0), observation())
    assert result.advice.verdict == "recommended"
    budget = result.advice.budget_tokens
    assert budget is not None
    # p99 of Gaussian steps with 2 % lies 5 % above their centre
    assert 0.88 * 60 < truth_ms(budget) < 60.0
    assert result.server is not None
    assert result.server.ttft_advised_ms is not None
    assert result.server.ttft_ms is not None
    assert result.server.ttft_advised_ms > result.server.ttft_ms
    assert [row.label for row in result.advice.neighbours if row.budget_tokens == result.server.budget_tokens] == [
        "running now"
    ]


def test_the_gaps_of_each_scene_stand_beside_the_servers_own() -> None:
    """Two streams whose gaps are 10 and 30 ms, in the mean 20, behind one of 500 ms, when the server's count hadn't
    begun; the server says 19."""
    streams = tuple(SteadyStream(64, (late - 0.5, late, late + 0.010, late + 0.040)) for late in (5.0, 5.001))
    found = observation()
    scene = Scene("hand", streams, own_gap_ms=19.0, own_since_s=5.005)
    result = conclude(config(), replace(found, seen=replace(found.seen, scenes=(*found.seen.scenes, scene))))[1]
    assert result.server is not None
    gaps = result.server.scenes[-1]
    assert (gaps.name, gaps.decodes, gaps.prompts, gaps.gaps) == ("hand", 2, 0, 4)
    assert gaps.seen_ms == pytest.approx(20.0)
    assert gaps.own_ms == 19.0
    assert result.server.scenes[1].prompts == len(ladder(4000))
    assert ("  n decodes", "2: 19.0 ms, 20.0 ms") in list(seen_facts(result.server))


def test_an_objective_out_of_reach() -> None:
    _, result = conclude(config(5.0), observation())
    assert result.advice.verdict == "infeasible"


def doubted(changed: Observation) -> str:
    _, result = conclude(config(), changed)
    assert result.advice.verdict == "inconclusive"
    assert result.advice.budget_tokens is None
    assert running_now(result) == "Which budget the server runs with can't be told."
    return result.advice.why


def test_what_the_server_runs_with_is_told_when_only_the_advice_is_uncertain() -> None:
    _, result = conclude(config(), observation())
    uncertain = replace(result.advice, verdict="inconclusive", budget_tokens=None)
    said = running_now(replace(result, advice=uncertain))
    assert said is not None
    assert re.match(r"It runs with about 1,0\d\d tokens \(.*\); a 1,0\d\d-token step takes \d+ ms here\.$", said), said


def test_traffic_of_others_makes_it_inconclusive() -> None:
    before = Exposition({"vllm:prompt_tokens_total": 0.0})
    after = Exposition({"vllm:prompt_tokens_total": 12_500.0})
    assert "20% of the prompt tokens" in doubted(replace(observation(), before=before, after=after))


def test_a_late_client_makes_it_inconclusive() -> None:
    assert "run it on another machine" in doubted(replace(observation(), lags_ms=(12.0,) * 100))


def test_a_client_that_is_a_little_late_is_told() -> None:
    _, result = conclude(config(), replace(observation(), lags_ms=(2.1,) * 100))
    assert "client-late" in {notice["code"] for notice in result.notices}
    assert result.advice.verdict == "recommended"


def test_a_late_client_whose_stamps_are_the_kernels_is_believed() -> None:
    _, result = conclude(config(), replace(observation(), lags_ms=(12.0,) * 100, is_stamped_on_arrival=True))
    assert "client-late" not in {notice["code"] for notice in result.notices}
    assert result.advice.verdict == "recommended"
    assert result.server is not None
    assert result.server.is_stamped_on_arrival
    assert result.server.client_lag_p99_ms == pytest.approx(12.0)


def test_several_tokens_per_event_make_it_inconclusive() -> None:
    assert "tokens per event" in doubted(replace(observation(), tokens_per_event=2.5))
    drafts = Exposition({"vllm:spec_decode_num_drafts_total": 4.0})
    assert "speculative decoding" in doubted(replace(observation(), after=drafts))


def test_gaps_between_bundles_are_not_held_against_the_servers_own() -> None:
    # four tokens per event: the server's clock says a quarter of the gaps that are seen
    counted = {"vllm:inter_token_latency_seconds_sum": 1.0, "vllm:inter_token_latency_seconds_count": 1000.0}
    far = replace(observation(), after=Exposition(counted))
    assert "gaps-differ" in {notice["code"] for notice in conclude(config(), far)[1].notices}
    bundled = replace(far, tokens_per_event=4.0)
    assert "gaps-differ" not in {notice["code"] for notice in conclude(config(), bundled)[1].notices}


def test_streams_that_ended_early_make_it_inconclusive() -> None:
    seen = observation().seen
    bare = Seen(seen.alone, tuple(replace(scene, injections=()) for scene in seen.scenes))
    assert "No prompt could be laid beside steady decodes" in doubted(replace(observation(), seen=bare))


def test_steps_of_several_engines_make_it_inconclusive() -> None:
    """Two engines behind one address: the streams of a scene run in steps of their own."""
    base = observation()
    small, large = observation(64), observation(4096)
    mixed = Seen(base.seen.alone, (*small.seen.scenes[1:3], *large.seen.scenes[1:3], small.seen.scenes[0]))
    assert "No one budget explains the steps" in doubted(replace(base, seen=mixed))


def test_a_bound_is_said() -> None:
    _, result = conclude(config(), observation(8192))
    assert result.server is not None
    assert result.server.is_lower_bound
    assert result.server.interval_tokens is None
    assert "budget-only-bounded" in {notice["code"] for notice in result.notices}
    assert result.advice.verdict == "recommended", "the advice rests on the steps, not on the running budget"
