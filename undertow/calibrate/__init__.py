"""Microbenchmarks that measure the constants of a chip file on the GPU at hand; `undertow calibrate` runs them.

`probes` are kernels of the DSL, one file per kind; `units` say what is run of a unit and what it means; `run` launches;
`chipfile` writes. `probe` and `units` need no compiler.
"""
