"""Timing steps on the local device, and the profile document that holds what was timed. Submodules are imported one by
one: `measure.profile` and `measure.shapes` need no torch, `measure.bench` does."""
