"""Profiles for tests: the published ones in tests/data, and synthetic ones whose truth is known."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path

from sarathi_tune.measure.profile import Profile, Sample, load_profile
from sarathi_tune.measure.shapes import Shape

DATA = Path(__file__).parent / "data"

#: Milliseconds of a step of this shape.
Truth = Callable[[Shape], float]


def published(name: str) -> Profile:
    """A published measurement, by the name of its file in tests/data."""
    return load_profile(DATA / f"profile-{name}.json")


def hand_written(rows: Iterable[tuple[tuple[int, int, int, int], float]]) -> Profile:
    """A profile of ((decodes, context, chunk, prefix), ms) rows."""
    return Profile(samples=tuple(Sample(Shape(*shape), (ms,)) for shape, ms in rows))


def cpu_like(shape: Shape) -> float:
    """A small model on two cores: weights streamed up to 24 tokens, then 0.11 ms per token, attention on top."""
    tokens = shape.num_tokens
    linear = 9.0 + 0.11 * max(0, tokens - 24)
    decode = shape.decodes * (0.05 + 6e-5 * shape.context)
    return linear + decode + 3e-6 * shape.chunk * (shape.prefix + shape.chunk / 2)


def gpu_like(shape: Shape) -> float:
    """An 8B model on a large GPU: flat to 256 tokens, then 0.02 ms per token; a chunk's own launch costs 0.4 ms."""
    tokens = shape.num_tokens
    linear = 7.0 + 0.02 * max(0, tokens - 256)
    decode = shape.decodes * 4e-5 * shape.context
    return linear + decode + (0.4 if shape.chunk else 0.0) + 1.2e-6 * shape.chunk * (shape.prefix + shape.chunk / 2)


def rich_shapes() -> list[Shape]:
    """About sixty shapes, as a measurement would take them."""
    decode = [Shape(batch, context) for batch in (1, 4, 8, 16, 32) for context in (128, 1024, 4096)]
    prefill = [
        Shape(chunk=chunk, prefix=prefix) for chunk in (16, 64, 128, 256, 512, 1024, 2048) for prefix in (0, 2048)
    ]
    hybrid = [
        Shape(batch, context, total - batch, prefix)
        for batch in (4, 16)
        for context in (512, 2048)
        for total in (64, 256, 512, 1024, 2048)
        for prefix in (0, 3000)
    ]
    return decode + prefill + hybrid


def measured(truth: Truth, noise: float, repeats: int, seed: int, held_out: float = 0.0) -> Profile:
    """The rich shapes timed `repeats` times with relative Gaussian noise; a share of them held out of the fit."""
    rng = random.Random(seed)
    samples = []
    for shape in rich_shapes():
        times = tuple(truth(shape) * max(0.5, 1.0 + rng.gauss(0.0, noise)) for _ in range(repeats))
        samples.append(Sample(shape, times, held_out=rng.random() < held_out))
    return Profile(samples=tuple(samples), max_model_len=8192)
