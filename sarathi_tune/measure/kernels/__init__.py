"""Each kernel of a step alone, beside what the device can do at most.

`figure` is what is reported, and loads no torch; `suite` runs the others. The kernels are those that the engine picks
on this device, over a model's own shapes: attention over a paged cache, linear layers, the write into the KV cache,
sampling, all-reduce.
"""
