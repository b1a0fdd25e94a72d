"""Computing a step with torch: paged KV cache, ragged batches, attention back ends, the model, and the runner."""
