"""Every warning the tool can give: a stable code, the cause as seen on this run, and what to do about it.

A notice is a value. Whoever notices something returns it; the CLI prints it to stderr and the report puts it into the
JSON result, so that a person and a CI job read the same words. One function per notice, all in this file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warning"]
#: Two steps of a profile that can't both be right, each with its time in ms.
Pair = tuple[tuple[str, float], tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Notice:
    """One warning. `code` is stable (for CI), `cause` says what was seen, `remedy` what to do."""

    code: str
    severity: Severity
    cause: str
    remedy: str

    def as_dict(self) -> dict[str, str]:
        """The notice as it stands in a JSON document."""
        return {"code": self.code, "severity": self.severity, "cause": self.cause, "remedy": self.remedy}


def machine_busy(load_1m: float, cores: int, other_cores: float) -> Notice:
    """Other processes used the cores while we measured: `other_cores` CPUs' worth on average."""
    return Notice(
        "machine-busy",
        "warning",
        f"Other processes used {other_cores:.1f} of {cores} cores while measuring (load average {load_1m:.1f}).",
        "Stop the other work and measure again; step times on a shared machine are too long and too noisy.",
    )


def prompts_clamped(workload: str, count: int, total: int, max_model_len: int) -> Notice:
    """The tail of a workload's lengths doesn't fit the model's context."""
    return Notice(
        "prompts-clamped",
        "warning",
        f"{count} of {total} requests of workload {workload!r} were longer than the model's context of "
        f"{max_model_len} tokens and were shortened.",
        "Use a model with a longer context or a shorter workload; the longest prompts are missing here.",
    )


def cpu_stolen(share: float) -> Notice:
    """The host of this virtual machine gave its cores to somebody else."""
    return Notice(
        "cpu-stolen",
        "warning",
        f"The host took {share:.0%} of this virtual machine's CPU time away while measuring (steal time).",
        "Use a machine with dedicated cores, or measure again at a quieter time.",
    )


def cgroup_throttled(throttled_s: float, duration_s: float) -> Notice:
    """The container ran out of CPU quota."""
    return Notice(
        "cgroup-throttled",
        "warning",
        f"The container's CPU quota stopped threads for {throttled_s:.1f} s in all while measuring "
        f"({duration_s:.1f} s).",
        "Raise the CPU limit of the container, or pass --threads with at most the quota in whole CPUs.",
    )


def more_threads_than_allowed(threads: int, cores: int, quota: float | None) -> Notice:
    """More compute threads were asked for than affinity and quota allow."""
    allowed = f"{cores} cores" if quota is None or quota >= cores else f"a CPU quota of {quota:g}"
    return Notice(
        "more-threads-than-quota",
        "warning",
        f"{threads} threads compute, and this process may use {allowed}.",
        "Leave --threads out, so that it follows affinity and quota: threads that wait for a stopped one make steps "
        "many times slower.",
    )


def more_ranks_than_cores(ranks: int, cores: int) -> Notice:
    """More processes compute on this machine than it has cores for them."""
    return Notice(
        "more-ranks-than-cores",
        "warning",
        f"{ranks} ranks compute on this machine, and they may use {cores} cores.",
        "Use fewer ranks, or more machines: ranks that share a core wait for each other in every layer.",
    )


def noise_high(noise: float, limit: float) -> Notice:
    """The same shape measured twice gave two results."""
    return Notice(
        "noise-high",
        "warning",
        f"The same step measured under two labels differed by {noise:.1%} (limit {limit:.0%}).",
        "Stop other work, fix the clocks where you can, and measure again; differences below this can't be told apart.",
    )


def nvml_missing() -> Notice:
    """There is a GPU and no library to read its clocks."""
    return Notice(
        "nvml-missing",
        "warning",
        "The GPU's clocks and throttling are not recorded: the Python package nvidia-ml-py is not installed.",
        "Install it with: pip install 'sarathi-tune[gpu]'.",
    )


def nvml_denied(what: tuple[str, ...], reason: str) -> Notice:
    """NVML refused to answer, as it does within a MIG slice or a container without the management library."""
    return Notice(
        "nvml-denied",
        "warning",
        f"NVML refused {', '.join(what)} ({reason}): throttling and other users of this GPU can't be seen.",
        "On a MIG slice ask the administrator for access, or watch the clocks from the host; in a container add the "
        "driver capability 'utility'. Nothing was assumed in place of the missing values.",
    )


def gpu_throttled(reasons: tuple[str, ...], low_mhz: int | None, high_mhz: int | None) -> Notice:
    """The GPU lowered its clocks while we measured. A power cap alone is normal under full load."""
    clocks = "" if low_mhz is None else f" (SM clock {low_mhz} to {high_mhz} MHz)"
    return Notice(
        "gpu-throttled",
        "info" if reasons == ("power-cap",) else "warning",
        f"The GPU was held back by {', '.join(reasons)}{clocks} while measuring.",
        "Check cooling and power limit; with locked clocks (nvidia-smi --lock-gpu-clocks) step times repeat better.",
    )


def gpu_shared(num_processes: int) -> Notice:
    """Somebody else computes on the same GPU."""
    return Notice(
        "gpu-shared",
        "warning",
        f"{num_processes} processes compute on this GPU.",
        "Stop the others (nvidia-smi lists them) and measure again: they take memory and make steps longer.",
    )


def profile_rows_rejected(pairs: Sequence[Pair]) -> Notice:
    """Rows of the profile that are slower than one that contains them, or faster than one that they contain, and were
    left out of the fit; each with the other row."""
    if len(pairs) == 1:
        (row, row_ms), (other, other_ms) = pairs[0]
        cause = (
            f"Non-monotone profile: step {row} took {row_ms:.4g} ms and the larger or smaller step {other} took "
            f"{other_ms:.4g} ms, which can't both be right. {row} was left out of the fit."
        )
    else:
        cause = (
            f"Non-monotone profile: {len(pairs)} steps took longer than larger ones, or less than smaller ones, and "
            f"were left out of the fit: {_beside(pairs)}."
        )
    again = f"the {len(pairs)} steps" if len(pairs) > 1 else pairs[0][0][0]
    return Notice(
        "profile-row-rejected",
        "warning",
        cause,
        f"Time {again} again, more often and after a warm-up: the first samples of a shape are often slow, and a "
        "machine has slow moments.",
    )


def profile_not_monotone(pairs: Sequence[Pair]) -> Notice:
    """More rows contradict each other than may be left out: those that remain, each with the larger one."""
    count = f"{len(pairs)} steps are" if len(pairs) > 1 else "a step is"
    larger = "larger ones" if len(pairs) > 1 else "a larger one"
    return Notice(
        "profile-not-monotone",
        "warning",
        f"Non-monotone profile: {count} slower than {larger}, and too many rows are like this to leave them out: "
        f"{_beside(pairs)}.",
        "Measure again on an idle machine, with a warm-up and more samples of each step.",
    )


def _beside(pairs: Sequence[Pair], most: int = 3) -> str:
    """The first pairs in words."""
    told = [f"{row} ({row_ms:.4g} ms) against {other} ({other_ms:.4g} ms)"
            for (row, row_ms), (other, other_ms) in pairs[:most]]  # fmt: skip
    more = len(pairs) - most
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")


def profile_without_repeats() -> Notice:
    """Every row has one or two times: there is no spread to take a p99 from."""
    return Notice(
        "profile-no-repeats",
        "warning",
        "The profile has no repeated times, so there is no spread: the p99 of a step is taken to be its typical time.",
        "Give every row the list of its single times, or leave headroom below the SLO.",
    )


def few_repeats(count: int) -> Notice:
    """Fewer repeated times than a p99 needs."""
    return Notice(
        "few-repeats",
        "info",
        f"The spread of step times rests on {count} repeats; a 95 % bound on a p99 needs 299.",
        "Profile with more rounds if the interval is too wide.",
    )


def budget_extrapolated(tokens: int, measured_tokens: int) -> Notice:
    """The answer lies outside the token counts that were timed."""
    side = "above the largest" if tokens > measured_tokens else "below the smallest"
    return Notice(
        "budget-extrapolated",
        "warning",
        f"The budget of {tokens:,} tokens lies {side} step that was timed ({measured_tokens:,} tokens).",
        "Time steps of about this size before relying on it.",
    )


def load_extrapolated(what: str, asked: int, measured: int) -> Notice:
    """The question asks for more decodes, context or prefix than any row has."""
    return Notice(
        "load-extrapolated",
        "warning",
        f"The question's {what} of {asked:,} is beyond the profile's largest ({measured:,}).",
        f"Time steps with this {what} before relying on the budget.",
    )


def decode_cost_unknown() -> Notice:
    """The profile has no decodes in it."""
    return Notice(
        "decode-cost-unknown",
        "warning",
        "No row of the profile has decodes, so each decode is priced like a prompt token without its context.",
        "Add decode rows (decodes and context) to the profile; the budget is an upper bound until then.",
    )


def decodes_assumed(decodes: int, context: int) -> Notice:
    """Neither the profile nor the question says how many decodes run."""
    return Notice(
        "decodes-assumed",
        "warning",
        f"The profile has no decodes and none were asked for: {decodes:,} at {context:,} tokens are assumed.",
        "Give --max-num-seqs and --context, or add decode rows to the profile.",
    )


def hybrid_not_measured() -> Notice:
    """Decodes and chunks were timed, but never in one step."""
    return Notice(
        "hybrid-not-measured",
        "info",
        "No row of the profile has decodes and a chunk in one step: hybrid steps are composed from pure ones, with an "
        "interval widened by 5 %.",
        "Add hybrid rows (decodes, context and chunk) to the profile.",
    )


def seqs_beyond_decodes(max_num_seqs: int, decodes: int) -> Notice:
    """The engine may run more decodes than the budget was derived for."""
    return Notice(
        "seqs-beyond-decodes",
        "info",
        f"The budget holds for {decodes:,} running decodes; max_num_seqs allows {max_num_seqs:,}.",
        f"Set --max-num-seqs {decodes} to turn the assumption into a limit.",
    )


def run_interrupted() -> Notice:
    """A load run ended before its window did."""
    return Notice(
        "run-interrupted",
        "warning",
        "The run was interrupted before all of its requests were sent and followed to their end.",
        "Run it again to the end; what is shown covers only the part that ran.",
    )


def rate_not_delivered(sent: int, intended: int) -> Notice:
    """The client sent fewer requests than the rate asks for."""
    return Notice(
        "rate-not-delivered",
        "warning",
        f"Only {sent} of the {intended} requests that the rate asks for were sent.",
        "Lower the rate, or raise whatever held the requests back; this run does not speak for the rate it names.",
    )


def client_lag(lag_p99_ms: float, limit_ms: float) -> Notice:
    """The client itself was late, which would be billed to the engine."""
    return Notice(
        "client-lag",
        "warning",
        f"The load generator was late: p99 {lag_p99_ms:.2f} ms behind its schedule, {limit_ms:.2f} ms are allowed.",
        "Stop other work on this machine or give the load generator a core of its own, then run again.",
    )


def batch_not_met(seen: int, wanted: int) -> Notice:
    """No prompt was computed beside as many decodes as the answer is about."""
    cause = (
        "No prompt was computed beside running decodes"
        if seen == 0
        else f"The prompts met at most {seen} running decodes, and the run is to speak for {wanted}"
    )
    return Notice(
        "batch-not-met",
        "warning",
        f"{cause}: the tail looks better than it would be under load.",
        "Raise the rate or run for longer, so that prompts arrive while the batch is full.",
    )


def preempted(count: int) -> Notice:
    """Requests lost their KV pages and were computed again."""
    return Notice(
        "preempted",
        "warning",
        f"Requests were preempted {count} times because the KV cache was full.",
        "Give the KV cache more memory or lower --max-num-seqs; gaps caused by preemption don't depend on the budget.",
    )


def too_few_gaps(what: str, n: int, wanted: int) -> Notice:
    """Too few gaps for the percentile of the SLO."""
    return Notice(
        "too-few-gaps",
        "warning",
        f"The run has {n} {what}, and a bound on the SLO's percentile needs at least {wanted}.",
        "Run for longer or at a higher rate; the percentile shown is close to the largest gap seen.",
    )


def prefix_cache_hits(tokens: int) -> Notice:
    """Prompts were partly found in the prefix cache although they are meant to be unlike each other."""
    return Notice(
        "prefix-cache-hits",
        "warning",
        f"{tokens} prompt tokens came from the prefix cache although every prompt is new.",
        "Empty or switch off the prefix cache for the measurement; hits make the time to first token look too good.",
    )


def requests_failed(failed: int, intended: int, kinds: str) -> Notice:
    """Too many requests failed for the percentiles to speak for all."""
    return Notice(
        "requests-failed",
        "warning",
        f"{failed} of {intended} requests failed or were not sent ({kinds}); percentiles only cover the others.",
        "Find out why they failed before reading the percentiles; goodput counts them as missed.",
    )


def overloaded(delay_s: float, limit_s: float) -> Notice:
    """The queue grew faster than it was served."""
    return Notice(
        "overloaded",
        "warning",
        f"The rate is not sustainable: requests waited {delay_s:.1f} s in the median before their first step, "
        f"the limit is {limit_s:g} s.",
        "Lower the rate: latencies of an overloaded run depend on how long it lasted.",
    )


def short_verification(requests: float, wanted: int, seconds: float) -> Notice:
    """The capacity is so low that a run of acceptable length holds few requests."""
    return Notice(
        "short-verification",
        "warning",
        f"At this capacity a run of {seconds:.0f} s holds about {requests:.0f} requests, fewer than {wanted}.",
        "Allow more time for verification, or use a workload with shorter requests; expect wide intervals.",
    )


def machine_drifted(budget_tokens: int, decode: float, chunk: float) -> Notice:
    """The machine was slower or faster while verifying than while it was profiled."""
    return Notice(
        "machine-drifted",
        "warning",
        f"Around the run at {budget_tokens:,} tokens the profiled steps took {decode:.0%} (decode) and {chunk:.0%} "
        "(with a chunk) of their profiled time; the run's prediction is scaled by that.",
        "Expect the real tail to wander by as much; fix the clocks, keep neighbours off the machine, or leave a margin "
        "in the SLO.",
    )


def client_starved(lag_p99_ms: float, limit_ms: float) -> Notice:
    """The client's event loop woke up late: its stamps are late by as much."""
    return Notice(
        "client-starved",
        "warning",
        f"The load generator's event loop woke up p99 {lag_p99_ms:.2f} ms late, {limit_ms:.2f} ms are allowed: gaps "
        "of this run are partly the client's own.",
        "Use more worker processes (--workers), or run the client on another machine than the server.",
    )


def events_coalesced(share: float) -> Notice:
    """Several events came in one read of the socket and share a stamp."""
    return Notice(
        "events-coalesced",
        "info",
        f"{share:.1%} of the gaps read 0 because two events came in one read of the socket.",
        "Look at the gaps per token as well; the server, a proxy or the network bundles events.",
    )


def heap_collected(count: int, longest_ms: float) -> Notice:
    """Python's garbage collector ran within the window."""
    return Notice(
        "heap-collected",
        "warning",
        f"The client's garbage collector stopped it {count} times, for up to {longest_ms:.1f} ms.",
        "Run again: gaps as long as that may be the client's.",
    )


def prompt_length_differs(share: float) -> Notice:
    """The server counted other prompt lengths than were asked for."""
    return Notice(
        "prompt-length-differs",
        "warning",
        f"Prompts had {abs(share):.1%} {'more' if share > 0 else 'fewer'} tokens than the workload asks for.",
        "Use an endpoint that takes token ids (--endpoint completions), or read the lengths that the server counted.",
    )


def output_length_unknown() -> Notice:
    """The server doesn't say how many tokens it answered with."""
    return Notice(
        "output-length-unknown",
        "warning",
        "The server doesn't count the tokens of its answers: short answers can't be told, and TPOT is unknown.",
        "Have it answer stream_options.include_usage, as vLLM, SGLang and TensorRT-LLM do.",
    )


def answers_outlast_the_run(filling_s: float, answer_s: float) -> Notice:
    """In a closed loop no request went out behind those that filled it."""
    return Notice(
        "answers-outlast-the-run",
        "warning",
        f"No answer ended within {filling_s:.3g} s, so that no request followed another: those that filled the loop "
        "are what is counted, and they all came at once.",
        f"Run for at least {math.ceil(answer_s)} s (--seconds), or with shorter answers.",
    )


def close_call(probability: float) -> Notice:
    """The run is near the line between met and missed."""
    return Notice(
        "close-call",
        "warning",
        f"A repetition of this run would meet the objective with a probability of about {probability:.0%}.",
        "Run for longer (--seconds), or treat the objective as just within reach.",
    )


def trace_rows_dropped(count: int, total: int) -> Notice:
    """A trace has requests without a prompt or without an answer."""
    return Notice(
        "trace-rows-dropped",
        "info",
        f"{count:,} of {total:,} requests of the trace had no prompt tokens or no answer tokens and were left out.",
        "Nothing needs to be done: these are requests that failed, or conversations without an answer.",
    )


def trace_rows_skipped(count: int, total: int, max_model_len: int) -> Notice:
    """A trace has requests that the model's context can't hold."""
    return Notice(
        "trace-rows-skipped",
        "warning",
        f"{count:,} of {total:,} requests of the trace are longer than the model's context of {max_model_len:,} tokens "
        "and were skipped.",
        "Use a model with a longer context; the longest requests, and their load, are missing here.",
    )


def trace_sorted(file_name: str) -> Notice:
    """The requests of a trace weren't in order."""
    return Notice(
        "trace-sorted",
        "info",
        f"The requests of {file_name} were not in the order of their times and were sorted.",
        "Nothing needs to be done; sort the file if its order should mean something.",
    )


def trace_cut(file_name: str, count: int) -> Notice:
    """A trace is longer than what is read."""
    return Notice(
        "trace-cut",
        "info",
        f"Only the first {count:,} requests of {file_name} were read.",
        "Choose another part of it with the trace's start, or fewer requests with its max_requests.",
    )


def trace_lengths_estimated(file_name: str) -> Notice:
    """A trace holds texts, and there was no tokenizer to count their tokens."""
    return Notice(
        "trace-lengths-estimated",
        "warning",
        f"The lengths of {file_name} were estimated from its letters, because it holds texts.",
        "Name the model's tokenizer in the workload file, trace: {file: ..., tokenizer: DIR}, for the model's own "
        "lengths.",
    )


def server_has_others(at_start: int, share: float | None) -> Notice:
    """A live server worked for others while it was measured."""
    parts = [f"{at_start} requests were under way before it began"] if at_start else []
    parts += [f"{share:.0%} of the prompt tokens were not ours"] if share else []
    return Notice(
        "server-has-others",
        "warning",
        f"The server works for others while it is measured: {' and '.join(parts)}.",
        "Measure when it is idle, or a copy of it on the same hardware: others' prompts look like larger steps.",
    )


def others_answered(others: int, answers: int) -> Notice:
    """A live server answered others while it was under load."""
    return Notice(
        "server-has-others",
        "warning",
        f"{others:,} of the {answers:,} answers that the server began during this run were not ours.",
        "Verify when it is idle, or take their load into account: what they sent is in these times.",
    )


def server_preempted(count: int) -> Notice:
    """A live server ran out of KV cache while it was measured."""
    return Notice(
        "server-preempted",
        "warning",
        f"The server preempted requests {count} times while it was measured: its KV cache is too small for this load.",
        "Send it less at once (fewer decodes, shorter contexts), or give the server more KV cache.",
    )


def steps_above_budget(budget: int, count: int, edge: int) -> Notice:
    """The server's own histogram of step sizes speaks against the inferred budget."""
    return Notice(
        "evidence-disagrees",
        "warning",
        f"The server counted {count} steps of more than {edge:,} tokens that no prompt of ours explains, and the "
        f"budget seen from outside is {budget:,}.",
        "Measure again without other traffic; if it stays, the server computes parts of a prompt outside its budget.",
    )


def budget_only_bounded(budget: int, largest: int) -> Notice:
    """No prompt filled a step of the live server."""
    return Notice(
        "budget-only-bounded",
        "info",
        f"Even {largest:,} prompt tokens were computed in one step: the running budget is at least {budget:,} tokens, "
        "or chunked prefill is off.",
        "Nothing needs to be done: the advice rests on the time of steps, not on the running budget.",
    )


def server_runs_fewer(seen: int, asked: int) -> Notice:
    """The live server decodes fewer requests at once than asked about."""
    return Notice(
        "server-runs-fewer",
        "warning",
        f"Of {asked} requests the server decodes {seen} at once; the others wait.",
        f"The advice is for {seen} decodes. Raise the server's --max-num-seqs or its KV cache to run more.",
    )


def steps_miscounted(share: float) -> Notice:
    """Prompts took fewer steps than any one budget would make of them."""
    return Notice(
        "steps-miscounted",
        "warning",
        f"{share:.0%} of the prompts took another number of steps than the inferred budget makes of them.",
        "Measure again without other traffic; a limit on the chunk of a single prompt, or steps that overlap, also "
        "look like this.",
    )


def context_shortened(asked: int, measured: int, reason: str) -> Notice:
    """The decodes of the measurement have shorter contexts than asked about."""
    return Notice(
        "context-shortened",
        "info",
        f"Decodes were measured at about {measured:,} tokens of context, not {asked:,}, because {reason}.",
        "The step model extends to the asked context; a larger --time-limit or KV cache allows to measure it.",
    )


def client_late(lag_p99_ms: float, step_ms: float) -> Notice:
    """The client that measures a live server's steps reads late."""
    return Notice(
        "client-late",
        "warning",
        f"The client read p99 {lag_p99_ms:.2f} ms late beside decode steps of {step_ms:.1f} ms: step times scatter by "
        "as much.",
        "Run it on another machine than the server, or leave the server one core fewer.",
    )


def gaps_differ(own_ms: float, seen_ms: float) -> Notice:
    """The server's histogram of gaps and the stamps at our socket disagree."""
    return Notice(
        "gaps-differ",
        "warning",
        f"The server's own clock says {own_ms:.1f} ms between tokens in the mean, and from outside it was "
        f"{seen_ms:.1f} ms.",
        "Measure nearer to the server: a proxy that gathers events, or a network, lies in between.",
    )


def margin_is_wider(budget: int, asked: int, decodes: int, step_ms: float, largest: int) -> Notice:
    """A steady load leaves the objective more room than the worst step does."""
    return Notice(
        "margin-is-wider",
        "info",
        f"The budget holds for {asked} decodes beside a full chunk. Kept busy by this workload alone, a server with "
        f"{budget:,} has about {decodes} decodes beside prompts, in steps of {step_ms:.0f} ms at most (p99): a steady "
        f"load would meet the objective up to a budget of about {largest:,}.",
        f"Keep {budget:,} if {asked} may decode when prompts come (bursts, long answers); else try up to {largest:,} "
        "and verify it under your load.",
    )
