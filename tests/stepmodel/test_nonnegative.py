"""The solver against scipy's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from sarathi_tune.stepmodel.nonnegative import nonnegative_solution


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(0, 30))
def test_equals_scipy(seed: int, columns: int, more_rows: int) -> None:
    rng = np.random.default_rng(seed)
    design = rng.random((columns + more_rows, columns))
    target = design @ np.maximum(0.0, rng.standard_normal(columns)) + 0.3 * rng.standard_normal(columns + more_rows)
    gram = design.T @ design + 1e-9 * np.eye(columns)
    guess = rng.random(columns) < 0.5
    for start in (None, guess):
        found, positive = nonnegative_solution(gram, design.T @ target, start)
        assert (found >= 0.0).all()
        assert ((found > 0.0) == positive).all()
        _, reference = nnls(design, target)
        assert np.linalg.norm(design @ found - target) == pytest.approx(reference, rel=1e-4, abs=1e-5)


def test_nothing_helps() -> None:
    found, positive = nonnegative_solution(np.eye(3), -np.ones(3))
    assert found.tolist() == [0.0, 0.0, 0.0]
    assert not positive.any()
