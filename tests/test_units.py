"""How people write durations and token counts."""

import pytest

from sarathi_tune.errors import ExitCode, UsageError
from sarathi_tune.units import format_bytes, format_ms, parse_duration_ms, parse_share, parse_tokens


@pytest.mark.parametrize(
    ("text", "ms"),
    [("20ms", 20), ("0.02s", 20), ("20000us", 20), ("20000µs", 20), ("1.5 s", 1500), ("2min", 120_000), ("1e-1s", 100)],
)
def test_durations_need_and_understand_a_unit(text: str, ms: float) -> None:
    assert parse_duration_ms(text) == pytest.approx(ms)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("20", "no unit"),
        ("-5ms", "greater than zero"),
        ("0ms", "greater than zero"),
        ("nan", "not a duration"),
        ("nanms", "not a duration"),
        ("inf", "not a duration"),
        ("1e999s", "finite"),
        ("20 parsecs", "unknown unit 'parsecs'"),
        ("", "not a duration"),
        ("ms", "not a duration"),
        ("20ms 5", "not a duration"),
        ("2O ms", "unknown unit|not a duration"),
    ],
)
def test_bad_durations_are_refused_with_an_example(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_duration_ms(text, "--slo-itl")
    assert "20ms" in str(caught.value)
    assert "--slo-itl" in str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(("text", "tokens"), [("512", 512), ("8k", 8192), ("8K", 8192), ("0.5k", 512), ("1m", 1 << 20)])
def test_token_counts_accept_k_as_1024(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "8kb", "", "many", "0.0001k"])
def test_bad_token_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="token count"):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("ms", "text"), [(0.1234, "0.12 ms"), (20, "20.0 ms"), (99.96, "100.0 ms"), (393.4, "393 ms"), (12_300, "12.3 s")]
)
def test_milliseconds_for_a_reader(ms: float, text: str) -> None:
    assert format_ms(ms) == text


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("0", 0), ("100%", 1), (" 2.5 % ", 0.025)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "5", "-1%", "101%", "nan", "inf%", "5%%", "five"])
def test_bad_shares_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--headroom"):
        parse_share(text, "--headroom")


def test_bytes_for_a_reader() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 * 1024**2, 1536 * 1024**2)] == [
        "12 B",
        "2.0 KiB",
        "3.0 MiB",
        "1.5 GiB",
    ]
