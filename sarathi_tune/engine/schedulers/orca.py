"""Iteration-level batching without chunking, as in Orca: whole prompts join the running decodes in one step.

Decodes are never paused, but their step is as long as the prompts in it (Sarathi-Serve, OSDI 2024, section 3.2).
"""

from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.engine.schedulers.base import Scheduler


class OrcaScheduler(Scheduler):
    """All decodes, and whole prompts of new requests beside them."""

    def plan(self) -> StepPlan:
        self.make_room_for_decodes()
        decodes, _ = self.split_running()
        slices = [self.decode_slice(request) for request in decodes]
        slices += self.admit_whole_prompts(self.config.token_budget - len(slices))
        return StepPlan(tuple(slices))
