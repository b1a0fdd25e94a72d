"""Rows of the profile, the noise floor, and median and p99 per shape."""

import math

import pytest

from sarathi_tune.measure.design import Design, DesignPoint
from sarathi_tune.measure.profile import Sample
from sarathi_tune.measure.samples import Collection, noise_floor, profile_samples, summarise
from sarathi_tune.measure.shapes import Shape

DECODE, CHUNK = Shape(8, 1024), Shape(chunk=512)


def test_rows_join_labels_and_tell_why_times_are_missing() -> None:
    design = Design(
        (DesignPoint(DECODE), DesignPoint(CHUNK, held_out=True), DesignPoint(DECODE, "b"), DesignPoint(Shape(1, 1))),
        *(3, 3, None),
    )
    collection = Collection(missing={CHUNK: "out of memory"})
    collection.add(1, DECODE, "b", 20.0)
    collection.add(1, DECODE, "a", 18.0)
    assert profile_samples(design, collection) == (
        Sample(DECODE, (18.0, 20.0)),
        Sample(CHUNK, missing="out of memory", held_out=True),
        Sample(Shape(1, 1), missing="not measured: the run ended before its turn"),
    )


def test_noise_floor_is_the_largest_difference_of_a_pair() -> None:
    collection = Collection()
    for index, (first, second) in enumerate(((100.0, 102.0), (101.0, 103.0), (99.0, 900.0)), start=1):
        collection.add(index, DECODE, "a", first)
        collection.add(index, DECODE, "b", second)
        collection.add(index, CHUNK, "a", 50.0)
        collection.add(index, CHUNK, "b", 50.5)
    # Medians 100 and 103 (one outlier moves nothing), 50 and 50.5.
    assert noise_floor(collection) == pytest.approx(3 / 101.5)


def test_no_noise_floor_without_a_pair_or_with_too_few() -> None:
    collection = Collection()
    assert noise_floor(collection) is None
    for index in (1, 2):
        collection.add(index, DECODE, "a", 1.0)
        collection.add(index, DECODE, "b", 2.0)
    assert noise_floor(collection) is None


def test_summary_per_shape() -> None:
    times = tuple(float(time) for time in range(1, 102))
    measured, missing = summarise([Sample(DECODE, times), Sample(CHUNK, missing="out of memory")])
    assert (measured.num_steps, measured.median_ms, measured.p99_ms) == (101, 51.0, 100.0)
    assert missing.as_dict() == {
        "shape": "512@0",
        "n": 0,
        "median_ms": None,
        "p99_ms": None,
        "missing": "out of memory",
    }


def test_a_sample_without_times_has_no_median() -> None:
    assert math.isnan(Sample(DECODE).median_ms)
    assert Sample(DECODE, (3.0, 1.0, 2.0, 10.0)).median_ms == 2.5
