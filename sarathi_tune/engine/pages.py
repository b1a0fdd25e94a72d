"""The page pool: which pages of the KV cache are free, and how often each of the others is used.

Free pages are kept as intervals. A fresh run starts in the middle of the largest free interval, so that it can grow
without being cut up; the CPU attention reads a contiguous run as one view, and a GPU loses nothing by it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable


class PagePool:
    """`num_pages` pages of `page_tokens` tokens, reference-counted. Page ids are 0 to num_pages - 1."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        assert num_pages > 0, "a pool has at least one page"
        assert page_tokens > 0, "a page holds at least one token"
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.num_free = num_pages
        self._references = [0] * num_pages
        self._starts: list[int] = [0]
        self._stops: dict[int, int] = {0: num_pages}

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def references(self, page: int) -> int:
        """How many owners a page has; 0 when it is free."""
        return self._references[page]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` pages, each with one reference; behind page `after` where that is free.

        The caller has checked `num_free`: asking for more is our own fault.
        """
        assert 0 <= count <= self.num_free, f"asked for {count} pages, {self.num_free} are free"
        taken: list[int] = []
        if after is not None and after + 1 in self._stops:
            taken += self._take(after + 1, after + 1, count)
        while len(taken) < count:
            wanted = count - len(taken)
            start = max(self._starts, key=lambda begin: self._stops[begin] - begin)
            room = self._stops[start] - start - wanted
            taken += self._take(start, start + max(0, room) // 2, wanted)
        for page in taken:
            self._references[page] = 1
        self.num_free -= count
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Add an owner to pages that are in use."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and can't be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Give up one reference of each page; a page without owners is free again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is already free"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free(page)

    def check_integrity(self, owned: Iterable[list[int]]) -> None:
        """Assert that the owners' pages and the free intervals account for every page exactly once per reference."""
        counts = [0] * self.num_pages
        for pages in owned:
            for page in pages:
                counts[page] += 1
        assert counts == self._references, "page references don't match their owners"
        free = [page for start in self._starts for page in range(start, self._stops[start])]
        assert free == [page for page in range(self.num_pages) if counts[page] == 0], "a page is lost or free twice"
        assert len(free) == self.num_free, f"{len(free)} pages are free, {self.num_free} counted"

    def _take(self, start: int, first: int, count: int) -> list[int]:
        """Cut up to `count` pages from `first` on out of the free interval that begins at `start`."""
        stop = self._stops.pop(start)
        last = min(first + count, stop)
        del self._starts[bisect_left(self._starts, start)]
        if first > start:
            self._add(start, first)
        if last < stop:
            self._add(last, stop)
        return list(range(first, last))

    def _add(self, start: int, stop: int) -> None:
        insort(self._starts, start)
        self._stops[start] = stop

    def _free(self, page: int) -> None:
        start, stop = page, page + 1
        if stop in self._stops:
            neighbour = stop
            stop = self._stops.pop(neighbour)
            del self._starts[bisect_left(self._starts, neighbour)]
        position = bisect_left(self._starts, page)
        if position and self._stops[self._starts[position - 1]] == page:
            start = self._starts[position - 1]
            self._stops[start] = stop
        else:
            self._add(start, stop)
        self.num_free += 1
