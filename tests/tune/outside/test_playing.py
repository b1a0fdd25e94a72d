"""The order of the scenes, in front of a virtual server."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from sarathi_tune.config.outside import OutsideConfig
from sarathi_tune.config.slo import Slo
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.report.progress import SilentPhase
from sarathi_tune.tune.outside.plan import Limits, settle
from sarathi_tune.tune.outside.playing import Play
from sarathi_tune.tune.outside.seen import Alone, Scene
from sarathi_tune.tune.outside.session import Observer
from tests.profiles import cpu_like
from tests.tune.outside.virtual import VirtualServer


@dataclass
class VirtualObserver:
    """Plays scenes without a socket, in no time."""

    server: VirtualServer
    limits: Limits
    is_late: bool = False
    most_decodes: int | None = None
    alone: list[Alone] = field(default_factory=list)
    scenes: list[Scene] = field(default_factory=list)

    async def warm_up(self) -> None:
        pass

    async def time_alone(self, tokens: int, *, keep: bool = True) -> float:
        ttft_ms = cpu_like(Shape(chunk=tokens))
        if keep:
            self.alone.append(Alone(tokens, ttft_ms))
        return ttft_ms

    async def play(
        self,
        name: str,
        decodes: int,
        context: int,
        *,
        tokens: int,  # noqa: ARG002
        num_plain: int,  # noqa: ARG002
        injections: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.scenes.append(replace(self.server.play(decodes, injections, context=context), name=name))


def played(seconds: float, started_s_ago: float = 0.0) -> tuple[list[str], VirtualObserver, Play]:
    config = OutsideConfig("http://127.0.0.1:8000", Slo(60.0), workload="fixed:512:64", max_num_seqs=12)
    observer = VirtualObserver(VirtualServer(256), Limits(8192, None, seconds))
    play = Play(config, cast(Observer, observer), settle(config, 8192), SilentPhase())
    play.started_s -= started_s_ago
    asyncio.run(play.run())
    return [scene.name for scene in observer.scenes if scene.name != "refine"], observer, play


def test_with_time_left_everything_is_played_twice() -> None:
    order, observer, play = played(1000.0)
    assert order == ["few", "full", "one", "short", "half"] * 2
    first, second = [scene for scene in observer.scenes if scene.name == "few"]
    lengths = [sorted(prompt.tokens for prompts in scene.injections for prompt in prompts) for scene in (first, second)]
    assert lengths[0] == lengths[1]
    assert play.notices == []


def test_a_long_first_time_is_the_only_one() -> None:
    order, _, _ = played(1000.0, started_s_ago=500.0)
    assert order == ["few", "full", "one", "short", "half"]


def test_a_shortened_context_is_told_once() -> None:
    config = OutsideConfig("http://127.0.0.1:8000", Slo(60.0), workload="fixed:4000:64", max_num_seqs=8)
    observer = VirtualObserver(VirtualServer(256), Limits(8192, 12_000, 1000.0))
    play = Play(config, cast(Observer, observer), settle(config, 8192), SilentPhase())
    asyncio.run(play.run())
    assert [scene.name for scene in observer.scenes].count("full") == 2
    assert [notice.code for notice in play.notices] == ["context-shortened"]
