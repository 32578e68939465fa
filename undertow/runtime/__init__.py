"""Compiled calls on a GPU: objects made ahead of time, kept on disk, loaded once, launched on torch's current stream.

`architectures` says which kernels exist, `objects` gets a compiled call, `device` launches it on tensors.
"""
