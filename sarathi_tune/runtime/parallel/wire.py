"""How rank 0 tells the others what to compute: numbers in int64 arrays, no pickles.

A command is a first message of fixed length, a header and the first words of the payload, and where that doesn't hold
the payload a second one with the rest. The payload of a step is the batch layout, from which a follower makes slices
and requests again that hold just what the step needs of them. Imports no torch.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Literal, overload

import numpy as np

from sarathi_tune.engine.plan import Slice, StepPlan, Swap
from sarathi_tune.engine.request import Request, Sampling
from sarathi_tune.errors import UsageError

#: Changes with every change of the format.
VERSION = 1
#: Version, command, words of payload, digest.
HEADER_WORDS = 4
#: The first message, 4 KiB: most steps fit, and its receiver needn't ask how long it is.
MESSAGE_WORDS = 512

Words = np.ndarray[Any, np.dtype[np.int64]]

_DIRECTIONS: tuple[Literal["out", "in", "drop"], ...] = ("out", "in", "drop")
_DECODE, _SAMPLES = 1, 2
_SLICE_WORDS, _SWAP_WORDS = 7, 3
_SIGNED = 1 << 63


class Command(IntEnum):
    """What followers are told to do."""

    BUILD = 1
    STEP = 2
    LOGITS = 3
    STOP = 4


NOTHING: Words = np.empty(0, dtype=np.int64)


def make_messages(command: Command, payload: Words, digest: int = 0) -> tuple[Words, Words]:
    """The first message of a command, and the second one, which is empty when the first holds all."""
    first = np.zeros(MESSAGE_WORDS, dtype=np.int64)
    first[:HEADER_WORDS] = (VERSION, command, len(payload), digest)
    inline = payload[: MESSAGE_WORDS - HEADER_WORDS]
    first[HEADER_WORDS : HEADER_WORDS + len(inline)] = inline
    return first, payload[len(inline) :]


def read_message(first: Words) -> tuple[Command, int, Words, int]:
    """Of a first message: the command, the digest, the payload as far as it holds it, and how many words are to come.

    Raises UsageError when rank 0 runs another version.
    """
    version, command, num_words, digest = first[:HEADER_WORDS].tolist()
    if version != VERSION:
        raise UsageError(
            f"Rank 0 sends plans in format {version} and this rank reads format {VERSION}: install the same version of "
            "sarathi-tune on every machine."
        )
    inline = first[HEADER_WORDS : HEADER_WORDS + num_words]
    return Command(command), digest, inline, num_words - len(inline)


def encode_document(document: Any) -> Words:
    """A JSON document as words, filled up with spaces."""
    text = json.dumps(document).encode()
    return np.frombuffer(text.ljust(-(-len(text) // 8) * 8), dtype=np.int64).copy()


def decode_document(words: Words) -> Any:
    """The document that `encode_document` was given."""
    return json.loads(words.tobytes())


def encode_plan(plan: StepPlan, page_tokens: int) -> Words:
    """The batch layout of a step: per slice its request, place, flags, sampling, and how many pages; the swaps; then
    all token ids, all pages in use, and the pages of the swaps."""
    words = [len(plan.slices), len(plan.swaps)]
    tokens: list[int] = []
    pages: list[int] = []
    for piece in plan:
        request, owned = piece.request, piece.request.pages[: -(-piece.stop // page_tokens)]
        flags = _DECODE * piece.is_decode | _SAMPLES * piece.samples
        temperature = struct.unpack("<q", struct.pack("<d", request.sampling.temperature))[0]
        seed = (request.sampling.seed + _SIGNED) % (2 * _SIGNED) - _SIGNED
        words += (request.request_id, piece.start, piece.count, flags, temperature, seed, len(owned))
        tokens += request.token_ids(piece.start, piece.stop)
        pages += owned
    for swap in plan.swaps:
        words += (_DIRECTIONS.index(swap.direction), swap.request_id, len(swap.pages))
        pages += swap.pages
    return np.array(words + tokens + pages, dtype=np.int64)


def decode_plan(words: Words) -> StepPlan:
    """The plan that `encode_plan` was given, over requests that know the tokens and the pages of this step only."""
    num_slices, num_swaps = words[:2].tolist()
    first_swap = 2 + num_slices * _SLICE_WORDS
    first_token = first_swap + num_swaps * _SWAP_WORDS
    slice_rows = words[2:first_swap].reshape(num_slices, _SLICE_WORDS).tolist()
    swap_rows = words[first_swap:first_token].reshape(num_swaps, _SWAP_WORDS).tolist()
    first_page = first_token + sum(row[2] for row in slice_rows)
    tokens = _Reader(words[first_token:first_page].tolist())
    pages = _Reader(words[first_page:].tolist())
    slices = tuple(_slice(row, tokens, pages) for row in slice_rows)
    swaps = tuple(Swap(_DIRECTIONS[way], request_id, tuple(pages.take(n))) for way, request_id, n in swap_rows)
    return StepPlan(slices, swaps)


class PlanDigest:
    """A 63-bit digest of all plans so far, in their order: equal on two ranks that compute the same steps."""

    def __init__(self) -> None:
        self._state = b""

    def add(self, words: Words) -> int:
        """The digest with one plan more, as `encode_plan` gives it for the slices that this rank will compute."""
        self._state = hashlib.blake2b(self._state + words.tobytes(), digest_size=8).digest()
        return int.from_bytes(self._state, "little") >> 1


class _Reader:
    """Takes numbers off the front of a list."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._position = 0

    def take(self, count: int) -> list[int]:
        self._position += count
        return self._numbers[self._position - count : self._position]


def _slice(row: list[int], tokens: _Reader, pages: _Reader) -> Slice:
    request_id, start, count, flags, temperature, seed, num_pages = row
    request = Request(
        request_id,
        _Window(start, tokens.take(count)),
        max_output_tokens=1,
        sampling=Sampling(struct.unpack("<d", struct.pack("<q", temperature))[0], seed),
        num_computed=start,
        pages=pages.take(num_pages),
    )
    return Slice(request, start, count, is_decode=bool(flags & _DECODE), samples=bool(flags & _SAMPLES))


class _Window(Sequence[int]):
    """A request's tokens of which only those from `start` on are known; indices count from the first token."""

    def __init__(self, start: int, tokens: list[int]) -> None:
        self._start = start
        self._tokens = tokens

    def __len__(self) -> int:
        return self._start + len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            index += len(self) if index < 0 else 0
            assert self._start <= index < len(self), f"token {index} is not in the window"
            return self._tokens[index - self._start]
        first, stop, _ = index.indices(len(self))
        assert first >= self._start or first >= stop, f"token {first} is not in the window"
        return self._tokens[first - self._start : stop - self._start]
