"""CPU kernels compiled by numba: optional, each replaces several torch operators by one pass over memory.

They run on torch's own OpenMP threads where both load the same libgomp, so that switching between a matmul and a kernel
costs microseconds. Nothing here is imported unless numba is installed.
"""
