"""The same budget in the flags of each engine."""

import pytest

from sarathi_tune.budget.engines import ENGINES, translate
from sarathi_tune.errors import UsageError


def flags(engine: str, **more: object) -> dict[str, str]:
    values = {"budget": 800, "decodes": 32, "serial_chunk": 480} | more
    return dict(translate(engine, **values).flags)  # type: ignore[arg-type]


def test_vllm_counts_decodes() -> None:
    found = translate("vllm", budget=800, decodes=32, max_num_seqs=40, model="M")
    assert found.line == "vllm serve M --max-num-batched-tokens 800 --max-num-seqs 40"
    assert "0.32.0" in found.rule_version
    assert "768 prompt tokens" in found.notes[0]


def test_sglang_counts_prefill_only() -> None:
    assert flags("sglang-mixed")["--chunked-prefill-size"] == "768"
    assert "--enable-mixed-chunk" in translate("sglang-mixed", budget=800, decodes=32).line
    assert flags("sglang")["--chunked-prefill-size"] == "480"
    assert flags("sglang-mixed", dp_size=2)["--chunked-prefill-size"] == "1536"


def test_tensorrt_llm_wants_whole_blocks() -> None:
    assert flags("tensorrt-llm", budget=815)["--max_num_tokens"] == "800"
    assert flags("tensorrt-llm", budget=815, tokens_per_block=64)["--max_num_tokens"] == "768"


def test_llama_cpp_physical_batch_never_exceeds_the_logical() -> None:
    assert flags("llama.cpp")["-ub"] == "512"
    assert flags("llama.cpp", budget=300)["-ub"] == "300"


def test_lmdeploy_must_exceed_the_requests() -> None:
    assert flags("lmdeploy")["--max-prefill-token-num"] == "480"
    assert flags("lmdeploy", serial_chunk=32) == {}


def test_engines_that_pause_decodes_can_have_no_answer() -> None:
    for engine in ("sglang", "tgi", "lmdeploy"):
        found = translate(engine, budget=800, decodes=32, serial_chunk=None)
        assert found.line == ""
        assert found.notes


def test_every_engine_says_what_its_rule_was_written_for() -> None:
    for engine in ENGINES:
        found = translate(engine, budget=800, decodes=32, serial_chunk=480)
        assert found.rule_version
        assert found.as_dict()["line"] == found.line != ""


def test_unknown_engine() -> None:
    with pytest.raises(UsageError, match="choose one of vllm"):
        translate("ollama", budget=800, decodes=32)
