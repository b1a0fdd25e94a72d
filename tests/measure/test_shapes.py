"""Shapes as people write them, one by one and in files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.measure.shapes import Shape, load_shapes, make_shape, parse_shape, rounded_context

TOKENS = st.integers(1, 200_000)
SHAPES = st.one_of(
    st.builds(Shape, TOKENS, TOKENS),
    st.builds(lambda chunk, prefix: Shape(0, 0, chunk, prefix), TOKENS, st.integers(0, 200_000)),
    st.builds(Shape, TOKENS, TOKENS, TOKENS, st.integers(0, 200_000)),
)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("8x1024", Shape(8, 1024)),
        ("512@0", Shape(chunk=512)),
        ("512", Shape(chunk=512)),
        ("8x1024+504@0", Shape(8, 1024, 504)),
        ("8x1k+504@16k", Shape(8, 1024, 504, 16384)),
        (" 1X128 ", Shape(1, 128)),
    ],
)
def test_notation(text: str, shape: Shape) -> None:
    assert parse_shape(text) == shape


@given(SHAPES)
def test_notation_round_trip(shape: Shape) -> None:
    assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "+", "x", "8x", "x1024", "8x1024+", "+512@0", "8x1024 512@0", "512@0+8x1024", "8x1024+@16"),
        *("-8x1024", "8x-1", "512@-1", "0x0", "0", "0@16", "8x0", "1.5", "8x1024+504@0+16@0", "8*1024", "many"),
        *("8x999999999999999999", "nan"),
    ],
)
def test_bad_notation_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_shape(text)
    assert repr(text) in str(error.value)


def test_vllm_script_shapes() -> None:
    # The steps that a vLLM run is commonly timed with: decode batches, prefill chunks, 8 decodes beside a chunk.
    texts = ["1x128", "1x1024", "8x1024", "32x1024", "32x128"]
    texts += [f"{chunk}@0" for chunk in (16, 64, 128, 256, 512, 1024, 2048)]
    texts += [f"8x512+{chunk}@0" for chunk in (248, 504, 1016, 2040)]
    shapes = [parse_shape(text) for text in texts]
    assert [shape.kind for shape in shapes] == ["decode"] * 5 + ["prefill"] * 7 + ["hybrid"] * 4
    assert [shape.num_tokens for shape in shapes[-4:]] == [256, 512, 1024, 2048]


def test_pages_are_counted_per_request() -> None:
    # 3 decodes of 17 tokens take 2 pages of 16 each; 40 + 8 tokens of one prompt take 3.
    assert Shape(3, 17, 8, 40).num_pages(16) == 9
    assert Shape(3, 16).num_pages(16) == 3


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "shapes.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("wrapped", [False, True])
def test_file_of_texts_and_objects_in_its_order(tmp_path: Path, wrapped: bool) -> None:
    entries = ["8x1024+504@0", {"chunk": 512}, {"decodes": 4, "context": 64.0}, "8x1024+504@0"]
    path = write(tmp_path, {"shapes": entries} if wrapped else entries)
    assert load_shapes(path) == (Shape(8, 1024, 504), Shape(chunk=512), Shape(4, 64))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("[", "is not JSON"),
        ("{}", "holds no list"),
        ("[]", "lists no shape"),
        ('["8x1024", "8y9"]', "shapes[1]: '8y9'"),
        ("[[8, 1024]]", "shapes[0] is neither"),
        ('[{"decodes": 8}]', "shapes[0] has 8 decodes and no context"),
        ('[{"decodes": 0}]', "shapes[0] has neither decodes nor a chunk"),
        ('[{"chunk": "512"}]', "shapes[0].chunk must be a whole number"),
        ('[{"chunk": true}]', "shapes[0].chunk must be a whole number"),
        ('[{"chunk": 1.5}]', "shapes[0].chunk must be a whole number"),
        ('[{"chunk": NaN}]', "shapes[0].chunk must be a whole number"),
        ('[{"chunk": -1}]', "shapes[0].chunk must be from 0"),
        ('[{"chunk": 1e30}]', "shapes[0].chunk must be from 0"),
        ('[{"chunk": 16, "prefx": 3}]', "unknown field 'prefx'"),
    ],
)
def test_bad_files_name_the_entry(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DocumentError) as error:
        load_shapes(write(tmp_path, content))
    assert message in str(error.value)
    assert "shapes.json" in str(error.value)


def test_what_stands_beside_nothing_is_dropped() -> None:
    assert make_shape({"decodes": 0, "context": 99, "chunk": 16}, "row") == Shape(chunk=16)
    assert make_shape({"decodes": 1, "context": 99, "prefix": 16}, "row") == Shape(1, 99)


@pytest.mark.parametrize("context", [1, 7, 16, 33, 100, 509, 1000, 5000])
def test_contexts_are_rounded_by_a_few_per_cent(context: int) -> None:
    assert rounded_context(context) == pytest.approx(context, rel=0.04)


def test_close_contexts_are_one_row() -> None:
    assert len({rounded_context(context) for context in range(500, 520)}) <= 2
    assert Shape(1, rounded_context(512.0)) == Shape(1, 512)
