"""Stall-free scheduling (Sarathi-Serve, OSDI 2024, section 4.2; vLLM V1 under the same budget).

One token budget per step. Running decodes first, one token each; then the prompts in progress, in the order they were
admitted; then new requests. A chunk takes what is left of the budget, so that a prefill never delays a decode by more
than one budgeted step.
"""

from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.engine.schedulers.base import Scheduler


class SarathiScheduler(Scheduler):
    """Decodes, then prefills in progress, then new requests, within `token_budget` tokens."""

    def plan(self) -> StepPlan:
        self.make_room_for_decodes()
        decodes, prefills = self.split_running()
        slices = [self.decode_slice(request) for request in decodes]
        left = self.config.token_budget - len(slices)
        # a prompt is only ever finished with tokens to spare, so there are never more decodes than tokens
        assert left >= 0, "more running decodes than the budget has tokens"
        for request in prefills:
            if left == 0:
                break
            slices.append(self.chunk_slice(request, left))
            left -= slices[-1].count
        self._admit_new(slices, left)
        return StepPlan(tuple(slices))

    def _admit_new(self, slices: list[Slice], left_tokens: int) -> None:
        queue = self.queue
        while left_tokens > 0 and queue.waiting and queue.can_admit(queue.waiting[0]):
            slices.append(self.chunk_slice(queue.admit(), left_tokens))
            left_tokens -= slices[-1].count
