"""Measured ceilings of this machine: of the right order."""

import pytest
import torch

from sarathi_tune.measure.ceilings import measure_ceilings


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


def test_plausible() -> None:
    ceilings = measure_ceilings("cpu", "float32", seconds=0.3)
    # From a loaded single core of an old laptop to a large server: 0.5 GB/s to 2 TB/s, 1 GFLOP/s to 100 TFLOP/s.
    assert 0.5 < ceilings.read_gb_per_s < 2000
    assert 1e-3 < ceilings.gemm_tflop_per_s < 100
    assert ceilings.as_dict()["dtype"] == "float32"
