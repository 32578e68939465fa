"""Compile what `hopper_measure.py` measures on an H200, here: our backward passes, and flash-attn-4's kernels.

    python tools/hopper_export.py FOLDER      writes one shared library a name; needs g++, and flash-attn-4 for peers

Nothing of it needs a GPU. Each library offers the tvm-ffi function `backward_pass`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hopper_shapes import MASKS

from undertow.kernels.compile import FUNCTION, OBJECT
from undertow.kernels.sm90.call import variant_named
from undertow.plan.schema import DType
from undertow.runtime import objects
from undertow.runtime.architectures import architecture

OURS = {  # name of the library: variant and element type
    "dense": ("dense", DType.BF16),
    "causal": ("causal", DType.BF16),
    "window": ("window", DType.BF16),
    "left": ("left", DType.BF16),
    "causal_packed": ("causal-packed", DType.BF16),
    "dense_f16": ("dense", DType.F16),
    "causal_f16": ("causal", DType.F16),
    "dense_sink_dlse": ("dense-dlse-sink", DType.BF16),
    "dense_softcap": ("dense-softcap", DType.BF16),
    "causal_softcap": ("causal-softcap", DType.BF16),
    "dense_split": ("dense-split", DType.BF16),
    "causal_split": ("causal-split", DType.BF16),
    "dense_split_f16": ("dense-split", DType.F16),
    "causal_packed_split_deterministic": ("causal-packed-split-deterministic", DType.BF16),
    "dense_deterministic": ("dense-deterministic", DType.BF16),
    "causal_deterministic": ("causal-deterministic", DType.BF16),
    "window_deterministic": ("window-deterministic", DType.BF16),
    "causal_packed_deterministic": ("causal-packed-deterministic", DType.BF16),
    "dense_packed_deterministic": ("dense-packed-deterministic", DType.BF16),
}
PEER_KERNELS = {"Preprocess": "fa4_preprocess", "Postprocess": "fa4_postprocess"}


def export_ours(folder: Path) -> None:
    arch = architecture("sm90")
    for name, (variant, dtype) in OURS.items():
        entry = objects.precompile(arch, variant_named(variant, dtype))
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "call.o"
            path.write_bytes(entry.files[OBJECT])
            _link(path, folder / f"{name}.so")


def export_peers(folder: Path) -> None:
    """Let flash-attn-4 compile for fake tensors, and keep what it compiles."""
    import cutlass.cute as cute
    import torch
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    made: dict[str, Any] = {}
    compile_of_cute = cute.compile

    def keep(host: Any, *arguments: Any, **options: Any) -> Any:
        compiled = compile_of_cute(host, *arguments, **options)
        made.setdefault(type(host).__name__.removeprefix("FlashAttentionBackward"), compiled)
        return compiled

    cute.compile = keep  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    for name, (kv_heads, causal) in MASKS.items():
        made.clear()
        with FakeTensorMode():
            rows, keys = (torch.empty(8, 8192, n, 64, dtype=torch.bfloat16, device="cuda") for n in (32, kv_heads))
            lse = torch.empty(8, 32, 8192, device="cuda")
            interface._flash_attn_bwd(rows, keys, keys, rows, rows, lse, causal=causal)
        for kind, compiled in made.items():
            if name == "dense" or kind not in PEER_KERNELS:
                with tempfile.TemporaryDirectory() as scratch:
                    path = Path(scratch) / "kernel.o"
                    compiled.export_to_c(object_file_path=str(path), function_name=FUNCTION)
                    _link(path, folder / f"{PEER_KERNELS.get(kind, f'fa4_{name}')}.so")


def _link(path: Path, library: Path) -> None:
    subprocess.run(["g++", "-shared", "-o", str(library), str(path)], check=True)
    print(library.name)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if sys.argv[2:] == ["peers"]:
        export_peers(folder)
        return
    export_ours(folder)
    target = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    peers = [sys.executable, __file__, str(folder), "peers"]  # a process of its own: these are read on import
    subprocess.run(peers, env={**os.environ, **target}, check=True)


if __name__ == "__main__":
    main()
