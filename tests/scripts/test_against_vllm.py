"""The table that sets both engines' steps side by side."""

from scripts.against_vllm import SHAPES, as_table, name_of


def test_names_are_those_that_profile_takes() -> None:
    assert [name_of(*shape) for shape in ((8, 1024, 0), (0, 0, 256), (8, 512, 504))] == [
        "8x1024",
        "256@0",
        "8x512+504@0",
    ]


def test_ratios_are_taken_within_a_round() -> None:
    """Medians 2 and 4 ms, then 3 and 12 ms: ratios 0.5 and 0.25; the median of two is their mean."""
    ours = [[[1.0, 2.0, 9.0]] * len(SHAPES), [[3.0]] * len(SHAPES)]
    vllm = [[[4.0, 4.0, 5.0]] * len(SHAPES), [[12.0]] * len(SHAPES)]
    rows = as_table(vllm, ours).splitlines()
    assert rows[2] == "| 1x128 | 8.0 | 2.5 | 0.38 | 0.50 0.25 |"
    assert len(rows) == 2 + len(SHAPES)
