"""What prompts of one workload have in common: a shared beginning, and conversations whose every turn repeats the last.

Agents send the same instructions and tool descriptions with each request, and each turn carries all that was said
before. A prefix cache computes that once; without one, every turn pays for the whole history again.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

#: Conversations that are under way at once: turn 2 of the first comes behind turn 1 of the eighth.
UNDER_WAY = 8
#: Token ids of prompts that nothing computes; sharing shows in the ids alone.
_UNREAD_VOCABULARY = 32_768


@dataclass(frozen=True, slots=True)
class Sharing:
    """`prefix_tokens` tokens stand before every prompt, one of `num_prefixes` texts; a conversation has `turns`
    requests, and each prompt repeats those before it and their answers. The default shares nothing."""

    prefix_tokens: int = 0
    num_prefixes: int = 1
    turns: int = 1

    @property
    def is_none(self) -> bool:
        """Whether prompts have nothing in common."""
        return self.prefix_tokens == 0 and self.turns == 1

    def place(self, index: int) -> tuple[int, int]:
        """(conversation, turn) of the request that is sent as number `index`."""
        group, rest = divmod(index, UNDER_WAY * self.turns)
        turn, lane = divmod(rest, UNDER_WAY)
        return group * UNDER_WAY + lane, turn


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: `own` new tokens are asked, `answer` tokens are answered."""

    own: int
    answer: int


def conversation_prompts(
    seed: int, sharing: Sharing, messages: Sequence[Message], vocab_size: int | None, total_cap: int
) -> tuple[list[Sequence[int]], int]:
    """The prompts of `messages`, in the order of sending: prefix, history, own tokens; and how many of them were cut at
    the end because prompt and answer would have exceeded `total_cap`.

    The history's answers are random tokens of the drawn lengths, not those that the model gave: a prompt must be the
    same for every engine that is compared. So a turn finds the last one's prompt in the cache, and not its answer.
    """
    texts = _Texts(seed, vocab_size or _UNREAD_VOCABULARY)
    histories: dict[int, array[int]] = {}
    prompts: list[Sequence[int]] = []
    num_cut = 0
    for index, message in enumerate(messages):
        conversation, _ = sharing.place(index)
        if conversation not in histories:
            prefix = conversation % sharing.num_prefixes
            histories[conversation] = texts.draw(0, prefix, sharing.prefix_tokens)
        history = histories[conversation]
        history += texts.draw(1, index, message.own)
        room = max(1, total_cap - message.answer)
        num_cut += len(history) > room
        prompts.append(history[:room])
        history += texts.draw(2, index, message.answer)
    return prompts, num_cut


class _Texts:
    """Random token ids, the same for the same seed, kind and number."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed & 0xFFFFFFFF
        self._vocab_size = vocab_size

    def draw(self, kind: int, number: int, count: int) -> "array[int]":
        import numpy as np  # here, because `derive` starts without it

        ids = np.random.default_rng([self._seed, kind, number]).integers(0, self._vocab_size, count, dtype=np.int32)
        return array("i", ids.tobytes())
