"""Run in a process of its own: compile flash-attn-4's backward for fake tensors and leave its PTX in a folder.

Usage: python compile_child.py FOLDER [sm_100 | sm_90] [causal]
The package asks the environment, not its caller, which GPU to compile for; here that environment ends with the process.
The kernels take shapes as parameters, so one compilation serves all of them.
"""

from __future__ import annotations

import os
import sys

MULTIPROCESSORS = {"sm_100": "148", "sm_90": "132"}


def main(folder: str, arch: str = "sm_100", mask: str = "") -> None:
    os.environ.update(
        CUTE_DSL_ARCH=f"{arch}a",
        CUTE_DSL_DUMP_DIR=folder,
        CUTE_DSL_KEEP="ptx",
        CUTE_DSL_LINEINFO="1",
        FLASH_ATTENTION_ARCH=arch,
        FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="0",  # a kernel that comes from its cache leaves no PTX
        FLASH_ATTENTION_NUM_SMS=MULTIPROCESSORS[arch],
    )
    import torch
    from flash_attn.cute.interface import _flash_attn_bwd
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, out, dout = (torch.empty(1, 256, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        k, v = (torch.empty(1, 384, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        lse = torch.empty(1, 2, 256, dtype=torch.float32, device="cuda")
        _flash_attn_bwd(q, k, v, out, dout, lse, causal=mask == "causal")


if __name__ == "__main__":
    main(*sys.argv[1:])
