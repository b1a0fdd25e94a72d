"""A live server at a glance: which budget it runs with, what that costs, and what the advised one would change."""

from collections.abc import Iterator

from sarathi_tune.report.result import Result, RunningServer
from sarathi_tune.units import format_ms, format_tokens


def running_now(result: Result) -> str | None:
    """The server in one or two sentences; None when none was measured."""
    server = result.server
    if server is None:
        return None
    if server.budget_tokens is None or server.is_doubted:
        return "Which budget the server runs with can't be told."
    return f"It runs with {_budget(server)}{_price(server)}.{_change(result, server)}"


def seen_facts(server: RunningServer) -> Iterator[tuple[str, str]]:
    """What was seen, by name: decode steps, prompts alone, what the budget rests on."""
    if server.decode_steps:
        steps = ", ".join(
            f"{step.decodes}x{step.context_tokens} {format_ms(step.step_ms)}" for step in server.decode_steps
        )
        yield "decode steps", steps
    if server.alone:
        yield "TTFT alone", ", ".join(f"{row.tokens:,} in {format_ms(row.ttft_ms)}" for row in server.alone)
    if server.misfit is not None:
        basis = f"{server.full_steps:,} full steps of {server.prompts} prompts, off by {server.misfit:.1%} (median)"
        yield "budget from", basis
    if server.own_gap_ms is not None and server.seen_gap_ms is not None:
        yield "mean gap", f"{format_ms(server.own_gap_ms)} by the server's clock, {format_ms(server.seen_gap_ms)} here"
    yield from _by_decodes(server)
    if server.client_lag_p99_ms is not None:
        how = "; stamps are of the arrival" if server.is_stamped_on_arrival else ""
        yield "client", f"reads at most {format_ms(server.client_lag_p99_ms)} late (p99){how}"


def _by_decodes(server: RunningServer) -> Iterator[tuple[str, str]]:
    """The mean gap without prompts beside it, by number of decodes: by the server's clock, and here."""
    both = [
        f"{scene.decodes}: {format_ms(scene.own_ms)}, {format_ms(scene.seen_ms)}"
        for scene in sorted(server.scenes, key=lambda scene: scene.decodes)
        if scene.own_ms is not None and not scene.prompts
    ]
    if both:
        yield "  n decodes", "; ".join(both)


def _budget(server: RunningServer) -> str:
    assert server.budget_tokens is not None, "the caller looked"
    tokens = format_tokens(server.budget_tokens)
    if server.is_lower_bound:
        return f"at least {tokens} tokens"
    if server.interval_tokens is None or server.interval_tokens[0] == server.interval_tokens[1]:
        return f"about {tokens} tokens"
    low, high = map(format_tokens, server.interval_tokens)
    return f"about {tokens} tokens ({low} to {high})"


def _price(server: RunningServer) -> str:
    assert server.budget_tokens is not None, "the caller looked"
    if server.step_ms is None:
        return ""
    return f"; a {format_tokens(server.budget_tokens)}-token step takes {format_ms(server.step_ms)} here"


def _change(result: Result, server: RunningServer) -> str:
    advised = result.advice.budget_tokens
    if None in (advised, server.ttft_ms, server.ttft_advised_ms, server.prompt_tokens):
        return ""
    assert advised is not None
    assert server.ttft_ms is not None
    assert server.ttft_advised_ms is not None
    assert server.prompt_tokens is not None
    return (
        f" For {format_ms(result.objective.itl_ms)} use {format_tokens(advised)}; TTFT of a "
        f"{format_tokens(server.prompt_tokens)}-token prompt goes from {format_ms(server.ttft_ms)} to "
        f"{format_ms(server.ttft_advised_ms)}."
    )
