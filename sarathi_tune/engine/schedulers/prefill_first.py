"""Prefill-prioritising scheduling, as in vLLM before chunked prefill: whole prompts, and decodes wait meanwhile.

The best TTFT, and token gaps as long as the longest prompt (Sarathi-Serve, OSDI 2024, section 3.2).
"""

from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.engine.schedulers.base import Scheduler


class PrefillFirstScheduler(Scheduler):
    """A step of whole waiting prompts if one can be admitted, else a step of all decodes."""

    def plan(self) -> StepPlan:
        prompts = self.admit_whole_prompts(self.config.token_budget)
        if prompts:
            return StepPlan(tuple(prompts))
        self.make_room_for_decodes()
        decodes, _ = self.split_running()
        return StepPlan(tuple(self.decode_slice(request) for request in decodes))
