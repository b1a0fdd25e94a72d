"""Steps as the bench builds them: what the runner is given, and that the pages come back."""

from collections.abc import Callable

import pytest
import torch

from sarathi_tune.engine.pages import PagePool
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.errors import OutOfMemoryError
from sarathi_tune.measure.bench import Bench, fill_kv
from sarathi_tune.measure.failures import out_of_memory_reason
from sarathi_tune.measure.shapes import Shape

VOCAB = 1000


class Recorder:
    """An executor that keeps what it was given."""

    def __init__(self, fail: Exception | None = None) -> None:
        self.plans: list[StepPlan] = []
        self.pages: list[list[list[int]]] = []
        self.fail = fail

    def execute(self, plan: StepPlan) -> list[int]:
        self.plans.append(plan)
        self.pages.append([list(piece.request.pages) for piece in plan])
        if self.fail:
            raise self.fail
        return [0 for piece in plan if piece.samples]


class Stopwatch:
    """A timer that says 12.5 ms whatever it is given."""

    def time_ms(self, work: Callable[[], object]) -> float:
        work()
        return 12.5


def make_bench(num_pages: int = 64, fail: Exception | None = None) -> tuple[Bench, Recorder, PagePool]:
    recorder, pool = Recorder(fail), PagePool(num_pages, 16)
    return Bench(recorder, pool, vocab_size=VOCAB, timer=Stopwatch()), recorder, pool


@pytest.mark.parametrize(
    "shape", [Shape(3, 33), Shape(chunk=50, prefix=70), Shape(4, 16, 20, 16), Shape(1, 1)], ids=str
)
def test_the_plan_has_the_shape_asked_for(shape: Shape) -> None:
    bench, recorder, _ = make_bench()
    assert bench.time_shape(shape) == 12.5
    (plan,) = recorder.plans
    assert plan.shape == shape.step_shape
    assert [piece.is_decode for piece in plan] == [True] * shape.decodes + [False] * bool(shape.chunk)


def test_requests_are_as_in_the_middle_of_a_run() -> None:
    bench, recorder, _ = make_bench()
    bench.time_shape(Shape(2, 33, 20, 40))
    first, second, prompt = (piece.request for piece in recorder.plans[0])
    for decode in (first, second):
        # 33 keys, the new one included: 32 are in the cache and the token sampled last is to be computed.
        assert (decode.num_computed, decode.num_tokens, len(decode.output)) == (32, 33, 1)
        assert decode.is_decoding
    assert (prompt.num_computed, prompt.num_tokens, prompt.is_decoding) == (40, 60, False)
    assert first.token_ids(0, 33) != second.token_ids(0, 33)
    assert all(0 <= token < VOCAB for token in (*first.token_ids(0, 33), *prompt.token_ids(0, 60)))
    assert len({first.request_id, second.request_id, prompt.request_id}) == 3


def test_every_slice_samples_like_a_decode_and_a_last_chunk() -> None:
    bench, recorder, _ = make_bench()
    bench.time_shape(Shape(2, 33, 20, 40))
    assert all(piece.samples and piece.stop == piece.request.num_tokens for piece in recorder.plans[0])


def test_pages_are_runs_owned_once_and_given_back() -> None:
    bench, recorder, pool = make_bench()
    for _ in range(3):
        bench.time_shape(Shape(3, 33, 20, 40))
        assert pool.num_free == 64
        pool.check_integrity([])
    for pages in recorder.pages:
        assert [len(owned) for owned in pages] == [3, 3, 3, 4]
        assert len({page for owned in pages for page in owned}) == 13
        for owned in pages:
            assert owned == list(range(owned[0], owned[0] + len(owned)))


def test_prompts_longer_than_the_supply_of_ids() -> None:
    bench, recorder, _ = make_bench(num_pages=10_000)
    bench.time_shape(Shape(chunk=16, prefix=140_000))
    assert len(recorder.plans[0].slices[0].request.token_ids(0, 140_016)) == 140_016


def test_a_cache_too_small_is_said_before_anything_runs() -> None:
    bench, recorder, _ = make_bench(num_pages=4)
    with pytest.raises(OutOfMemoryError, match="2x64 needs 8 pages of KV cache and there are 4"):
        bench.time_shape(Shape(2, 64))
    assert recorder.plans == []


def test_pages_come_back_after_a_failure() -> None:
    bench, _, pool = make_bench(fail=RuntimeError("CUDA out of memory"))
    with pytest.raises(RuntimeError):
        bench.time_shape(Shape(2, 64))
    assert pool.num_free == 64
    bench.recover()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried 20 GiB\nmore"), "CUDA out of memory. Tried 20 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "DefaultCPUAllocator: can't allocate memory"),
        (OutOfMemoryError("needs 8 pages"), "needs 8 pages"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("shapes cannot be multiplied"), None),
        (ValueError("out of memory"), None),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, reason: str | None) -> None:
    assert out_of_memory_reason(error) == reason


def test_torch_says_it_as_we_expect() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory_reason(error.value) is not None


class Layer:
    """A layer with its heads outermost in memory, as CPU kernels want it, made in inference mode like the runner's."""

    def __init__(self, slots: int) -> None:
        with torch.inference_mode():
            self.keys = torch.zeros(2, slots, 4, dtype=torch.bfloat16).permute(1, 0, 2)
            self.values = torch.full((slots, 2, 4), float("nan"), dtype=torch.bfloat16)


@pytest.mark.parametrize("slots", [5, 2048, 5000])
def test_the_cache_is_filled_with_ordinary_numbers(slots: int) -> None:
    layer = Layer(slots)
    fill_kv([layer], seed=1)
    for tensor in (layer.keys.float(), layer.values.float()):
        assert torch.isfinite(tensor).all()
        # Every slot is written, and no number is denormal in bfloat16.
        assert (tensor.abs().amax(dim=(1, 2)) > 0).all()
        assert (tensor.abs()[tensor != 0] > 1e-30).all()
    assert not torch.equal(layer.keys.float(), layer.values.float())
    other = Layer(slots)
    fill_kv([other], seed=1)
    assert torch.equal(layer.keys.float(), other.keys.float())
