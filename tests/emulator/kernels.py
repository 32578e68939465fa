"""Small kernels for tests: one instruction over a table of values, or a body with pointers to arrays."""

from __future__ import annotations

import numpy as np

from undertow import emulator as emu

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
NUMPY_TYPES = {
    "pred": "u4", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2", "f16": "u2", "bf16": "u2",
    "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8",
}  # fmt: skip


def kernel(body: str, parameters: int = 0, declarations: str = "", module: str = "") -> str:
    """A kernel `k` with that many u64 parameters p0, p1, ... already in %p0, %p1, ...; %t is the thread number."""
    names = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.u64 %p{i}, [p{i}];" for i in range(parameters))
    return (
        f"{HEADER}{module}\n.visible .entry k({names})\n{{\n"
        f".reg .b64 %p<{max(parameters, 1)}>; .reg .b32 %t;\n.reg .pred %q<16>; .reg .b16 %h<32>; .reg .b32 %r<64>;\n"
        f".reg .b64 %d<64>; .reg .f32 %f<32>; .reg .f64 %g<16>;\n{declarations}\n"
        f"mov.u32 %t, %tid.x;\n{loads}\n{body}\nret;\n}}\n"
    )


def run(text: str, *arrays: np.ndarray, **launch) -> emu.Result:
    """Launch `kernel(...)` text with pointers to arrays; keywords go to Launch, `options` and `observers` to launch."""
    options, observers = launch.pop("options", None), launch.pop("observers", ())
    launch = {"grid": (1,), "block": (32,), **launch}
    return emu.launch(text, emu.Launch(params=[emu.Pointer(a) for a in arrays], **launch), options, observers)


def evaluate(instruction: str, result: str | tuple[str, ...], **operands: tuple[str, list]):
    """Run an instruction on each row of values.

    instruction: text with {d} (and {e}) for results and {name} for operands; result: PTX type of d (and e);
    operands: name=(PTX type, values); half types are bit patterns, pred is 0 or 1.
    Returns the values of d as a list (a tuple of lists for two results).
    """
    results = (result,) if isinstance(result, str) else result
    length = max(len(values) for _, values in operands.values())
    outputs = [np.zeros(length, NUMPY_TYPES[t]) for t in results]
    inputs = [np.array(values, NUMPY_TYPES[t]) for t, values in operands.values()]
    names, declared, lines = {}, [], []
    for place, (name, (kind, _)) in enumerate(operands.items()):
        lines += _load(f"%i{place}", kind, len(outputs) + place, declared)
        names[name] = f"%i{place}"
    stores = []
    for place, kind in enumerate(results):
        names["de"[place]] = f"%o{place}"
        stores += _store(f"%o{place}", kind, place, declared)
    body = "\n".join([*lines, instruction.format(**names), *stores])
    text = kernel(body, len(outputs) + len(inputs), "\n".join(declared))
    run(text, *outputs, *inputs, block=(length,))
    values = [o.tolist() for o in outputs]
    return values[0] if len(values) == 1 else tuple(values)


def _place(parameter: int, size: int) -> str:
    return f"mul.wide.u32 %d0, %t, {size}; add.s64 %d1, %p{parameter}, %d0;"


def _load(register: str, kind: str, parameter: int, declared: list[str]) -> list[str]:
    size = np.dtype(NUMPY_TYPES[kind]).itemsize
    if kind == "pred":
        declared.append(f".reg .pred {register};")
        return [_place(parameter, size), "ld.global.u32 %r0, [%d1];", f"setp.ne.u32 {register}, %r0, 0;"]
    declared.append(f".reg .b{max(8 * size, 16)} {register};")
    return [_place(parameter, size), f"ld.global.b{8 * size} {register}, [%d1];"]


def _store(register: str, kind: str, parameter: int, declared: list[str]) -> list[str]:
    size = np.dtype(NUMPY_TYPES[kind]).itemsize
    if kind == "pred":
        declared.append(f".reg .pred {register};")
        return [_place(parameter, size), f"selp.u32 %r0, 1, 0, {register};", "st.global.u32 [%d1], %r0;"]
    declared.append(f".reg .b{max(8 * size, 16)} {register};")
    return [_place(parameter, size), f"st.global.b{8 * size} [%d1], {register};"]


def bits(values, dtype: str = "f4") -> list:
    """Floating values with these bit patterns."""
    return np.array(values, f"u{np.dtype(dtype).itemsize}").view(dtype).tolist()


def patterns(values, dtype: str = "f4") -> list[int]:
    """Bit patterns of floating values."""
    array = np.array(values, dtype)
    return array.view(f"u{array.dtype.itemsize}").tolist()
