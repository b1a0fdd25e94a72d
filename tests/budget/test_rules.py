"""vLLM 0.32.0's rules: the field's illegal numbers, and sizes by hand."""

from dataclasses import replace

import pytest

from sarathi_tune.budget.rules import (
    EngineSettings,
    Violation,
    check_settings,
    default_budget,
    smallest_legal_budget,
)


def errors(settings: EngineSettings) -> list[Violation]:
    return [violation for violation in check_settings(settings) if violation.severity == "error"]


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
    broken = errors(settings)
    assert [violation.rule for violation in broken] == [rule]
    assert broken[0].smallest_legal == legal
    assert f"{legal:,}" in broken[0].message
    assert f"smallest legal value is {legal:,}" in broken[0].message
    assert not errors(replace(settings, budget=legal))
    assert errors(replace(settings, budget=legal - 1))


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
    assert not errors(EngineSettings(512, max_num_seqs=128, max_model_len=131_072))


def test_what_no_budget_mends() -> None:
    settings = EngineSettings(2048, max_model_len=4096, long_prefill_token_threshold=8192)
    (violation,) = check_settings(settings)
    assert (violation.rule, violation.smallest_legal) == ("long-prefill-threshold", None)


def test_warnings_do_not_refuse() -> None:
    too_large = EngineSettings(8192, max_num_seqs=2, max_model_len=2048)
    assert [violation.severity for violation in check_settings(too_large)] == ["warning"]
    speculating = EngineSettings(4352, max_num_seqs=256, speculative_tokens=16)
    assert [violation.rule for violation in check_settings(speculating)] == ["speculation-below-8192"]


def test_defaults_as_read() -> None:
    assert default_budget("cuda", 80, "NVIDIA H100 80GB HBM3") == 8192
    assert default_budget("cuda", 80, "NVIDIA A100-SXM4-80GB") == 2048
    assert default_budget("cuda", 192, "AMD MI300X") == 16384
    assert default_budget("cuda", None) == 2048
    assert default_budget("cpu", world_size=2) == 4096
    assert default_budget("cpu") == 2048
