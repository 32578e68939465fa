"""Launch descriptions in a file: what a kernel is handed, in TOML or JSON, for PTX that no plan describes.

`FORMAT` says what such a file holds; the help of the commands prints it.
"""

from __future__ import annotations

import json
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from undertow.cases import CaseError, Kernel
from undertow.plan.description import Ints, Launch, NumberLabels, Opaque, Pointer, Tensor, TensorMap

FORMAT = """\
    kernel = "scale"            # entry; may be left out if the PTX has one
    grid = [4]                  # up to three extents
    block = [64]
    dynamic_smem = 1024         # bytes; 0 if left out
    cluster = [2]               # CTAs of a cluster, up to three extents; one CTA if left out

    [arrays.x]
    dtype = "f32"               # u8 s8 u16 s16 u32 s32 u64 s64 f16 bf16 f32 f64
    shape = [256]
    fill = "random"             # zeros (default), random, count (0, 1, 2, ...), nan, or a number
    seed = 1                    # of a random fill; 0 if left out

    [[params]]                  # one entry per .param of the kernel, in order
    kind = "pointer"            # array, offset_bytes = 0
    array = "x"

    [[params]]
    kind = "float"              # value
    value = 0.5

Kinds of parameters and their keys: `pointer` (array, offset_bytes), `tensor` (array, dims, strides in elements),
`tensor_map` (array, dtype, dims, strides in bytes, box, swizzle, fill_nan, offset_bytes), `int` and `float` (value),
`ints` (values), `opaque` (num_bytes). Names for reports, all optional:

    [roles]                     # warps by role
    load = [0]
    compute = [1, 2, 3, 4]

    [smem]                      # [offset, bytes] in dynamic shared memory
    "ring.full" = [0, 8]

    [barriers]                  # named barriers by id
    compute = 1
"""

BF16 = "bf16"
NUMPY_TYPES = {
    "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32,
    "u64": np.uint64, "s64": np.int64, "f16": np.float16, BF16: np.uint16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
FILLS = ("zeros", "random", "count", "nan")
TOP_KEYS = {"kernel", "grid", "block", "dynamic_smem", "cluster", "arrays", "params", "roles", "smem", "barriers"}
PARAM_KEYS = {  # kind: (keys that must be there, keys that may)
    "pointer": ({"array"}, {"offset_bytes"}),
    "tensor": ({"array"}, {"dims", "strides"}),
    "tensor_map": ({"array", "dtype", "dims", "strides", "box"}, {"swizzle", "fill_nan", "offset_bytes"}),
    "int": ({"value"}, set()),
    "float": ({"value"}, set()),
    "ints": ({"values"}, set()),
    "opaque": ({"num_bytes"}, set()),
}


class FileLabels(NumberLabels):
    """The names that a launch file gives; what it does not name keeps its number."""

    def __init__(self, roles: Mapping[str, list], smem: Mapping[str, list], barriers: Mapping[str, int]):
        self._roles = {warp: name for name, warps in roles.items() for warp in warps}
        self._smem = sorted((offset, size, name) for name, (offset, size) in smem.items())
        self._barriers = {identifier: name for name, identifier in barriers.items()}

    def role(self, warp: int) -> str:
        return self._roles.get(warp) or super().role(warp)

    def smem(self, offset: int) -> str:
        index = bisect_right(self._smem, offset, key=lambda word: word[0]) - 1
        if index >= 0:
            start, size, name = self._smem[index]
            if offset < start + size:
                return name if offset == start else f"{name}+{offset - start:#x}"
        return super().smem(offset)

    def barrier_id(self, identifier: int) -> str:
        return self._barriers.get(identifier) or super().barrier_id(identifier)


def read_kernel(ptx_path: str | Path, launch_path: str | Path) -> Kernel:
    """The kernel in a PTX file under the launch that a TOML or JSON file describes.

    Raises: CaseError if a file cannot be read or the description holds something wrong.
    """
    try:
        text = Path(ptx_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CaseError(f"{ptx_path}: cannot be read: {error}") from error
    described = _load(Path(launch_path))
    try:
        return Kernel(Path(ptx_path).name, text, launch_of(described))
    except CaseError as error:
        raise CaseError(f"{launch_path}: {error}") from error


def launch_of(described: Mapping[str, Any]) -> Launch:
    """The launch that a file's content describes.

    Raises: CaseError naming the key, its value and what is allowed.
    """
    _known("the file", described, TOP_KEYS)
    for key in ("grid", "block"):
        if key not in described:
            raise CaseError(f"{key} is missing: must be a list of one to three whole numbers")
    arrays = {name: _array(name, entry) for name, entry in _table("arrays", described).items()}
    params = described.get("params", [])
    if not isinstance(params, list):
        raise CaseError(f"params={params!r}: must be a list of tables, one per .param")
    kernel = described.get("kernel")
    if kernel is not None and not isinstance(kernel, str):
        raise CaseError(f"kernel={kernel!r}: must be a name")
    return Launch(
        grid=tuple(_whole("grid", described["grid"])),
        block=tuple(_whole("block", described["block"])),
        params=tuple(_parameter(f"params[{place}]", entry, arrays) for place, entry in enumerate(params)),
        dynamic_smem=_number("dynamic_smem", described.get("dynamic_smem", 0)),
        cluster=tuple(_whole("cluster", described.get("cluster", [1]))),
        kernel=kernel,
        labels=_labels(described),
    )


def _load(path: Path) -> dict[str, Any]:
    readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}
    if path.suffix not in readers:
        raise CaseError(f"{path}: a launch description is a .toml or .json file")
    try:
        content = readers[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CaseError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CaseError(f"{path}: must hold a table, holds {type(content).__name__}")
    return content


def _labels(described: Mapping[str, Any]) -> FileLabels:
    roles, smem, barriers = (_table(key, described) for key in ("roles", "smem", "barriers"))
    for name, warps in roles.items():
        _whole(f"roles.{name}", warps)
    for name, place in smem.items():
        if len(_whole(f"smem.{name}", place)) != 2:
            raise CaseError(f"smem.{name}={place!r}: must be [offset, bytes]")
    for name, identifier in barriers.items():
        _number(f"barriers.{name}", identifier)
    return FileLabels(roles, smem, barriers)


def _array(name: str, entry: Any) -> np.ndarray:
    what = f"arrays.{name}"
    _known(what, entry, {"dtype", "shape", "fill", "seed"})
    dtype = entry.get("dtype")
    if dtype not in NUMPY_TYPES:
        raise CaseError(f"{what}.dtype={dtype!r}: must be one of {', '.join(NUMPY_TYPES)}")
    shape = _whole(f"{what}.shape", entry.get("shape"))
    if any(extent < 0 for extent in shape):
        raise CaseError(f"{what}.shape={shape!r}: extents must be 0 or more")
    fill = entry.get("fill", "zeros")
    if fill not in FILLS and (not isinstance(fill, int | float) or isinstance(fill, bool)):
        raise CaseError(f"{what}.fill={fill!r}: must be a number or one of {', '.join(FILLS)}")
    integral = dtype[0] in "us"
    if integral and (fill == "nan" or isinstance(fill, float)):
        raise CaseError(f"{what}.fill={fill!r}: {dtype} holds whole numbers")
    values = _values(fill, shape, integral, _number(f"{what}.seed", entry.get("seed", 0)))
    if dtype == BF16:
        return _bfloat16(values)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(NUMPY_TYPES[dtype])


def _values(fill: Any, shape: list[int], integral: bool, seed: int) -> np.ndarray:
    count = int(np.prod(shape, dtype=np.int64))
    if fill == "count":
        values = np.arange(count, dtype=np.int64)
    elif fill == "random":
        generator = np.random.default_rng(seed)
        values = generator.integers(-100, 100, count) if integral else generator.standard_normal(count)
    elif fill == "nan":
        values = np.full(count, np.nan)
    else:
        values = np.full(count, 0 if fill == "zeros" else fill)
    return values.reshape(shape)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Bit patterns, rounded to nearest even; a NaN stays one."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _parameter(what: str, entry: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if kind not in PARAM_KEYS:
        raise CaseError(f"{what}.kind={kind!r}: must be one of {', '.join(PARAM_KEYS)}")
    needed, allowed = PARAM_KEYS[kind]
    _known(what, entry, needed | allowed | {"kind"})
    for key in sorted(needed - entry.keys()):
        raise CaseError(f"{what}.{key} is missing: a {kind} needs {', '.join(sorted(needed))}")
    fields = {key: _field(f"{what}.{key}", key, value) for key, value in entry.items() if key != "kind"}
    if "array" in fields:
        name = fields["array"]
        if name not in arrays:
            raise CaseError(f"{what}.array={name!r}: must be one of {', '.join(arrays) or 'no arrays'}")
        fields.update(array=arrays[name], name=name)
    makers = {"pointer": Pointer, "tensor": Tensor, "tensor_map": TensorMap, "opaque": Opaque}
    if kind in makers:
        return makers[kind](**fields)
    if kind == "ints":
        return Ints(*fields["values"])
    value = fields["value"]
    if kind == "int" and not isinstance(value, int):
        raise CaseError(f"{what}.value={value!r}: must be a whole number")
    return value if kind == "int" else float(value)


def _field(what: str, key: str, value: Any) -> Any:
    """One key of a parameter, checked by what the key holds."""
    if key in ("dims", "strides", "box", "values"):
        return tuple(_whole(what, value))
    if key in ("swizzle", "offset_bytes", "num_bytes"):
        return _number(what, value)
    if key == "fill_nan" and not isinstance(value, bool):
        raise CaseError(f"{what}={value!r}: must be true or false")
    if key == "value" and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise CaseError(f"{what}={value!r}: must be a number")
    return value


def _known(what: str, entry: Any, keys: set[str]) -> None:
    if not isinstance(entry, dict):
        raise CaseError(f"{what}={entry!r}: must be a table with {', '.join(sorted(keys))}")
    for key in entry:
        if key not in keys:
            raise CaseError(f"{what}: unknown key {key!r}; allowed are {', '.join(sorted(keys))}")


def _table(key: str, described: Mapping[str, Any]) -> dict[str, Any]:
    value = described.get(key, {})
    if not isinstance(value, dict):
        raise CaseError(f"{key}={value!r}: must be a table")
    return value


def _whole(what: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        raise CaseError(f"{what}={value!r}: must be a list of whole numbers")
    return value


def _number(what: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CaseError(f"{what}={value!r}: must be a whole number, 0 or more")
    return value
