"""vLLM 0.32.0's rules: the field's illegal numbers, and sizes by hand."""

import pytest

from sarathi_tune.budget.rules import (
    EngineSettings,
    check_settings,
    cuda_graph_sizes,
    require_legal,
    smallest_legal_budget,
    vllm_defaults,
)
from sarathi_tune.errors import UsageError


@pytest.mark.parametrize(
    ("settings", "rule", "legal"),
    [
        (EngineSettings(2048, max_num_seqs=256, speculative_tokens=16), "speculation", 17 * 256),
        (EngineSettings(120, max_num_seqs=60, speculative_tokens=7), "speculation", 8 * 60),
        (EngineSettings(512, largest_mm_item=2496), "multimodal-item", 2496),
        (EngineSettings(128, max_num_seqs=256), "max-num-seqs", 256),
        (EngineSettings(2048, max_model_len=8192, chunked_prefill=False), "max-model-len", 8192),
        (EngineSettings(1024, block_tokens=1568), "aligned-block", 1568),
        (EngineSettings(16, draft_slots=16), "draft-slots", 17),
    ],
)
def test_illegal_numbers(settings: EngineSettings, rule: str, legal: int) -> None:
    broken = [violation for violation in check_settings(settings) if violation.severity == "error"]
    assert [violation.rule for violation in broken] == [rule]
    assert broken[0].smallest_legal == legal
    assert f"{legal:,}" in broken[0].message
    with pytest.raises(UsageError, match=f"smallest legal value is {legal:,}"):
        require_legal(settings)
    from dataclasses import replace

    require_legal(replace(settings, budget=legal))
    with pytest.raises(UsageError):
        require_legal(replace(settings, budget=legal - 1))


def test_the_smallest_legal_value_obeys_all_rules() -> None:
    settings = EngineSettings(64, max_num_seqs=256, speculative_tokens=1, largest_mm_item=1500, block_tokens=4128)
    assert smallest_legal_budget(settings) == 4128
    assert {violation.rule for violation in check_settings(settings) if violation.severity == "error"} == {
        "max-num-seqs",
        "speculation",
        "multimodal-item",
        "aligned-block",
    }
    assert all(v.smallest_legal == 4128 for v in check_settings(settings) if v.severity == "error")


def test_chunked_prefill_lifts_the_context_rule() -> None:
    require_legal(EngineSettings(512, max_num_seqs=128, max_model_len=131_072))


def test_what_no_budget_mends() -> None:
    settings = EngineSettings(2048, max_model_len=4096, long_prefill_token_threshold=8192)
    (violation,) = check_settings(settings)
    assert (violation.rule, violation.smallest_legal) == ("long-prefill-threshold", None)


def test_warnings_do_not_refuse() -> None:
    too_large = EngineSettings(8192, max_num_seqs=2, max_model_len=2048)
    assert [violation.severity for violation in check_settings(too_large)] == ["warning"]
    speculating = EngineSettings(4352, max_num_seqs=256, speculative_tokens=16)
    assert [violation.rule for violation in check_settings(speculating)] == ["speculation-below-8192"]
    require_legal(too_large)
    require_legal(speculating)


def test_graph_sizes_by_hand() -> None:
    assert cuda_graph_sizes(8, 2048) == (1, 2, 4, 8, 16)
    sizes = cuda_graph_sizes(256, 8192)
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-3:] == (480, 496, 512)
    assert 248 in sizes
    assert 264 not in sizes
    assert len(sizes) == 3 + 31 + 17
    assert cuda_graph_sizes(1024, 8192, datacentre_blackwell=True)[-1] == 1024
    assert cuda_graph_sizes(256, 300)[-2:] == (288, 300)
    assert cuda_graph_sizes(4, 2048, decode_length=3)[-1] == 24


def test_defaults_as_read() -> None:
    assert vllm_defaults("cuda", 80, "NVIDIA H100 80GB HBM3").server_budget == 8192
    assert vllm_defaults("cuda", 80, "NVIDIA A100-SXM4-80GB").server_budget == 2048
    assert vllm_defaults("cuda", 192, "AMD MI300X").server_budget == 16384
    assert vllm_defaults("cuda", None).server_budget == 2048
    assert vllm_defaults("cpu", world_size=2).server_budget == 4096
    assert vllm_defaults("cpu").server_seqs == 128
