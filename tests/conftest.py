"""Tests that hold the program to seconds need a machine to themselves: `pytest -m timing` runs them."""

import pytest

_TIMING = (
    "tests/loadgen/http/test_worker.py",
    "tests/loadgen/test_overlap.py",
    "tests/loadgen/http/test_client_cases.py::test_no_pool_limit_holds_requests_back",
    "tests/loadgen/test_selftest.py",
    "tests/cli/test_verify.py",
    "tests/cli/test_start.py::test_it_answers_in_half_a_second",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    for item in items:
        if item.nodeid.startswith(_TIMING):
            item.add_marker(pytest.mark.timing)
