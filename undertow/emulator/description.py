"""How a launch description becomes memory: geometry checked, parameters as bytes, arrays at device addresses.

A tensor parameter of the CuTe DSL is the struct {u64 address, i32 dynamic dims..., padding to 8, i64 dynamic strides
in elements...}; static extents vanish from it. A tensor map is 128 opaque bytes to the kernel, so it is described by
meaning, not by bits.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from undertow import ptx
from undertow.plan.description import Ints, Launch, Opaque, Pointer, Tensor, TensorMap

from .errors import LaunchError
from .memory.global_memory import GlobalMemory, HostSpan, host_span
from .program import SHARED_BASE, Program
from .tensor_map import ELEMENT_BYTES, TensorMapGeometry

MAX_SHARED_BYTES = 227 * 1024
MAX_THREADS = 1024
MAX_CLUSTER = 16
"""CTAs of a cluster: 8 everywhere, 16 where the launch asks for a size that is not portable."""


@dataclass
class Resolved:
    """A launch held against a program: geometry checked, parameters as bytes, arrays at device addresses."""

    program: Program
    launch: Launch
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: np.ndarray
    memory: GlobalMemory
    tensor_maps: dict[int, TensorMapGeometry]
    variables: dict[str, int]
    shared_base: int
    shared_size: int
    cluster: tuple[int, int, int] = (1, 1, 1)

    @property
    def num_threads(self) -> int:
        """Threads per CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def num_ctas(self) -> int:
        """CTAs in the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def position(self, number: int) -> tuple[int, int, int]:
        """(x, y, z) of a CTA by its linear number, x fastest."""
        x, rest = number % self.grid[0], number // self.grid[0]
        return x, rest % self.grid[1], rest // self.grid[1]

    def clusters(self, order: Sequence[int] | None) -> list[list[int]]:
        """CTA numbers by cluster and rank; clusters in the order in which `order` (None: ascending) first names one."""
        numbers = range(self.num_ctas) if order is None else order
        if self.cluster == (1, 1, 1):
            return [[number] for number in numbers]
        corners = dict.fromkeys(
            tuple(p // c * c for p, c in zip(self.position(number), self.cluster, strict=True)) for number in numbers
        )
        return [self._members(corner) for corner in corners]

    def _members(self, corner: tuple[int, ...]) -> list[int]:
        width, height, depth = self.cluster
        return [
            ((corner[2] + z) * self.grid[1] + corner[1] + y) * self.grid[0] + corner[0] + x
            for z in range(depth) for y in range(height) for x in range(width)
        ]  # fmt: skip


def resolve(program: Program, launch: Launch) -> Resolved:
    """Check a launch against the kernel and place its arrays.

    Raises: LaunchError naming the argument, its value and what is allowed.
    """
    grid, block = _geometry("grid", launch.grid), _geometry("block", launch.block)
    cluster = _geometry("cluster", launch.cluster)
    _check_geometry(program, launch, block)
    _check_cluster(cluster, grid)
    parameters = program.kernel.parameters
    if len(launch.params) != len(parameters):
        raise LaunchError(f"params: {len(launch.params)} values for {len(parameters)} parameters of {program.name}")
    arrays = _ModuleArrays(program)
    spans: dict[int, HostSpan] = {}
    for place, value in enumerate(launch.params):
        if isinstance(value, (Tensor, Pointer, TensorMap)):
            spans[place] = host_span(value.array, value.name or f"params[{place}]")
    memory = GlobalMemory([*spans.values(), *arrays.spans.values()])
    variables = {name: memory.device_address(span) for name, span in arrays.spans.items()}
    arrays.fill(variables)
    block_bytes = np.zeros(-(-max(program.kernel.parameter_bytes, 1) // 16) * 16, np.uint8)
    tensor_maps = {}
    for place, (value, parameter) in enumerate(zip(launch.params, parameters, strict=True)):
        address = memory.device_address(spans[place]) if place in spans else 0
        if isinstance(value, TensorMap):
            tensor_maps[parameter.offset] = _tensor_map(value, address, place)
            data = bytes(128)
        else:
            data = _parameter_bytes(value, address, parameter, place)
        if len(data) != parameter.size:
            raise LaunchError(
                f"params[{place}]: {_describe(value)} has {len(data)} bytes, .param {place} of {program.name} has"
                f" {parameter.size}"
            )
        block_bytes[parameter.offset : parameter.offset + parameter.size] = np.frombuffer(data, np.uint8)
    shared_size = program.dynamic_base - SHARED_BASE + launch.dynamic_smem
    return Resolved(
        program, launch, grid, block, block_bytes, memory, tensor_maps, variables, SHARED_BASE, shared_size, cluster
    )


def _geometry(what: str, values: tuple[int, ...]) -> tuple[int, int, int]:
    values = tuple(values) + (1,) * (3 - len(values))
    if len(values) != 3 or any(not isinstance(v, int) or v < 1 for v in values):
        raise LaunchError(f"{what}: {values}; allowed are one to three positive integers")
    return values  # type: ignore[return-value]


def _check_geometry(program: Program, launch: Launch, block: tuple[int, int, int]) -> None:
    threads = block[0] * block[1] * block[2]
    directives = program.kernel.directives
    if threads > MAX_THREADS:
        raise LaunchError(f"block: {block} has {threads} threads; allowed are up to {MAX_THREADS}")
    required = directives.get("reqntid")
    if required and _geometry(".reqntid", required) != block:
        raise LaunchError(f"block: {block}; the kernel requires {_geometry('.reqntid', required)} (.reqntid)")
    largest = directives.get("maxntid")
    if largest and threads > int(np.prod(largest)):
        raise LaunchError(f"block: {block} has {threads} threads; the kernel allows {largest} (.maxntid)")
    total = program.dynamic_base - SHARED_BASE + launch.dynamic_smem
    if launch.dynamic_smem < 0 or total > MAX_SHARED_BYTES:
        raise LaunchError(
            f"dynamic_smem: {launch.dynamic_smem} bytes make {total} bytes of shared memory; allowed are up to"
            f" {MAX_SHARED_BYTES}"
        )


def _check_cluster(cluster: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
    if cluster[0] * cluster[1] * cluster[2] > MAX_CLUSTER:
        raise LaunchError(f"cluster: {cluster}; allowed are up to {MAX_CLUSTER} CTAs")
    if any(extent % size for extent, size in zip(grid, cluster, strict=True)):
        raise LaunchError(f"cluster: {cluster}; the grid {grid} must be a multiple of it")


def _describe(value: Any) -> str:
    return value if isinstance(value, str) else type(value).__name__


def _parameter_bytes(value: Any, address: int, parameter: ptx.Parameter, place: int) -> bytes:
    if isinstance(value, Tensor):
        return value.pack(address)
    if isinstance(value, Pointer):
        return struct.pack("<Q", address + value.offset_bytes)
    if isinstance(value, Ints):
        return struct.pack(f"<{len(value)}i", *value)
    if isinstance(value, Opaque):
        return bytes(value.num_bytes)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, (int, np.integer)):
        bits = 8 * parameter.size
        if bits not in (8, 16, 32, 64) or not -(1 << (bits - 1)) <= int(value) < 1 << bits:
            raise LaunchError(f"params[{place}]: {value} does not fit .param {place} of {parameter.size} bytes")
        return (int(value) & ((1 << bits) - 1)).to_bytes(parameter.size, "little")
    if isinstance(value, (float, np.floating)):
        return struct.pack("<d" if parameter.size == 8 else "<f", float(value))
    raise LaunchError(
        f"params[{place}]: {type(value).__name__}; allowed are Tensor, Pointer, Ints, TensorMap, Opaque, int, float,"
        " bytes"
    )


def _tensor_map(value: TensorMap, address: int, place: int) -> TensorMapGeometry:
    name = value.name or f"params[{place}]"
    if value.dtype not in ELEMENT_BYTES:
        raise LaunchError(f"{name}: dtype {value.dtype!r}; allowed are {', '.join(ELEMENT_BYTES)}")
    geometry = TensorMapGeometry(
        address + value.offset_bytes, value.dtype, tuple(value.dims), tuple(value.strides), tuple(value.box),
        value.swizzle, value.fill_nan,
    )  # fmt: skip
    geometry.validate(name)
    return geometry


class _ModuleArrays:
    """Host arrays for `.global` and `.const` variables of the module."""

    def __init__(self, program: Program):
        self._variables = {
            name: v
            for name, v in {**program.module.variables, **program.kernel.variables}.items()
            if v.space in ("global", "const")
        }
        self.arrays = {name: np.zeros(max(v.size or 0, 1), np.uint8) for name, v in self._variables.items()}
        self.spans = {name: host_span(array, f"variable {name}") for name, array in self.arrays.items()}

    def fill(self, addresses: dict[str, int]) -> None:
        """Write the initializers; addresses of other variables are known by now."""
        for name, variable in self._variables.items():
            size = max(ptx.TYPE_BITS.get(variable.type, 64) // 8, 1)
            for place, item in enumerate(variable.initializer):
                if isinstance(item, tuple):
                    bits = addresses.get(item[1], 0) + item[2]
                else:
                    from .numpy_backend.operands import immediate_bits

                    bits = immediate_bits(item, variable.type)
                self.arrays[name][place * size : (place + 1) * size] = np.frombuffer(
                    bits.to_bytes(size, "little"), np.uint8
                )
