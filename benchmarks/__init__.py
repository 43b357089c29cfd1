"""Benchmarks of attention and the cache's other operations, beside what else users could run.

`python -m benchmarks run` times rows of `benchmarks.work`. The sides of a row, ours and each peer,
get the same tensors. What makes a figure one that can be believed is in `benchmarks.measure`.
"""
