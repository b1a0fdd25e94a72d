"""What a run is about: context, prefix, pages and origins against workloads that can be calculated by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from sarathi_tune.config.run import TuneConfig
from sarathi_tune.config.slo import Slo
from sarathi_tune.errors import UsageError
from sarathi_tune.machine.gpu import GpuDescription
from sarathi_tune.measure.profile import Profile
from sarathi_tune.tune.settings import batch_context, budget_question, chunk_prefix, settle
from sarathi_tune.workload.load import load_workload
from tests.tune.tiny import CONTEXT, tiny_model

CONFIG = TuneConfig(Slo(itl_ms=50.0), model="smollm2-135m", workload="fixed:768:64")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.mark.parametrize("decodes", [1, 8, 64, 512])
def test_the_context_of_a_batch_is_the_mean_of_requests_met_somewhere_in_their_output(decodes: int) -> None:
    """One decode of fixed:768:64 sees 769 + u * 63 keys, u uniform: mean 800.5, deviation 63 / sqrt(12) = 18.2.
    The mean of n of them at p95 is 800.5 + 1.645 * 18.2 / sqrt(n); a single one is 769 + 0.95 * 63 = 828.9."""
    expected = 828.9 if decodes == 1 else 800.5 + 1.645 * 18.187 / decodes**0.5
    assert batch_context(load_workload("fixed:768:64"), decodes) == pytest.approx(
        expected, abs=6.0 / decodes**0.5 + 0.6
    )


def test_a_batch_of_a_million_is_settled_at_once() -> None:
    assert batch_context(load_workload("fixed:768:64"), 1_000_000) == pytest.approx(801, abs=1.5)


def test_outputs_of_one_token_never_decode() -> None:
    """There is no decode to average over: the longest prompt stands in."""
    assert batch_context(load_workload("fixed:768:1"), 8) == 768


def test_the_prefix_is_what_most_prompt_tokens_have_before_them() -> None:
    """A token of a 1000-token prompt has a uniform number of tokens before it: p95 is 950, the quantile of 4096 draws
    wanders by 1000 * sqrt(0.05 * 0.95 / 4096) = 3.4."""
    assert chunk_prefix(load_workload("fixed:1000:1")) == pytest.approx(950, abs=12)


def test_long_prompts_count_for_every_token_they_have(tmp_path: Path) -> None:
    """Prompts of 100 or 900 tokens, half each: nine tokens in ten are of the long ones, so p95 over tokens solves
    0.9 * (900 - x) / 900 = 0.05, x = 850; over prompts it would be 900 * 0.9 = 810."""
    path = tmp_path / "two.yaml"
    path.write_text(
        "name: two\n"
        "prompt: {kind: empirical, quantiles: {0: 100, 0.4999: 100, 0.5001: 900, 1: 900}}\n"
        "output: {kind: fixed, tokens: 1}\n"
    )
    assert chunk_prefix(load_workload(str(path))) == pytest.approx(850, abs=12)


def test_what_was_given_stays_and_says_so() -> None:
    given = replace(CONFIG, max_num_seqs=4, context_tokens=2000, prefix_tokens=0)
    settings = settle(given, "cpu")
    assert (settings.decodes, settings.context, settings.prefix) == (4, 2000, 0)
    assert {settings.origins[name] for name in ("max_num_seqs", "context", "prefix")} == {"given"}


def test_what_was_left_open_says_where_it_comes_from() -> None:
    settings = settle(CONFIG, "cpu")
    assert settings.decodes == 8
    assert settle(CONFIG, "cuda").decodes == 32
    assert settings.origins["max_num_seqs"] == "default on cpu"
    assert settings.origins["context"].endswith("p95 of workload fixed:768:64")
    assert settings.origins["prefix"].endswith("p95 of workload fixed:768:64")


def test_the_control_is_what_vllm_would_take_on_the_device() -> None:
    settings = settle(CONFIG, "cpu")
    assert (settings.control_budget, settings.origins["control_budget"]) == (2048, "default of vLLM 0.32.0 on cpu")
    h100 = GpuDescription("NVIDIA H100 80GB HBM3", 85 * 10**9, "9.0")
    assert settle(CONFIG, "cuda", gpu=h100).control_budget == 8192
    assert settle(CONFIG, "cuda").control_budget == 2048, "a GPU that NVML doesn't show"
    given = settle(replace(CONFIG, control_budget_tokens=512), "cuda", gpu=h100)
    assert (given.control_budget, given.origins["control_budget"]) == (512, "given")


def test_pages_hold_a_full_batch_and_the_largest_step() -> None:
    """A request of 768 + 64 tokens is 52 pages of 16. Eight of them are 416, which is less than the control's step: 51
    pages for each of eight decodes at context 801 to 816, and 2048 tokens behind the prefix of the last chunk."""
    settings = settle(CONFIG, "cpu")
    step = 8 * -(-settings.context // 16) + -(-(settings.prefix + 2048) // 16)
    assert settings.num_pages == step + 8
    short = settle(replace(CONFIG, max_num_seqs=64, control_budget_tokens=64), "cpu")
    assert short.num_pages == max(64 * 52, 64 * -(-short.context // 16) + -(-(short.prefix + 64) // 16)) + 64


def test_a_small_model_limits_context_and_budget(tiny: str) -> None:
    settings = settle(replace(CONFIG, model=tiny), "cpu")
    assert settings.max_model_len == settings.max_budget == CONTEXT
    assert settle(replace(CONFIG, model="llama-3.2-1b"), "cpu").max_budget == 8192


@pytest.mark.parametrize(("flag", "field"), [("--context", "context_tokens"), ("--prefix", "prefix_tokens")])
def test_more_than_the_model_takes_is_refused(tiny: str, flag: str, field: str) -> None:
    allowed = replace(CONFIG, model=tiny, **{field: CONTEXT})
    settle(allowed, "cpu")
    with pytest.raises(UsageError, match=rf"{flag} 4,097 is longer than the model's context of 4,096 tokens"):
        settle(replace(allowed, **{field: CONTEXT + 1}), "cpu")


def test_a_budget_that_vllm_would_not_start_with() -> None:
    """vLLM raises when max_num_batched_tokens is below max_num_seqs (config/scheduler.py)."""
    settle(replace(CONFIG, max_num_seqs=16, budget_tokens=16), "cpu")
    with pytest.raises(UsageError, match=r"--budget 15 is below --max-num-seqs 16.*at least 16 tokens"):
        settle(replace(CONFIG, max_num_seqs=16, budget_tokens=15), "cpu")


def test_a_workload_beyond_the_model(tiny: str) -> None:
    with pytest.raises(UsageError, match="doesn't fit the model's context of 4096 tokens"):
        settle(replace(CONFIG, model=tiny, workload="fixed:4096:16"), "cpu")


def test_the_question_carries_the_loop_and_the_overhead() -> None:
    config = replace(CONFIG, overhead_ms=2.0, seed=7)
    question = budget_question(config, settle(config, "cpu"), Profile(samples=()), 0.25)
    assert question.slo_itl_ms == 50.0
    assert question.overhead_ms == 2.25
    assert question.decodes == 8
    assert question.reference_prompt_tokens == 768
    assert question.seed == 7


@pytest.mark.parametrize(("noise", "asked", "headroom"), [(None, None, 0.0), (0.01, None, 0.05), (0.08, 0.0, 0.0)])
def test_the_question_carries_the_headroom(noise: float | None, asked: float | None, headroom: float) -> None:
    config = replace(CONFIG, headroom=asked)
    profile = Profile(samples=(), noise=noise)
    assert budget_question(config, settle(config, "cpu"), profile, 0.0).headroom == headroom


def test_settings_repeat() -> None:
    assert settle(CONFIG, "cpu") == settle(CONFIG, "cpu")
