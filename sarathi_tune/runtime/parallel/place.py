"""Which process of a parallel run this is: read from the variables that torchrun sets. Imports no torch."""

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

#: Set by our own launcher only: the process that started this one.
PARENT_VARIABLE = "SARATHI_TUNE_PARENT"
_PARENT_PERIOD_S = 0.25
#: What a process ends with when the one that it works for is gone.
PARENT_GONE = 6


@dataclass(frozen=True, slots=True)
class Place:
    """One process of `num_ranks`, of which `num_local` run on this machine; the store is at `host`:`port`.

    `store_exists`: torchrun's agent runs the store, not rank 0. `attempt`: how often torchrun has restarted the ranks.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int
    host: str
    port: int
    store_exists: bool = False
    attempt: int = 0
    parent: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Place | None":
        """The place that a launcher gave to this process; None when it was started alone."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            return None
        rank, num_ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        if num_ranks < 2:
            return None
        parent = environment.get(PARENT_VARIABLE)
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            local_rank=int(environment.get("LOCAL_RANK", rank)),
            num_local=int(environment.get("LOCAL_WORLD_SIZE", num_ranks)),
            host=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            store_exists=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
            parent=int(parent) if parent else None,
        )

    def as_environment(self) -> dict[str, str]:
        """The variables from which `from_environment` reads this place."""
        variables = {
            "RANK": self.rank,
            "WORLD_SIZE": self.num_ranks,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.num_local,
            "MASTER_ADDR": self.host,
            "MASTER_PORT": self.port,
        }
        if self.parent is not None:
            variables[PARENT_VARIABLE] = self.parent
        return {name: str(value) for name, value in variables.items()}

    @property
    def is_single_machine(self) -> bool:
        """Whether all ranks run here."""
        return self.num_local == self.num_ranks


def end_with_parent(parent: int) -> None:
    """End this process as soon as `parent` isn't its parent any more, whatever its other threads are doing."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_PERIOD_S)
        os._exit(PARENT_GONE)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def threads_per_rank(threads: int, num_local: int) -> int:
    """Compute threads of each of `num_local` ranks on a machine that may use `threads`."""
    return max(1, threads // num_local)
