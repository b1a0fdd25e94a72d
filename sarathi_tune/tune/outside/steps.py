"""From stamps to steps: with continuous batching every running answer gets its token at the end of the same step.

The stamps of all streams, in order of time, fall into groups in which each stream appears once; the end of a step is
where a group lies. A step's time is how long its streams waited for it, in the median over streams, so that one that is
read late doesn't count.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sarathi_tune.stats import median
from sarathi_tune.tune.outside.seen import Prompt, Scene, SteadyStream

#: Where nothing comes for this share of a usual gap, a step has ended.
_PAUSE_SHARE = 0.3
#: Decode steps before an injection that say what a decode step takes just then.
_BEFORE = 12


@dataclass(frozen=True, slots=True)
class Step:
    """A step as the streams saw it: its end, its time, how many decodes it had, and their mean keys."""

    end_s: float
    duration_ms: float
    decodes: int
    context: float


@dataclass(frozen=True, slots=True)
class Injection:
    """The steps from the one under way when prompts were sent to the one that answered the last of them. `answered_at`
    is the index of the step that answered each prompt; `plain_ms` a decode step of just then; `prompts` are token
    counts in the order of sending."""

    scene: str
    prompts: tuple[int, ...]
    answered_at: tuple[int, ...]
    steps: tuple[Step, ...]
    plain_ms: float

    @property
    def num_tokens(self) -> int:
        """Prompt tokens in all."""
        return sum(self.prompts)

    @property
    def decodes(self) -> int:
        """Decodes beside the prompts."""
        return max(step.decodes for step in self.steps)


@dataclass(frozen=True, slots=True)
class Timeline:
    """A scene as steps. `plain` are those beside which no prompt was under way."""

    name: str
    plain: tuple[Step, ...]
    injections: tuple[Injection, ...]


def timeline(scene: Scene) -> Timeline:
    """A scene's steps, sorted into plain ones and those of each injection. An injection that no steps lie beside,
    because the streams had ended, is left out."""
    steps = find_steps(scene.streams)
    ends = [step.end_s for step in steps]
    spans = [(prompts, span) for prompts in scene.injections if (span := _span(ends, prompts)) is not None]
    # the step behind an injection may still carry what the client was late with
    busy = {index for _, (first, last) in spans for index in range(first, last + 2)}
    calm = [index for index in range(len(steps)) if index not in busy]
    injections = []
    for prompts, (first, last) in spans:
        near = calm[max(0, bisect_left(calm, first) - _BEFORE) : bisect_left(calm, first)] or calm[:_BEFORE]
        if not near:
            continue
        injections.append(
            Injection(
                scene=scene.name,
                prompts=tuple(prompt.computed_tokens for prompt in prompts),
                answered_at=tuple(_nearest(ends, prompt.first_s) - first for prompt in prompts),
                steps=tuple(steps[first : last + 1]),
                plain_ms=median([steps[index].duration_ms for index in near]),
            )
        )
    return Timeline(scene.name, tuple(steps[index] for index in calm), tuple(injections))


def find_steps(streams: Sequence[SteadyStream]) -> list[Step]:
    """The steps in which every stream ran, from when the last one had begun until the first one ended; the first of
    them, whose beginning nobody saw, is left out."""
    streams = [stream for stream in streams if len(stream.token_s) > 1]
    if not streams:
        return []
    keys = [_Keys(stream) for stream in streams]
    steps = []
    for before, after in pairwise(_groups(streams)):
        gaps = [after[index] - before[index] for index in after if index in before]
        end_s = median(list(after.values()))
        duration_s = median(gaps) if gaps else end_s - median(list(before.values()))
        context = sum(keys[index].at(stamp) for index, stamp in after.items()) / len(after)
        steps.append(Step(end_s, duration_s * 1e3, len(streams), context))
    return steps


def _groups(streams: Sequence[SteadyStream]) -> list[dict[int, float]]:
    """Stamps by stream, for each step. A group ends where a stream appears again, and where nothing comes for a while;
    those with less than half of the streams are stragglers of their neighbours, or the halves at both ends."""
    pause_s = _PAUSE_SHARE * median([late - early for stream in streams for early, late in pairwise(stream.token_s)])
    start_s = max(stream.token_s[0] for stream in streams) - pause_s
    stop_s = min(stream.token_s[-1] for stream in streams) + pause_s
    events = sorted(
        (stamp, index) for index, stream in enumerate(streams) for stamp in stream.token_s if start_s <= stamp <= stop_s
    )
    groups: list[dict[int, float]] = [{}]
    last_s = start_s
    for stamp, index in events:
        if index in groups[-1] or stamp - last_s > pause_s:
            groups.append({})
        groups[-1][index] = stamp
        last_s = stamp
    return [group for group in groups if len(group) > len(streams) // 2]


class _Keys:
    """How many keys a stream's decode saw in the step that ended at a stamp."""

    def __init__(self, stream: SteadyStream) -> None:
        self._stamps = stream.token_s
        self._total = [stream.prompt_tokens]
        for tokens in stream.event_tokens or (1,) * len(stream.token_s):
            self._total.append(self._total[-1] + tokens)

    def at(self, stamp: float) -> int:
        """The token of this stamp was computed from all before it."""
        return self._total[bisect_right(self._stamps, stamp) - 1]


def _span(ends: Sequence[float], prompts: Sequence[Prompt]) -> tuple[int, int] | None:
    """The steps from the one that ran at the sending to the one that answered last."""
    first = bisect_right(ends, min(prompt.sent_s for prompt in prompts))
    answered_s = max(prompt.first_s for prompt in prompts)
    if not ends or first == 0 or answered_s > ends[-1]:
        return None
    return (first, last) if (last := _nearest(ends, answered_s)) >= first else None


def _nearest(ends: Sequence[float], stamp: float) -> int:
    """The step whose end is nearest to a stamp."""
    after = min(bisect_left(ends, stamp), len(ends) - 1)
    before = max(0, after - 1)
    return before if stamp - ends[before] < ends[after] - stamp else after
