"""The simple variant of chunked prefill: a fixed chunk size, at most one chunk a step, all decodes ride along.

Here `token_budget` is the chunk size; the step has that many prompt tokens and the decodes on top.
"""

from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.engine.schedulers.base import Scheduler


class SarathiSingleScheduler(Scheduler):
    """Every decode, and one chunk of the oldest prompt that isn't done."""

    def plan(self) -> StepPlan:
        self.make_room_for_decodes()
        decodes, prefills = self.split_running()
        slices = [self.decode_slice(request) for request in decodes]
        if prefills:
            slices.append(self.chunk_slice(prefills[0], self.config.token_budget))
        elif self.queue.waiting and self.queue.can_admit(self.queue.waiting[0]):
            slices.append(self.chunk_slice(self.queue.admit(), self.config.token_budget))
        return StepPlan(tuple(slices))
