"""Which gaps were stalled, seen from outside: the gaps that began while some prompt was being computed.

A server's steps can't be seen over HTTP, but a prompt is computed after it was sent, in order of arrival, and its last
chunk ends with its first token. So the prompt of a request is taken to be computed from its sending, or from the first
token of the prompt before it if that is later, to its own first token; a gap that begins in there waited for a step
with prompt tokens in it. Where the server makes prompts wait although it could compute them (all its slots are taken),
gaps without a chunk are marked as well, and the stalled tail looks better than it is, never worse.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from sarathi_tune.loadgen.record import RequestRecord

#: Tokens of one step don't arrive at the very same moment.
_SAME_STEP_S = 0.002


def estimate_stalls(records: Sequence[RequestRecord]) -> tuple[RequestRecord, ...]:
    """The records with `stalled` filled in."""
    spans = prefill_spans(records)
    starts = [start for start, _ in spans]

    def is_stalled(gap_start_s: float) -> bool:
        at_s = gap_start_s + _SAME_STEP_S
        index = bisect_right(starts, at_s) - 1
        return index >= 0 and at_s < spans[index][1]

    return tuple(
        replace(record, stalled=tuple(is_stalled(stamp) for stamp in record.token_s[:-1])) for record in records
    )


def prefill_spans(records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    """When prompts were being computed: (start, end) in seconds, in order, none overlapping another."""
    prompts = sorted(
        (record.sent_s, record.token_s[0]) for record in records if record.sent_s is not None and record.token_s
    )
    spans: list[tuple[float, float]] = []
    free_s = float("-inf")
    for sent_s, first_s in prompts:
        start_s = max(sent_s, free_s)
        if first_s > start_s:
            spans.append((start_s, first_s))
            free_s = first_s
    return spans
