"""A follower in which something goes wrong, for `test_parallel_failures`: `python faulty_follower.py FAULT`.

Only rank 1 is at fault; the steps of the warm-up go well, the third one doesn't.
"""

import dataclasses
import os
import sys
import time
from typing import Any

import torch

from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.runtime import runner as runner_module
from sarathi_tune.runtime.parallel import follower, worker
from sarathi_tune.runtime.parallel.place import Place, end_with_parent
from sarathi_tune.runtime.parallel.wire import decode_plan

GOOD_STEPS = 2


def _raise() -> None:
    raise ValueError("the weights are upside down")


def _run_out_of_memory() -> None:
    torch.empty(1 << 46)  # 256 TiB: the allocator itself says no


def _exit_silently() -> None:
    print("a library gave up", file=sys.stderr, flush=True)
    os._exit(3)


def _at_step(fault: Any) -> None:
    real, steps = worker.Worker._compute, []

    def compute(*args: Any) -> Any:
        steps.append(1)
        if len(steps) > GOOD_STEPS:
            fault()
        return real(*args)

    worker.Worker._compute = compute  # type: ignore[method-assign]


def _other_plan() -> None:
    def decode(words: Any) -> StepPlan:
        plan = decode_plan(words)
        first = plan.slices[0]
        if first.request.request_id:  # not in the warm-up
            first.request.pages = [page + 1 for page in first.request.pages]
        return dataclasses.replace(plan, slices=(first, *plan.slices[1:]))

    follower.decode_plan = decode


def _no_memory_for_weights() -> None:
    runner_module.available_bytes = lambda _: 1000


FAULTS = {
    "raise": lambda: _at_step(_raise),
    "out-of-memory": lambda: _at_step(_run_out_of_memory),
    "exit": lambda: _at_step(_exit_silently),
    "slow": lambda: _at_step(lambda: time.sleep(60)),
    "other-plan": _other_plan,
    "no-memory-for-weights": _no_memory_for_weights,
    "no-start": lambda: sys.exit("no such library"),
}

if __name__ == "__main__":
    place = Place.from_environment()
    assert place is not None
    assert place.parent is not None
    end_with_parent(place.parent)
    if place.rank == 1:
        FAULTS[sys.argv[1]]()
    os._exit(follower.follow(place))
