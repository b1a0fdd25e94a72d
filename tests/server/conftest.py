"""One tiny model with a tokenizer, and one server over it, for all tests that don't need their own."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from sarathi_tune.config.run import DeviceConfig
from sarathi_tune.server.settings import ServeConfig
from sarathi_tune.server.text import load_text
from tests.hf_models import ReferenceModel, tiny_reference
from tests.server.running import Running, serving
from tests.server.tokenizers import VOCAB_SIZE, write_tokenizer

NAME = "tiny"


@dataclass(frozen=True)
class TinyModel:
    """The model as transformers has it, its tokenizer, and where both are."""

    reference: ReferenceModel
    tokenizer: PreTrainedTokenizerFast
    directory: Path


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Of the reference: tiny models gain nothing from threads. The engine has its own setting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    directory = tmp_path_factory.mktemp("models") / NAME
    directory.mkdir()
    reference = tiny_reference(directory, "llama", vocab_size=VOCAB_SIZE)
    return TinyModel(reference, write_tokenizer(directory), directory)


def tiny_config(tiny: TinyModel, **options: object) -> ServeConfig:
    device = DeviceConfig(device="cpu", dtype="float32", threads=1)
    defaults = {"token_budget": 32, "max_num_seqs": 8, "max_model_len": 256, "kv_tokens": 2048}
    return ServeConfig(model=str(tiny.directory), port=0, device=device, **(defaults | options))  # type: ignore[arg-type]


@pytest.fixture(scope="package")
def server(tiny: TinyModel) -> Iterator[Running]:
    source = tiny.reference.source
    with serving(tiny_config(tiny), source, load_text(source)) as running:
        yield running
        running.wait_idle()
