"""Compiles the Triton kernels for GPUs that needn't be there, with the tiles that the back end uses.

Run as a process of its own (`python -m tests.runtime.triton_compiled`), where no interpreter is switched on. Prints a
JSON list: per kernel, shared memory and whether it uses tensor cores.
"""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sarathi_tune.runtime.attention import triton_kernel
from sarathi_tune.runtime.attention.triton_paged import MAX_SPLITS, Tile, chunk_tile, decode_tile

#: A100 and H100.
CAPABILITIES = (80, 90)
#: Name in the signature, bytes, query heads per key head, head size, window. The last one is the largest.
MODELS = (("bf16", 2, 4, 128, 0), ("fp32", 4, 3, 64, 100), ("bf16", 2, 8, 256, 0))


def compiled(
    kernel: Any, capability: int, dtype: str, tile: Tile, constants: dict[str, Any], partial: str
) -> dict[str, Any]:
    """Compile one kernel. `partial`: dtype of the partial sums."""
    pointers = {
        **dict.fromkeys(("query", "keys", "values", "output"), f"*{dtype}"),
        **dict.fromkeys(("partial_sums", "partial_weights"), f"*{partial}"),
        **dict.fromkeys(("query_starts", "key_starts", "page_table"), "*i32"),
        "score_scale": "fp32",
    }
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    aligned = [
        index
        for index, name in enumerate(names)
        if signature[name].startswith("*") or (name.endswith("_stride") and name != "table_stride")
    ]
    source = ASTSource(
        kernel,
        signature,
        {name: value for name, value in constants.items() if name in names},
        {(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "name": kernel.__name__,
        "capability": capability,
        "shared_bytes": result.metadata.shared,
        "uses_tensor_cores": "mma" in result.asm["ptx"],
    }


def kernels(capability: int) -> list[dict[str, Any]]:
    """All kernels for one kind of GPU."""
    results = []
    for dtype, itemsize, group, head_dim, window in MODELS:
        constants = {
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "WINDOW": window,
            "PAGE_TOKENS": 16,
            "BLOCK_D": head_dim,
            "MAX_SPLITS": MAX_SPLITS,
            "WIDEN": False,
        }
        for tile, rows, is_split in (
            (decode_tile(group, head_dim, itemsize), 1, True),
            (chunk_tile(group, head_dim, itemsize), None, False),
        ):
            tiled = {
                **constants,
                "BLOCK_M": tile.rows,
                "BLOCK_Q": rows or tile.rows // group,
                "BLOCK_N": tile.keys,
                "ONE_ROW": is_split,
                "IS_SPLIT": is_split,
            }
            partial = "fp32" if is_split else dtype
            results.append(compiled(triton_kernel.attend, capability, dtype, tile, tiled, partial))
        results.append(compiled(triton_kernel.combine, capability, dtype, tile, constants, "fp32"))
    return results


def main() -> None:
    """Compile for all."""
    print(json.dumps([result for capability in CAPABILITIES for result in kernels(capability)]))


if __name__ == "__main__":
    main()
