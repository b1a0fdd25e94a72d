"""Decode-prioritising scheduling, as in FasterTransformer: request-level batches that run until their last one ends.

Smooth token gaps, and the worst TTFT: a new request waits for the whole batch (Sarathi-Serve, OSDI 2024, section 2.5).
"""

from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.engine.schedulers.base import Scheduler


class DecodeFirstScheduler(Scheduler):
    """Decodes while any are running; a new batch of whole prompts only when none is."""

    def plan(self) -> StepPlan:
        self.make_room_for_decodes()
        decodes, _ = self.split_running()
        if decodes:
            return StepPlan(tuple(self.decode_slice(request) for request in decodes))
        return StepPlan(tuple(self.admit_whole_prompts(self.config.token_budget)))
