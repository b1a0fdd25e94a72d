"""A heap that holds still: a collection in the middle of a run would look like a stall of the server."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class HeapPauses:
    """Collections that happened all the same (somebody may call `gc.collect`): seconds of each."""

    pauses_s: list[float] = field(default_factory=list)
    _started_s: float = 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:  # noqa: ARG002
        """What `gc.callbacks` calls."""
        if phase == "start":
            self._started_s = time.perf_counter()
        else:
            self.pauses_s.append(time.perf_counter() - self._started_s)


@contextmanager
def frozen_heap() -> Iterator[HeapPauses]:
    """No garbage collection inside; everything restored afterwards. Yields the pauses that were seen."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    pauses = HeapPauses()
    gc.collect()
    if not was_frozen:
        gc.freeze()
    gc.disable()
    gc.callbacks.append(pauses)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(pauses)
        if was_enabled:
            gc.enable()
        if not was_frozen:
            gc.unfreeze()
