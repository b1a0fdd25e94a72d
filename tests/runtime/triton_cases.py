"""What the Triton kernel computes in Triton's interpreter, beside the reference.

Run as a process of its own (`python -m tests.runtime.triton_cases`): TRITON_INTERPRET must be set before triton is
imported, and would change every kernel of the process. Prints one JSON object: per case, the largest difference.
"""

import json
import os
from dataclasses import dataclass

from sarathi_tune.runtime.attention.base import AttentionShape

Lengths = tuple[tuple[int, int], ...]

#: Keys per decode: 1, page - 1, page, page + 1 and 1000 of them, for pages of 16.
DECODES: Lengths = ((0, 1), (14, 1), (15, 1), (16, 1), (999, 1))
#: (prefix, count): with and without a prefix, on and off page and tile borders; a lone token among them.
CHUNKS: Lengths = ((33, 20), (0, 17), (96, 32), (200, 1), (5, 43))


@dataclass(frozen=True, slots=True)
class Case:
    """`processors`: more than the batch has sequences makes decodes split along their keys. `padded`: the batch seen
    through a captured step's buffers, of so many rows."""

    shape: AttentionShape
    lengths: Lengths = DECODES + CHUNKS
    dtype: str = "float32"
    page_tokens: int = 16
    processors: int = 1
    by_head: bool = False
    padded: int | None = None


def _shape(group: int, head_dim: int, kv_heads: int = 1, window: int | None = None) -> AttentionShape:
    return AttentionShape(group * kv_heads, kv_heads, head_dim, window)


CASES = {
    **{
        f"group {group}, heads of {head_dim}": Case(_shape(group, head_dim), processors=group % 2 * 50)
        for group in (1, 3, 4, 8)
        for head_dim in (64, 128)
    },
    "several key heads": Case(_shape(4, 64, kv_heads=3), lengths=((40, 1), (7, 1), (20, 9))),
    "cache laid out by head": Case(_shape(2, 64, kv_heads=2), lengths=((40, 1), (7, 1), (20, 9)), by_head=True),
    "decodes in 4 parts": Case(_shape(4, 64), lengths=DECODES, processors=50),
    "decodes in one part": Case(_shape(4, 64), lengths=DECODES, processors=0),
    "decodes only behind a chunk": Case(_shape(4, 64), lengths=((10, 30), *DECODES)),
    "many short sequences": Case(_shape(2, 64), lengths=tuple((n, n % 3 + 1) for n in range(30))),
    "one long chunk": Case(_shape(4, 64), lengths=((100, 150),)),
    "window of 1": Case(_shape(3, 64, window=1)),
    "window of 17": Case(_shape(3, 64, window=17)),
    "window of 300, split": Case(_shape(4, 64, window=300), processors=50),
    "heads of 80": Case(_shape(2, 80), lengths=((40, 1), (20, 9))),
    "heads of 256": Case(_shape(2, 256), lengths=((40, 1), (20, 9))),
    "heads of 8": Case(_shape(2, 8), lengths=((40, 1), (20, 9))),
    "pages of 32": Case(_shape(2, 64), lengths=((30, 1), (31, 1), (32, 1), (33, 40)), page_tokens=32),
    "pages of 1": Case(_shape(2, 64), lengths=((30, 1), (33, 40)), page_tokens=1),
    "bfloat16": Case(_shape(4, 64), lengths=((999, 1), (15, 1), (33, 20)), dtype="bfloat16", processors=50),
    "float16": Case(_shape(4, 64), lengths=((999, 1), (15, 1), (33, 20)), dtype="float16"),
    "padded to 8 rows": Case(_shape(4, 64), lengths=DECODES, padded=8),
    "padded and split": Case(_shape(4, 64, window=300), lengths=DECODES, padded=8, processors=50),
}


def difference(case: Case) -> float:
    """The largest difference between the kernel and the reference; NaN when either has one."""
    import torch

    from sarathi_tune.runtime.attention.reference import ReferenceAttention
    from sarathi_tune.runtime.attention.triton_paged import TritonAttention
    from sarathi_tune.runtime.graphs import StepBuffers
    from tests.runtime.ragged import CPU, ragged

    inputs = ragged(
        case.shape,
        case.lengths,
        dtype=getattr(torch, case.dtype),
        page_tokens=case.page_tokens,
        by_head=case.by_head,
    )
    expected = ReferenceAttention(case.shape)(inputs.query, inputs.cache, inputs.batch)
    attention = TritonAttention(case.shape, case.page_tokens, num_processors=case.processors)
    if case.padded is None:
        computed = attention(inputs.query, inputs.cache, inputs.batch)
    else:
        buffers = StepBuffers(inputs.pages, case.padded, 2000, CPU)  # type: ignore[arg-type]
        # Another step was there before: a longer batch of other lengths and pages.
        before = ragged(case.shape, ((700, 1),) * case.padded, seed=1)
        buffers.fill(before.batch, case.padded)
        buffers.fill(inputs.batch, case.padded)
        rows = len(inputs.query)
        query = torch.cat([inputs.query, inputs.query.new_ones(case.padded - rows, *inputs.query.shape[1:])])
        computed = attention(query, inputs.cache, buffers.view(case.padded))[:rows]
    return float((computed.float() - expected.float()).abs().max())


def main() -> None:
    """Run all cases."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "the interpreter must be switched on before triton is imported"
    import torch

    torch.set_num_threads(1)
    print(json.dumps({name: difference(case) for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
