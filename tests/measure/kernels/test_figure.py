"""What a kernel achieves, and of which ceiling."""

import pytest

from sarathi_tune.measure.ceilings import Ceilings
from sarathi_tune.measure.kernels.figure import KernelFigure, bounded

#: 50 GB/s and 1 TFLOP/s.
CEILINGS = Ceilings(50.0, 1.0, "bfloat16")


def test_reading_25_mb_in_one_ms_is_half_of_50_gb_per_s() -> None:
    figure = bounded("attention", "32x1024", 32, (1.0, 0.9), (25e6, 1e6), CEILINGS)
    assert (figure.bound, figure.unit) == ("memory", "GB/s")
    assert figure.achieved == pytest.approx(25.0)
    assert figure.share == pytest.approx(0.5)


def test_the_ceiling_that_takes_longer_bounds() -> None:
    # 1 GFLOP takes 1 ms at 1 TFLOP/s, and its 10 MB only 0.2 ms
    figure = bounded("linear", "down", 512, (1.25, 1.2), (10e6, 1e9), CEILINGS)
    assert (figure.bound, figure.unit) == ("compute", "TFLOP/s")
    assert figure.share == pytest.approx(0.8)


def test_what_was_skipped_has_a_reason_and_no_number() -> None:
    figure = KernelFigure("all-reduce", "hidden states", 0, skipped="one process")
    assert figure.as_dict() == {
        "group": "all-reduce",
        "name": "hidden states",
        "tokens": 0,
        "skipped": "one process",
    }
    assert figure.achieved is None
    assert figure.share is None
