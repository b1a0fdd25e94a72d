"""What a run would do: printed by `--dry-run`, which touches nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from sarathi_tune.report.console import print_facts
from sarathi_tune.units import format_bytes


@dataclass(frozen=True, slots=True)
class PlannedPhase:
    """One part of the run: how many units of what, and an estimate of the seconds (None: not known before it runs)."""

    name: str
    what: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of a run. `settings` are the values that will be used, those that were derived included; `shapes` are
    the steps to be timed, in the notation `8x1024+504@0`; `writes` are the files that would be written."""

    phases: tuple[PlannedPhase, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[str, ...] = ()
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    free_bytes: int | None = None
    writes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """What the phases with an estimate take together."""
        return sum(phase.seconds or 0.0 for phase in self.phases)


def print_plan(plan: RunPlan, console: Console) -> None:
    """Print the plan: settings, phases with their time, memory, shapes, files."""
    console.print(Text("Dry run: nothing is measured and nothing is written.", style="bold"))
    print_facts("Settings", [(name, str(value)) for name, value in plan.settings.items()], console)
    phases = [(phase.name, f"{phase.what}{_estimate(phase.seconds)}") for phase in plan.phases]
    print_facts("Phases", [*phases, ("in all", f"about {plan.seconds:.0f} s")], console)
    print_facts("Memory", _memory(plan), console)
    if plan.shapes:
        print_facts("Shapes", [(f"{len(plan.shapes)}", "  ".join(plan.shapes))], console)
    print_facts("Would write", [("", path) for path in plan.writes], console)


def _estimate(seconds: float | None) -> str:
    return "" if seconds is None else f", about {seconds:.0f} s"


def _memory(plan: RunPlan) -> list[tuple[str, str]]:
    rows = [("weights", plan.weight_bytes), ("KV cache", plan.kv_bytes), ("free now", plan.free_bytes)]
    return [(name, format_bytes(count)) for name, count in rows if count is not None]
