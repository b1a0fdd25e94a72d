"""The store where ranks meet: who has joined, what is to be run, signs of life, and why a run ended.

It is a TCPStore on rank 0 (or of torchrun's agent). Keys: `joined/RANK`, `beat/RANK`, `start`, `failure`, `ended`.
"""

from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from sarathi_tune.runtime.parallel.failure import Failure
from sarathi_tune.runtime.parallel.place import Place

_CONNECT_TIMEOUT = timedelta(seconds=60)
_START, _FAILURE, _ENDED = "start", "failure", "ended"


class Board:
    """One connection to the store. Calls raise RuntimeError when the store is gone."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._beats = 0

    @classmethod
    def open(cls, place: Place) -> "Board":
        """Connect; on rank 0 of a run whose launcher has no store, make it."""
        is_master = place.rank == 0 and not place.store_exists
        store = TCPStore(place.host, place.port, is_master=is_master, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)
        return cls(PrefixStore(f"sarathi-tune/{place.attempt}", store))

    @classmethod
    def host(cls) -> tuple["Board", int]:
        """Make a store of our own on this machine; with its port."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)
        return cls(PrefixStore("sarathi-tune/0", store)), store.port

    def groups_store(self) -> Store:
        """Where process groups find each other."""
        return PrefixStore("groups", self._store)

    def join(self, rank: int) -> None:
        """Say that the rank is there."""
        self.beat(rank)
        self._store.set(f"joined/{rank}", "1")

    def has_joined(self, rank: int) -> bool:
        """Whether the rank is there."""
        return bool(self._store.check([f"joined/{rank}"]))

    def beat(self, rank: int) -> None:
        """A sign of life."""
        self._beats += 1
        self._store.set(f"beat/{rank}", str(self._beats))

    def beats(self, ranks: list[int]) -> list[bytes]:
        """The last sign of life of each rank; all of them have joined."""
        return list(self._store.multi_get([f"beat/{rank}" for rank in ranks]))

    def start(self, setup: str) -> None:
        """On rank 0: what the others need to know to connect."""
        self._store.set(_START, setup)

    def setup(self) -> str | None:
        """What rank 0 gave to `start`, once it did."""
        return self._store.get(_START).decode() if self._store.check([_START]) else None

    def report(self, failure: Failure) -> None:
        """Say why the run ends; the first rank to say so is believed."""
        self._store.compare_set(_FAILURE, "", failure.as_text())

    def failure(self) -> Failure | None:
        """Why the run ends, if a rank has said so."""
        return Failure.from_text(self._store.get(_FAILURE).decode()) if self._store.check([_FAILURE]) else None

    def end(self) -> None:
        """On rank 0: whoever is still there has nothing to wait for."""
        self._store.set(_ENDED, "1")

    def has_ended(self) -> bool:
        """Whether rank 0 has said so."""
        return bool(self._store.check([_ENDED]))
