"""The engine that follows from the flags and the memory; counts by hand, for pages of 16 tokens."""

import pytest

from sarathi_tune.config.presets import PRESETS
from sarathi_tune.errors import OutOfMemoryError, UsageError
from sarathi_tune.server.settings import ServeConfig, engine_config

MODEL = PRESETS["smollm2-135m"]  # context 8192: 512 pages


def pages(fitting: int, device: str = "cpu", **options: int) -> tuple[int, int]:
    engine = engine_config(ServeConfig(**options), MODEL, fitting, device)  # type: ignore[arg-type]
    return engine.num_pages, engine.max_model_len


def test_every_sequence_gets_its_whole_length_where_the_memory_allows() -> None:
    assert pages(1_000_000) == (32 * 512, 8192)
    assert pages(1_000_000, max_num_seqs=2, max_model_len=1000) == (2 * 63, 1000)


def test_a_host_gives_a_quarter_and_a_gpu_nearly_all() -> None:
    assert pages(8000) == (2000, 8192)
    assert pages(8000, "cuda") == (7600, 8192)


def test_one_request_of_the_whole_context_always_fits_or_the_context_is_shorter() -> None:
    assert pages(1000) == (512, 8192)
    assert pages(300) == (300, 4800)
    assert pages(1_000_000, kv_tokens=1024) == (64, 1024)


def test_a_context_that_was_asked_for_is_not_shortened() -> None:
    with pytest.raises(UsageError, match=r"KV cache holds \(1024 tokens\)"):
        pages(1_000_000, kv_tokens=1024, max_model_len=2048)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 9000}, "longer than the context"),
        ({"port": 70_000}, "--port must be between"),
        ({"token_budget": 16, "max_num_seqs": 32}, "below --max-num-seqs 32"),
    ],
)
def test_what_can_not_be_is_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pages(1_000_000, **options)


def test_without_memory_there_is_no_server() -> None:
    with pytest.raises(OutOfMemoryError, match="no memory for a KV cache"):
        pages(0)


def test_the_key_is_never_shown() -> None:
    assert "secret" not in repr(ServeConfig(api_key="secret"))
