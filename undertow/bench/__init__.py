"""How fast the backward pass is on this GPU, beside the attention libraries that are installed on it.

`work` counts, `workload` makes tensors, `providers` and `peers` compute, `gate` judges before any time counts,
`measure` times in turns, `machine` is the GPU, `records` keeps, `cycles` reads hardware counters, `charts` draws.
"""
