"""Weights from directories, whole and damaged, and random ones. transformers writes the directories."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.presets import PRESETS
from sarathi_tune.errors import ModelError, OutOfMemoryError
from sarathi_tune.runtime import weights as weights_module
from sarathi_tune.runtime.weights import expected_shapes, load_weights, random_weights
from tests.hf_models import FAMILIES, ReferenceModel, hf_greedy, hf_logits, tiny_hf_model, tiny_reference

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> ReferenceModel:
    """An untied Llama in one file."""
    return tiny_reference(tmp_path / "model", "llama")


@pytest.fixture
def sharded(tmp_path: Path) -> ReferenceModel:
    """The same in several shards with an index."""
    model = tiny_reference(tmp_path / "sharded", "llama")
    (directory(model) / SINGLE).unlink()
    model.hf_model.save_pretrained(directory(model), max_shard_size="100KB")
    assert len(list(directory(model).glob("model-*.safetensors"))) > 2
    return model


def directory(model: ReferenceModel) -> Path:
    assert model.source.directory is not None
    return model.source.directory


def load(model: ReferenceModel, config: ModelConfig | None = None) -> dict[str, torch.Tensor]:
    return load_weights(directory(model), config or model.source.config, torch.float32)


def refusal(model: ReferenceModel, config: ModelConfig | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        load(model, config)
    message = str(caught.value)
    assert str(directory(model)) in message
    assert "\n" not in message
    return message


def rewrite(model: ReferenceModel, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of the one-file model."""
    tensors = load_file(directory(model) / SINGLE)
    change(tensors)
    save_file(tensors, directory(model) / SINGLE)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_every_family(family: str) -> None:
    hf_model, config, weights = tiny_hf_model(family)
    reference = {name: parameter.detach() for name, parameter in hf_model.named_parameters()}
    assert set(weights) == set(reference)
    for name, tensor in weights.items():
        assert torch.equal(tensor, reference[name]), name
        assert tuple(tensor.shape) == expected_shapes(config)[name]
    assert sum(tensor.numel() for tensor in weights.values()) == config.num_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_expected_shapes_hold_all_parameters_of_a_preset(name: str) -> None:
    shapes = expected_shapes(PRESETS[name])
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == PRESETS[name].num_parameters


def test_shards_hold_the_same_as_one_file(sharded: ReferenceModel, model: ReferenceModel) -> None:
    one, many = load(model), load(sharded)
    assert list(one) == list(many)
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_converts_and_copies(model: ReferenceModel) -> None:
    weights = load_weights(directory(model), model.source.config, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    rewrite(model, lambda tensors: tensors.update({name: torch.zeros_like(tensors[name]) for name in tensors}))
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    expected = dict(model.hf_model.named_parameters())["lm_head.weight"].detach().to(torch.bfloat16)
    assert torch.equal(weights["lm_head.weight"], expected)


def test_rotary_buffers_are_ignored(model: ReferenceModel) -> None:
    rewrite(model, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert set(load(model)) == set(expected_shapes(model.source.config))


def test_tied_head_may_be_stored_twice_or_under_the_other_name(tmp_path: Path) -> None:
    model = tiny_reference(tmp_path, "llama-tied")
    expected = load(model)
    assert "lm_head.weight" not in expected
    embedding = expected["model.embed_tokens.weight"]
    rewrite(model, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert set(load(model)) == set(expected)
    rewrite(model, lambda tensors: tensors.__delitem__("model.embed_tokens.weight"))
    assert torch.equal(load(model)["model.embed_tokens.weight"], embedding)


def test_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    model = tiny_reference(tmp_path, "llama-tied")
    other = torch.zeros_like(load(model)["model.embed_tokens.weight"])
    rewrite(model, lambda tensors: tensors.update({"lm_head.weight": other}))
    message = refusal(model)
    assert "lm_head.weight" in message
    assert "tie_word_embeddings" in message


def test_nothing_to_load(model: ReferenceModel) -> None:
    (directory(model) / SINGLE).rename(directory(model) / "weights.safetensors")
    message = refusal(model)
    assert "no model.safetensors" in message
    assert "weights.safetensors" in message


def test_pickles_are_never_read(model: ReferenceModel) -> None:
    (directory(model) / SINGLE).unlink()
    (directory(model) / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80\x04")
    message = refusal(model)
    assert "pickled" in message
    assert "save_pretrained" in message


def test_adapter_is_named(model: ReferenceModel) -> None:
    (directory(model) / SINGLE).rename(directory(model) / "adapter_model.safetensors")
    assert "merge" in refusal(model)


@pytest.mark.parametrize("size", [0, 5, 8, 100, 5_000, -1])
def test_truncated_file_is_named(model: ReferenceModel, size: int) -> None:
    path = directory(model) / SINGLE
    content = path.read_bytes()
    path.write_bytes(content[:size])
    message = refusal(model)
    assert "model.safetensors" in message
    assert "truncated" in message
    if size == -1:
        assert f"it has {len(content) - 1} bytes and its header asks for {len(content)}" in message


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 200,
        b"PK\x03\x04" + b"\0" * 200,
        (4).to_bytes(8, "little") + b"null",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (11).to_bytes(8, "little") + b'{"a": null}',
        (8).to_bytes(8, "little") + b'{"a": {}',
    ],
)
def test_damaged_header_is_named(model: ReferenceModel, content: bytes) -> None:
    (directory(model) / SINGLE).write_bytes(content)
    message = refusal(model)
    assert "model.safetensors" in message
    assert "again" in message


def test_surplus_bytes_are_damage(model: ReferenceModel) -> None:
    with (directory(model) / SINGLE).open("ab") as file:
        file.write(b"x")
    assert "is damaged" in refusal(model)


def test_git_lfs_pointer_is_named(model: ReferenceModel) -> None:
    (directory(model) / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refusal(model)


def test_offsets_that_safetensors_refuses(model: ReferenceModel) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (directory(model) / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    assert "tensors" in refusal(model)  # as an incomplete model; the data is never reached


def test_missing_shard_is_named(sharded: ReferenceModel) -> None:
    shard = sorted(directory(sharded).glob("model-*.safetensors"))[1]
    shard.unlink()
    message = refusal(sharded)
    assert shard.name in message
    assert "missing" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["isn't valid JSON"]),
        ("[]", ["weight_map"]),
        ("{}", ["weight_map"]),
        ('{"weight_map": {"lm_head.weight": 3}}', ["weight_map"]),
        ('{"weight_map": {"lm_head.weight": "../outside.safetensors"}}', ["../outside.safetensors", "model directory"]),
        ('{"weight_map": {"lm_head.weight": "/etc/outside.safetensors"}}', ["/etc/outside.safetensors"]),
        ('{"weight_map": {"lm_head.weight": "a/../../b.safetensors"}}', ["a/../../b.safetensors"]),
        ('{"weight_map": {"lm_head.weight": "pytorch_model.bin"}}', ["pytorch_model.bin"]),
        ('{"weight_map": {}}', ["lacks 30 of the 30 tensors"]),
    ],
)
def test_index_that_cannot_be_followed(sharded: ReferenceModel, text: str, words: list[str]) -> None:
    (directory(sharded).parent / "outside.safetensors").write_bytes(b"")
    (directory(sharded) / INDEX).write_text(text)
    message = refusal(sharded)
    for word in words:
        assert word in message


def test_index_that_names_the_wrong_shard(sharded: ReferenceModel) -> None:
    path = directory(sharded) / INDEX
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(
        shard for shard in shards if shard != index["weight_map"]["model.norm.weight"]
    )
    path.write_text(json.dumps(index))
    message = refusal(sharded)
    assert "model.norm.weight" in message
    assert "doesn't hold it" in message


def test_missing_tensor_is_named(model: ReferenceModel) -> None:
    rewrite(model, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))
    message = refusal(model)
    assert "lacks 1 of the 30 tensors" in message
    assert "model.layers.1.mlp.up_proj.weight" in message


def test_missing_head_hints_at_tying(model: ReferenceModel) -> None:
    rewrite(model, lambda tensors: tensors.__delitem__("lm_head.weight"))
    assert "tie_word_embeddings" in refusal(model)


def test_wrong_shape_is_named(model: ReferenceModel) -> None:
    message = refusal(model, replace(model.source.config, intermediate_size=96))
    assert "[80, 48]" in message
    assert "[96, 48]" in message


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int64])
def test_quantised_tensor_is_named(model: ReferenceModel, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(model, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    message = refusal(model)
    assert name in message
    assert "bfloat16 version" in message


def test_surplus_tensor_is_named(model: ReferenceModel) -> None:
    """A bias or a layer that we don't compute would make every output wrong."""
    rewrite(model, lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(48)}))
    assert "model.layers.0.self_attn.o_proj.bias" in refusal(model)
    assert "lacks" not in refusal(model)


def test_out_of_memory_is_seen_before_loading(model: ReferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = model.source.config.num_parameters * 4
    monkeypatch.setattr(weights_module, "free_host_bytes", lambda: needed - 1)
    monkeypatch.setattr(weights_module, "_read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(OutOfMemoryError, match=r"need .* as float32 and .* are free on cpu"):
        load(model)


def test_out_of_memory_for_random_weights() -> None:
    huge = replace(PRESETS["llama-3-70b"], num_layers=1_000_000)
    with pytest.raises(OutOfMemoryError, match=r"llama-3-70b"):
        random_weights(huge, torch.bfloat16)


def test_random_weights_of_the_default_model() -> None:
    weights = random_weights(PRESETS["smollm2-135m"], torch.bfloat16)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected_shapes(PRESETS["smollm2-135m"])
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_random_weights_repeat_for_a_seed() -> None:
    config = replace(PRESETS["smollm2-135m"], num_layers=2)
    first, again, other = (random_weights(config, torch.bfloat16, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_random_rows_are_not_alike() -> None:
    """The numbers come round again in a large matrix; its rows must stay independent all the same."""
    config = replace(PRESETS["smollm2-135m"], num_layers=1)
    rows = random_weights(config, torch.float32)["model.embed_tokens.weight"][::10]
    rows = rows / rows.norm(dim=1, keepdim=True)
    likeness = (rows @ rows.T).fill_diagonal_(0.0).abs().max()
    assert likeness < 0.35  # 4915 x 4915 pairs in 576 dimensions: about 5.6 / sqrt(576) by chance


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3-tied", "llama-biased"])
def test_random_weights_give_sane_logits(family: str) -> None:
    """Through transformers' own forward pass, at a width and depth that would show a wrong scale."""
    sizes = {"hidden_size": 288, "intermediate_size": 700, "num_hidden_layers": 24, "vocab_size": 1000}
    hf_model, config, _ = tiny_hf_model(family, **sizes)
    hf_model.load_state_dict(random_weights(config, torch.float32), strict=False)
    hf_model.tie_weights()
    logits = hf_logits(hf_model, list(range(3, 203)))
    assert torch.isfinite(logits).all()
    assert 0.3 < logits.std() < 3.0
    assert logits.argmax(dim=-1).unique().numel() > 100, "positions should have best tokens of their own"
    assert len(set(hf_greedy(hf_model, list(range(3, 53)), 20))) > 10, "greedy decoding should not run in a circle"
