"""Block-diagonal attention over ragged batches and a paged KV cache: one file per back end, `pick` chooses."""
