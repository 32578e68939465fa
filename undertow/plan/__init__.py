"""Kernel plans as data: what a kernel is made of, before any of it is code.

Nothing in this package imports cutlass, torch or NumPy, so the kernel, the emulator's labels, the documents and the
tests can all read the same plan.
"""
