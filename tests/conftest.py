"""Tests that hold the program to seconds need a machine to themselves: `pytest -m timing` runs them."""

import signal

import pytest

#: What `make test` gives to one of its two processes; the rest goes to the other. Each keeps the usual order.
_COMPUTING = ("tests/engine/", "tests/measure/", "tests/runtime/", "tests/scripts/", "tests/stepmodel/")
_TIMING = ("tests/cli/test_start.py::test_it_answers_in_half_a_second",)


def pytest_configure() -> None:
    """Obey Ctrl-C even where the tests were started in the background, whose processes ignore it: the tests send it to
    themselves and to what they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    for item in items:
        if item.nodeid.startswith(_TIMING):
            item.add_marker(pytest.mark.timing)
        group = "computing" if item.nodeid.startswith(_COMPUTING) else "serving"
        item.add_marker(pytest.mark.xdist_group(group))
