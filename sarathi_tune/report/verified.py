"""A verification of a live server for a person: the verdict, every point, the views of the decisive one, warnings."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from sarathi_tune.goodput.server_account import ServerAccount
from sarathi_tune.goodput.verified import Point, Verification
from sarathi_tune.loadgen.latency import Distribution
from sarathi_tune.notices import Notice
from sarathi_tune.report.console import figure_table, print_facts, print_heading, print_notices, print_prose
from sarathi_tune.report.figures import count_figure, ms_figure, percent_figure, rate_figure
from sarathi_tune.report.glyphs import Glyphs, glyphs_for
from sarathi_tune.report.wording import sentence
from sarathi_tune.units import format_ms

_STYLE = {"met": "bold green", "missed": "bold red", "failed": "bold red", "inconclusive": "bold yellow"}


def print_verification(verification: Verification, console: Console) -> None:
    """Everything a person wants to know."""
    glyphs = glyphs_for(console)
    console.print(Text(verified_headline(verification), style=_STYLE[verification.verdict]))
    print_prose(Text(sentence(verification.why)), console)
    if verification.points:
        _print_points(verification, console, glyphs)
    if verification.point is not None:
        _print_views(verification.point, console)
    _print_basis(verification, console)
    print_notices([notice.as_dict() for notice in _notices(verification)], console, glyphs)


def verified_headline(verification: Verification) -> str:
    """The verdict in one line."""
    slo = verification.slo
    percent = f"p{slo.percentile * 100:g}"
    promise = f"{percent} ITL {format_ms(slo.itl_ms)}"
    if slo.ttft_ms is not None:
        promise += f" and {percent} TTFT {format_ms(slo.ttft_ms)}"
    point, capacity = verification.point, verification.capacity
    at = "" if point is None or point.rate_per_s is None else f" at {rate_figure(point.rate_per_s)} req/s"
    match verification.verdict:
        case "met" if capacity is not None:
            return f"Goodput under {promise}: {rate_figure(capacity.rate_per_s)} req/s."
        case "met":
            return f"{promise} is met{at}."
        case "missed":
            return f"{promise} is missed{at}."
        case "failed":
            return "The target server failed."
        case "inconclusive":
            return f"Inconclusive: this can't say whether {promise} is met{at}."


def _print_points(verification: Verification, console: Console, glyphs: Glyphs) -> None:
    print_heading("Load", console)
    names = ("req/s", "sent", "failed", "p50 ITL\nms", "p99\nms", "TTFT p50\nms", "p99\nms", "goodput\nreq/s", "P(met)")
    table = figure_table(glyphs, *names, text=("meets\nSLO",))
    for index, point in enumerate(verification.points):
        is_decisive = index == verification.decisive
        report, counts = point.report, point.report.counts
        table.add_row(
            glyphs.pointer if is_decisive else "",
            rate_figure(point.rate_per_s if point.rate_per_s is not None else report.offered_per_s),
            count_figure(counts.intended - counts.not_sent),
            count_figure(counts.failed),
            ms_figure(report.itl.p50_ms),
            ms_figure(report.itl.p99_ms),
            ms_figure(report.ttft.p50_ms),
            ms_figure(report.ttft.p99_ms),
            rate_figure(report.goodput_per_s),
            percent_figure(point.probability),
            "yes" if point.is_met else "no",
            style="bold" if is_decisive else None,
        )
    console.print(table)


def _print_views(point: Point, console: Console) -> None:
    report, views = point.report, point.views
    own, stalled = report.itl_own, report.itl_stalled
    parts = [f"pooled {_tail(report.itl)}"]
    parts += [f"of gaps with a prompt beside them {_tail(stalled)}"] if stalled.n else []
    parts += [f"of requests' own p99 {_tail(own)}", f"per token {_tail(views.itl_per_token)}"]
    text = f"p99 ITL: {', '.join(parts)}; max {_ms(report.itl.max_ms)}"
    print_prose(Text(f"{text} (n = {report.itl.n:,} gaps)."), console)
    more = [f"mean gap of a request, p99 {_ms(report.itl_mean.p99_ms)}", f"TPOT p50 {_ms(report.tpot.p50_ms)}"]
    if views.fluidity_index is not None:
        more.append(f"{percent_figure(views.fluidity_index)} of the tokens in time (fluidity)")
    if views.tokens_per_event_mean is not None:
        more.append(f"{views.tokens_per_event_mean:.3g} tokens per event, at most {views.tokens_per_event_max}")
    print_prose(Text("; ".join(more) + "."), console)
    counts = report.counts
    kinds = ", ".join(f"{number} {kind.replace('_', ' ')}" for kind, number in counts.failures.items())
    print_prose(
        Text(
            f"{counts.intended} requests intended: {counts.good} good, {counts.slo_miss} missed the objective, "
            f"{counts.failed} failed{f' ({kinds})' if kinds else ''}, {counts.not_sent} not sent."
        ),
        console,
    )
    if point.server is not None:
        print_prose(Text(_account_text(point.server)), console)


def _account_text(account: ServerAccount) -> str:
    """The server's own means beside ours."""
    ttft, gap, queue = account.ttft, account.gap, account.queue
    waited = f"; {_ms(queue.mean_ms)} of it queued" if queue.mean_ms is not None else ""
    return (
        f"By the server's own clock {_ms(gap.own.mean_ms)} between tokens in the mean (seen {_ms(gap.seen.mean_ms)}), "
        f"the first one after {_ms(ttft.own.mean_ms)} (seen {_ms(ttft.seen.mean_ms)}{waited}). Answers "
        f"begun {ttft.own.n:,} ({ttft.seen.n:,} of ours), preemptions {account.preemptions:,}."
    )


def _print_basis(verification: Verification, console: Console) -> None:
    server, workload, facts = verification.server, verification.workload, []
    facts.append(("target", verification.target))
    if "model" in server:
        given = [str(server["model"])]
        given += [str(server["endpoint"])] if "endpoint" in server else []
        given += [] if server.get("token_prompts") else ["prompts as words"]
        facts.append(("model", ", ".join(given)))
    if "name" in workload:
        facts.append(("workload", _workload_fact(verification)))
    if verification.point is not None:
        lag_ms = verification.point.validity.facts.lag_p99_ms
        seen = verification.point.validity.more_facts
        how = "; stamps are of the arrival" if seen["stamped_on_arrival"] else ""
        facts.append(
            (
                "client",
                f"{seen['workers']} worker process{'es' if seen['workers'] > 1 else ''}, p99 "
                f"{lag_ms:.2f} ms behind schedule, event loop p99 {seen['loop_lag_p99_ms']:.2f} ms late{how}",
            )
        )
    print_facts("Rests on", facts, console)


def _workload_fact(verification: Verification) -> str:
    workload = verification.workload
    trace = workload.get("trace")
    if not trace:
        return str(workload["name"])
    how = ", at the times of the recording" if verification.settings.get("arrivals") == "trace" else ""
    return f"{workload['name']}, {trace['requests']:,} requests of a trace ({trace['format']}){how}"


def _notices(verification: Verification) -> Iterable[Notice]:
    yield from verification.notices
    if verification.point is not None:
        yield from verification.point.validity.problems
        yield from verification.point.validity.remarks


def _tail(seen: Distribution) -> str:
    interval = seen.tail_interval_ms
    if interval is None:
        return _ms(seen.tail_ms)
    return f"{_ms(seen.tail_ms)} ({ms_figure(interval[0])} to {ms_figure(interval[1])})"


def _ms(value: float | None) -> str:
    return "-" if value is None else format_ms(value)
