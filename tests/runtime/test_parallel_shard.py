"""Which part of the weights a rank keeps."""

from pathlib import Path

import pytest
import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.parallel import Layout, check_layout, tensor_sizes
from sarathi_tune.config.presets import PRESETS
from sarathi_tune.errors import UsageError
from sarathi_tune.runtime.shard import Shard
from sarathi_tune.runtime.weights import load_weights, random_weights, shard_weight_bytes
from tests.hf_models import tiny_reference

TINY = ModelConfig("tiny", "qwen2", 211, 48, 80, 5, 4, 2, 16, 128, attention_bias=True, output_bias=True, mlp_bias=True)
LAYOUTS = [Layout(2, 1), Layout(1, 2), Layout(2, 2), Layout(1, 5), Layout(4, 1)]


def _shards(layout: Layout) -> list[Shard]:
    return [Shard(rank, layout) for rank in range(layout.num_ranks)]


def test_sizes_of_published_models() -> None:
    """SmolLM2-135M has 9 heads, 3 key heads and 1,536 columns; Llama-3-8B has 32, 8 and 14,336 = 2^11 * 7."""
    assert tensor_sizes(PRESETS["smollm2-135m"]) == (1, 3)
    assert tensor_sizes(PRESETS["llama-3-8b"]) == (1, 2, 4, 8, 16, 32)


def test_a_layout_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(UsageError, match=r"--tensor-parallel 2 .* 9 query heads, 3 key heads .* use one of 1, 3\."):
        check_layout(PRESETS["smollm2-135m"], Layout(2, 1))
    with pytest.raises(UsageError, match=r"--pipeline-parallel 31 .* has 30 layers .* use at most 30"):
        check_layout(PRESETS["smollm2-135m"], Layout(1, 31))
    with pytest.raises(UsageError, match="--tensor-parallel must be at least 1, not 0"):
        Layout(0, 1)


def test_stages_share_the_layers_and_the_last_one_has_no_more_than_any() -> None:
    layers = [shard.layers(TINY) for shard in _shards(Layout(1, 2))]
    assert layers == [range(0, 3), range(3, 5)]
    assert [list(shard.layers(TINY)) for shard in _shards(Layout(1, 5))] == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_parts_of_all_ranks_are_the_whole_model(layout: Layout, tie: bool) -> None:
    """Put together by the rules that tensor parallelism is published with (Megatron-LM, arXiv 1909.08053, section 3):
    rows of q, k, v, gate and up, columns of o and down, biases of o and down once."""
    config = ModelConfig(**{**{f: getattr(TINY, f) for f in TINY.__dataclass_fields__}, "tie_embeddings": tie})
    whole = random_weights(config, torch.float32, seed=5)
    parts = [random_weights(config, torch.float32, seed=5, shard=shard) for shard in _shards(layout)]
    for name, tensor in whole.items():
        held = [part[name] for part in parts if name in part]
        module = name.split(".")[-2]
        if module in ("o_proj", "down_proj") and name.endswith("bias"):
            assert len(held) == 1
            assert torch.equal(held[0], tensor)
        elif module in ("o_proj", "down_proj"):
            assert torch.equal(torch.cat(held, dim=1), tensor)
        elif module in ("k_proj", "v_proj") and layout.tensor > config.num_kv_heads:
            assert torch.equal(torch.cat(held[:: layout.tensor // config.num_kv_heads]), tensor)
            assert torch.equal(held[0], held[1])
        elif module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"):
            assert torch.equal(torch.cat(held), tensor)
        elif module == "embed_tokens" and tie and layout.pipeline > 1:
            first, last = held[: layout.tensor], held[layout.tensor :]
            assert all(torch.equal(copy, tensor) for copy in first)
            assert torch.equal(torch.cat(last), tensor)
        else:
            assert held
            assert all(torch.equal(copy, tensor) for copy in held)


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_a_directory_gives_the_same_parts(layout: Layout, tmp_path: Path) -> None:
    config = tiny_reference(tmp_path, "qwen2").source.config
    whole = load_weights(tmp_path, config, torch.float32)
    for shard in _shards(layout):
        part = load_weights(tmp_path, config, torch.float32, shard=shard)
        assert list(part) == [name for name in whole if name in part]
        for name, index in shard.share(config).items():
            if name in whole:
                assert torch.equal(part[name], whole[name][index])
        assert sum(tensor.nbytes for tensor in part.values()) == shard_weight_bytes(config, torch.float32, shard)


def test_a_part_takes_its_part_of_the_memory() -> None:
    """Llama-3-70B in bfloat16 is 141.1 GB: an eighth of it, but for the embedding, which every rank of TP=8 keeps."""
    config = PRESETS["llama-3-70b"]
    embedding = 128_256 * 8192 * 2
    total = shard_weight_bytes(config, torch.bfloat16)
    part = shard_weight_bytes(config, torch.bfloat16, Shard(0, Layout(8, 1)))
    assert total == pytest.approx(141.1e9, rel=1e-3)
    assert part == pytest.approx(embedding + (total - embedding) / 8, rel=1e-3)
