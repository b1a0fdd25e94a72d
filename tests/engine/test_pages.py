"""The page pool against a plain set of pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_tune.engine.pages import PagePool


def test_a_fresh_allocation_is_one_contiguous_run() -> None:
    pool = PagePool(100, 16)
    pages = pool.allocate(10)
    assert pages == list(range(pages[0], pages[0] + 10))


def test_growth_continues_the_run() -> None:
    pool = PagePool(100, 16)
    first = pool.allocate(4)
    other = pool.allocate(4)
    grown = pool.allocate(3, after=first[-1])
    assert grown == [first[-1] + 1, first[-1] + 2, first[-1] + 3]
    assert not set(grown) & set(other)


def test_many_growing_owners_stay_contiguous_while_there_is_room() -> None:
    pool = PagePool(1024, 16)
    owners = [pool.allocate(1) for _ in range(8)]
    for _ in range(40):
        for pages in owners:
            pages += pool.allocate(1, after=pages[-1])
    for pages in owners:
        assert pages == list(range(pages[0], pages[0] + 41))


def test_a_fragmented_pool_still_gives_every_page() -> None:
    pool = PagePool(10, 16)
    pages = pool.allocate(10)
    pool.release(pages[::2])
    assert sorted(pool.allocate(5)) == sorted(pages[::2])
    assert pool.num_free == 0


def test_shared_pages_are_free_only_after_the_last_owner() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    pool.retain(pages)
    pool.release(pages)
    assert pool.num_free == 2
    pool.release(pages)
    assert pool.num_free == 4
    with pytest.raises(AssertionError, match="already free"):
        pool.release(pages)


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_never_owned_twice_never_lost(num_pages: int, actions: list[tuple[bool, int]]) -> None:
    pool = PagePool(num_pages, 16)
    owners: list[list[int]] = []
    for is_allocation, number in actions:
        if is_allocation and number <= pool.num_free:
            after = owners[-1][-1] if owners and owners[-1] else None
            owners.append(pool.allocate(number, after))
            assert len(owners[-1]) == number
        elif owners:
            pool.release(owners.pop(number % len(owners)))
        pool.check_integrity(owners)
        owned = [page for pages in owners for page in pages]
        assert len(owned) == len(set(owned))
        assert pool.num_free == num_pages - len(owned)


@given(st.integers(0, 1000), st.integers(1, 64))
def test_pages_for_is_the_ceiling(tokens: int, page_tokens: int) -> None:
    pages = PagePool(1, page_tokens).pages_for(tokens)
    assert (pages - 1) * page_tokens < tokens <= pages * page_tokens or tokens == pages == 0
