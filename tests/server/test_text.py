"""Between text and tokens, against transformers and by hand."""

import json
from pathlib import Path

import pytest

from sarathi_tune.config.presets import resolve_model
from sarathi_tune.config.source import ModelSource
from sarathi_tune.errors import ModelError
from sarathi_tune.server.refusals import ApiError
from sarathi_tune.server.text import TokenizerText, WordText, load_text
from tests.server.conftest import TinyModel
from tests.server.tokenizers import write_tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wo ist die Straße?"}]


def test_a_preset_speaks_in_words_that_stand_for_tokens() -> None:
    text = load_text(resolve_model("smollm2-135m"))
    assert isinstance(text, WordText)
    assert text.encode("w5 w17  w49151\n") == [5, 17, 49151]
    assert text.decode([5, 17]) == " w5 w17"
    assert text.encode(text.decode([5, 17, 2])) == [5, 17, 2]


def test_any_word_is_one_token_and_always_the_same() -> None:
    text = WordText(1000, frozenset())
    tokens = text.encode("to be or not to be w1000 ünïcode")
    assert len(tokens) == 8
    assert tokens[:2] == tokens[4:6]
    assert all(0 <= token < 1000 for token in tokens)


def test_a_chat_of_words_has_one_token_more_per_role() -> None:
    assert len(WordText(1000, frozenset()).encode_chat(MESSAGES)) == (1 + 2) + (1 + 4) + 1


def test_the_tokenizer_of_a_directory_is_the_one_of_transformers(tiny: TinyModel) -> None:
    text = load_text(tiny.reference.source)
    written = "then 日本 the end"
    assert text.encode(written) == tiny.tokenizer(written)["input_ids"]
    assert text.decode(text.encode(written)) == written
    assert text.stop_token_ids == {2}
    chat = tiny.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert text.encode_chat(MESSAGES) == chat
    assert text.decode(chat).startswith("[system]Be brief.\n[user]Wo")


def test_a_template_may_refuse_messages(tiny: TinyModel) -> None:
    with pytest.raises(ApiError, match=r"template refuses these messages: No oracles\.$") as refused:
        load_text(tiny.reference.source).encode_chat([{"role": "oracle", "content": "?"}])
    assert refused.value.status == 400


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=None)
    with pytest.raises(ApiError, match="no chat template"):
        TokenizerText(tmp_path, frozenset()).encode_chat(MESSAGES)


def test_a_directory_may_name_more_tokens_that_end_an_answer(tiny: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_text(ModelSource(tiny.reference.source.config, tmp_path)).stop_token_ids == {2, 7}


def test_a_broken_tokenizer_is_said_in_one_sentence(tiny: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer in .* can't be read"):
        load_text(ModelSource(tiny.reference.source.config, tmp_path))
