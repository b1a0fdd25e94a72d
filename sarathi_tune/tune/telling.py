"""How far long work is, told to a progress phase."""

from collections.abc import Callable

from sarathi_tune.loadgen.inprocess import LoadProgress
from sarathi_tune.measure.rounds import Progress
from sarathi_tune.report.progress import Phase


def tell_shapes(phase: Phase) -> Callable[[Progress], None]:
    """For `measure_all`: each timed step is one."""

    def tell(progress: Progress) -> None:
        phase.describe(str(progress.shape))
        phase.expect(progress.total)
        phase.advance()

    return tell


def tell_requests(phase: Phase, who: str = "") -> Callable[[LoadProgress], None]:
    """For `run_load`: each finished request is one. `who` serves them, where that changes within the phase."""
    told = 0

    def tell(progress: LoadProgress) -> None:
        nonlocal told
        counts = f"{progress.num_running} running, {progress.num_waiting} waiting"
        phase.describe(f"{who}: {counts}" if who else counts)
        phase.advance(progress.num_finished - told)
        told = progress.num_finished

    return tell
