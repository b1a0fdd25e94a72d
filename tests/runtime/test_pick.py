"""Which attention back end goes first on which device, and why the others don't."""

import pytest
import torch

from sarathi_tune.runtime.attention import pick
from sarathi_tune.runtime.attention.base import AttentionShape
from sarathi_tune.runtime.attention.pick import attention_candidates, pick_attention
from sarathi_tune.runtime.attention.triton_paged import TritonAttention

SHAPE = AttentionShape(32, 8, 128, None)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with every package installed, as far as obstacles are concerned."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    monkeypatch.setattr(pick, "find_spec", lambda _name: object())


def names(device: torch.device, page_tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    return [candidate.name for candidate in attention_candidates(SHAPE, device, dtype, page_tokens)]


def able(device: torch.device, page_tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    candidates = attention_candidates(SHAPE, device, dtype, page_tokens)
    return [candidate.name for candidate in candidates if candidate.obstacle is None]


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("page_tokens", [16, 32, 128, 257])
def test_small_pages_go_to_triton_before_flash(page_tokens: int) -> None:
    assert able(CUDA, page_tokens) == ["triton", "flash", "sdpa", "reference"]


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("page_tokens", [256, 512])
def test_pages_that_flash_can_index_go_to_flash(page_tokens: int) -> None:
    """flash-attn's block table: "Paged KV cache block size must be divisible by 256"."""
    assert able(CUDA, page_tokens) == ["flash", "triton", "sdpa", "reference"]


@pytest.mark.usefixtures("ampere")
def test_float32_is_no_matter_for_flash() -> None:
    assert able(CUDA, 256, torch.float32) == ["triton", "sdpa", "reference"]


@pytest.mark.usefixtures("ampere")
def test_triton_is_picked_with_a_reason_of_its_own() -> None:
    choice = pick_attention(SHAPE, CUDA, torch.bfloat16, 16)
    assert isinstance(choice.attention, TritonAttention)
    assert choice.name == "triton"
    assert "Triton kernel reads pages" in choice.reason


def test_an_older_gpu_has_torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    monkeypatch.setattr(pick, "find_spec", lambda _name: object())
    assert able(CUDA, 16) == ["sdpa", "reference"]
    obstacles = {item.name: item.obstacle for item in attention_candidates(SHAPE, CUDA, torch.float16, 16)}
    assert obstacles["triton"] == obstacles["flash"] == "it needs an Ampere or newer GPU (compute capability 8.0)"


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_the_interpreter_is_never_picked_by_itself(interpret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert names(CPU, 16)[:2] == ["cpu", "sdpa"]
    assert names(CPU, 256)[:2] == ["cpu", "sdpa"]
    assert ("triton" in able(CPU, 16)) == (interpret == "1")


def test_every_back_end_has_a_reason_and_those_that_cannot_run_say_why() -> None:
    for candidate in attention_candidates(SHAPE, CPU, torch.bfloat16, 16):
        assert len(candidate.reason.split()) > 3
        if candidate.name in ("flash", "triton"):
            assert candidate.obstacle == "it needs a CUDA device and this is cpu"
