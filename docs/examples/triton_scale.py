"""A Triton kernel, compiled for sm_100a and executed under all observers on a machine without a GPU.

python docs/examples/triton_scale.py
"""

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from undertow import emulator as emu
from undertow.emulator.observers import all_observers


@triton.jit
def scale(y, x, a, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, a * tl.load(x + i, mask=i < n), mask=i < n)


types = {"y": "*fp32", "x": "*fp32", "a": "fp32", "n": "i32", "BLOCK": "constexpr"}
source = ASTSource(fn=scale, signature=types, constexprs={"BLOCK": 128})
ptx = triton.compile(source, target=GPUTarget("cuda", 100, 32)).asm["ptx"]

x, y = np.arange(300, dtype=np.float32), np.full(300, np.nan, np.float32)
params = [emu.Pointer(y), emu.Pointer(x), 0.5, len(x), 0, 0]  # Triton adds two pointers to scratch memory
launch = emu.Launch(grid=(3,), block=(128,), params=params)
result = emu.launch(ptx, launch, emu.Options(backend="numpy"), all_observers())
assert (y == 0.5 * x).all() and not result.findings
print(f"{result.instructions} instructions, nothing found")
