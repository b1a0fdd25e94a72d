"""Benchmarks of single kernels, each beside the measured ceiling of the device; see README.md."""
