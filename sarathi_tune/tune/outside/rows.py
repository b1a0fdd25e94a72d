"""What was seen, as rows of a profile: decode steps, prompts on an idle server, and the hybrid steps that the running
budget made of prompts beside decodes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sarathi_tune.measure.profile import Sample
from sarathi_tune.measure.samples import noise_between_halves
from sarathi_tune.measure.shapes import Shape, rounded_context
from sarathi_tune.stats import median
from sarathi_tune.tune.outside.running import RunningBudget, chunks_of
from sarathi_tune.tune.outside.seen import Alone
from sarathi_tune.tune.outside.steps import Injection, Step, Timeline

#: The scene with the batch that the advice is about.
FULL = "full"
#: A prompt of this length shows what a request costs beside its step, which computes as much as a decode of one.
TINY_TOKENS = 1
#: The rest of a prompt is a row when the interval of the budget leaves its length this certain.
_CERTAIN = 0.1
#: Full chunks of one prompt that become rows; those of a very long prompt say the same many times.
_MOST_CHUNKS = 12
#: Fewer steps have no median.
_FEWEST = 5


def profile_rows(
    timelines: Sequence[Timeline], alone: Sequence[Alone], running: RunningBudget | None
) -> tuple[Sample, ...]:
    """One row per shape, decode steps first.

    The scatter of steps enters the advice relative to their time, so it must be that of the steps that the advice is
    about: the full batch's rows have all of their times. Other scenes have few and short decodes, whose context hardly
    matters: it is the same in all of their rows, and each row has its median only. A short step scatters by the
    client's milliseconds, which are nothing to a step of many.
    """
    contexts = _usual_contexts(timelines)
    full: dict[Shape, list[float]] = {}
    others: dict[Shape, list[float]] = {}
    for line in timelines:
        for step in line.plain:
            if line.name == FULL:
                full.setdefault(Shape(step.decodes, rounded_context(step.context)), []).append(step.duration_ms)
            else:
                others.setdefault(Shape(step.decodes, contexts[step.decodes]), []).append(step.duration_ms)
        for item in line.injections:
            for shape, step in hybrid_steps(item, running):
                if line.name == FULL:
                    full.setdefault(shape, []).append(step.duration_ms)
                else:
                    usual = replace(shape, context=contexts[item.decodes])
                    others.setdefault(usual, []).append(step.duration_ms)
    for shape, time_ms in _prefills(timelines, alone, running):
        others.setdefault(shape, []).append(time_ms)
    rows = full | {shape: [median(values)] for shape, values in others.items() if shape not in full}
    ordered = sorted(rows, key=lambda shape: (shape.chunk > 0, shape.decodes == 0))
    return tuple(Sample(shape, tuple(rows[shape])) for shape in ordered if min(rows[shape]) > 0)


def _usual_contexts(timelines: Sequence[Timeline]) -> dict[int, int]:
    """The median context of each number of decodes, over all scenes but the full one."""
    seen: dict[int, list[float]] = {}
    for line in timelines:
        if line.name != FULL:
            for step in (*line.plain, *(step for item in line.injections for step in item.steps)):
                seen.setdefault(step.decodes, []).append(step.context)
    return {decodes: rounded_context(median(contexts)) for decodes, contexts in seen.items()}


def hybrid_steps(item: Injection, running: RunningBudget | None) -> Iterator[tuple[Shape, Step]]:
    """The steps of an injection whose content is certain. Only single prompts: a row has one chunk."""
    if running is None or len(item.prompts) != 1 or running.budget <= item.decodes:
        return
    width = running.budget - item.decodes
    cut = chunks_of(item.prompts, width)
    if len(cut) > len(item.steps):
        return
    low, high = running.interval
    doubt = (len(cut) - 1) * ((running.budget if high is None else high) - low)
    steps = item.steps[len(item.steps) - len(cut) :]
    for index, (((prefix, count),), step) in enumerate(zip(cut, steps, strict=True)):
        is_rest = index == len(cut) - 1
        if (is_rest and doubt > _CERTAIN * count) or (not is_rest and index >= _MOST_CHUNKS):
            continue
        yield Shape(item.decodes, rounded_context(step.context), count, prefix), step


def request_overhead_ms(timelines: Sequence[Timeline], alone: Sequence[Alone]) -> float | None:
    """What a request takes besides its step until its first token is here: a tiny prompt on an idle server against a
    decode step of one stream, which computes about as much. None where either is missing."""
    tiny = [item.ttft_ms for item in alone if item.tokens <= TINY_TOKENS]
    single = [step.duration_ms for line in timelines for step in line.plain if step.decodes == 1]
    return max(0.0, median(tiny) - median(single)) if tiny and single else None


def repeat_noise(line: Timeline) -> float | None:
    """How far the decode steps of a scene differ between two halves of it; None with too few of them."""
    return noise_between_halves([step.duration_ms for step in line.plain])


def drift(lines: Sequence[Timeline]) -> float | None:
    """How far the same decode steps differ between the first and the last of several scenes, in the median over them;
    None where they have none in common."""
    if len(lines) < 2:
        return None
    first, last = _plain_medians(lines[0]), _plain_medians(lines[-1])
    shares = [abs(last[shape] / first[shape] - 1.0) for shape in first if shape in last]
    return median(shares) if shares else None


def _plain_medians(line: Timeline) -> dict[Shape, float]:
    times: dict[Shape, list[float]] = {}
    for step in line.plain:
        times.setdefault(Shape(step.decodes, rounded_context(step.context)), []).append(step.duration_ms)
    return {shape: median(values) for shape, values in times.items() if len(values) >= _FEWEST}


def _prefills(
    timelines: Sequence[Timeline], alone: Sequence[Alone], running: RunningBudget | None
) -> Iterator[tuple[Shape, float]]:
    """Prompts on an idle server that fit into one step, less what a request costs besides."""
    overhead_ms = request_overhead_ms(timelines, alone)
    if overhead_ms is None or running is None:
        return
    for item in alone:
        if TINY_TOKENS < item.tokens <= running.interval[0]:
            yield Shape(chunk=item.tokens), item.ttft_ms - overhead_ms
