"""A byte-level tokenizer for tiny models: every byte is a token, so that random tokens are mostly broken UTF-8."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>")
#: Special tokens, 256 bytes, and a few merges.
VOCAB_SIZE = 264
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'oracle' %}{{ raise_exception('No oracles.') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tokenizer(directory: Path, *, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Write it into a model's directory, and return it as transformers has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("i", "n"), ("e", "r")]
    words = [*SPECIAL, *alphabet, *(a + b for a, b in merges)]
    assert len(words) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(directory)
    return fast
