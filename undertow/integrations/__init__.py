"""undertow inside what people already run: torch's attention, flash-attn-4's backward, Hugging Face models.

Importing a module of this room activates nothing; each has a call that does, and one that undoes it. What the kernels
do not support goes to whoever computed it before, is logged once, and raises in strict mode.
"""
