"""FlashAttention backward for Blackwell at head dim 64, and the machine that proves it without a GPU.

Importing this package loads nothing heavy: neither torch nor the kernel compiler. Ask for the room you need:
`undertow.reference` (float64 mathematics), `undertow.emulator` (runs PTX), `undertow.plan` (kernels as data),
`undertow.kernels` (the kernels), `undertow.emulated` (all of it at once: tensors in, gradients out).
"""

__version__ = "0.1.0"
