"""Tensor copies through tensor maps: PTX ISA, "cp.async.bulk.tensor", tile mode, one to five dimensions."""

from functools import partial

import numpy as np

from ..async_agents import AsyncOperation
from ..errors import MemoryFault, UnsupportedPtx
from ..tensor_map import TensorMapGeometry, box_shape, chunk_index
from .asynchronous_copy import CHAPTER
from .bulk_copy import ASYNC_LOAD, ASYNC_STORE, REDUCE_OPS, AsyncAccess, destinations, reduce_bytes
from .lane_values import distinct
from .mbarrier import Signals, shared_address
from .table import NO_EFFECTS, Effect, machine

DIMS = "1d 2d 3d 4d 5d"


def _find_map(lanes, decoded, address: int, num_coordinates: int) -> TensorMapGeometry:
    geometry = lanes.cta.machine.tensor_map(address)
    rank = int(decoded.mods["dim"][0])
    if rank != len(geometry.dims) or num_coordinates != rank:
        raise MemoryFault(
            f"{rank}-dimensional tensor copy with {num_coordinates} coordinates through a map of"
            f" {len(geometry.dims)} dimensions"
        )
    return geometry


def _signed(value: int) -> int:
    return value - (1 << 32) if value & 0x80000000 else value


def _check_shared(cta, address: int, geometry: TensorMapGeometry) -> None:
    if address % 128:
        raise MemoryFault(f"tensor copy at shared address {address:#x}, which is not a multiple of 128")
    cta.shared.check_range(address, geometry.box_bytes)


def read_box(memory, geometry: TensorMapGeometry, coordinates: tuple[int, ...]) -> np.ndarray:
    """Read a box from global memory as bytes; what lies outside the tensor is zero, or NaN if the map says so."""
    box = np.zeros(box_shape(geometry), np.uint8)
    if geometry.fill_nan:
        pattern = {"f16": "7fff", "bf16": "7fff", "f32": "7fffffff", "tf32": "7fffffff", "f64": "7fffffffffffffff"}
        value = np.frombuffer(bytes.fromhex(pattern[geometry.dtype]), np.uint8)[::-1]
        box.reshape(-1, geometry.element)[:] = value
    window = geometry.window(coordinates)
    if not window.is_empty:
        box[window.box_slices()] = window.view(memory.region(window.address, 1))
    return box


def _make_load(decoded, bus):
    publish, signal = AsyncAccess(decoded, bus), Signals(decoded, bus)
    spreads = "mask" in decoded.operands

    def run(operation, geometry, corner):
        lanes, details = operation.lanes, operation.details
        target, num_bytes = details["shared"], geometry.box_bytes
        box = read_box(lanes.cta.machine.global_memory, geometry, corner)
        chunks = chunk_index(target, num_bytes, geometry.swizzle)
        if publish.sink:
            window = geometry.window(corner)
            if not window.is_empty:
                publish(operation, "read", "global", window.row_addresses(), window.row_bytes)
        for home in details["homes"]:
            home.shared.check_range(target, num_bytes)
            home.shared.view(8, 2)[chunks] = box.view(np.uint64).reshape(-1, 2)
            publish(operation, "write", "shared", target, num_bytes, home)
            signal(lanes, "complete_tx", (home, details["mbarrier"]), num_bytes, operation)

    def handler(lanes, mask, dst, tensor, barrier, *rest):
        address, coordinates = tensor
        cta = lanes.cta
        ranks = rest[:1] if spreads else ()
        operands = (dst, barrier, *ranks, address, *coordinates)
        for position, (target, word, *values) in distinct(lanes, mask, *operands):
            to = values.pop(0) if spreads else None
            where, *point = values
            geometry = _find_map(lanes, decoded, where, len(point))
            corner = tuple(_signed(c) for c in point)
            homes, target, word = destinations(cta, target, word, to)
            for home in homes:
                _check_shared(home, target, geometry)
            details = {
                "shared": target, "bytes": geometry.box_bytes, "mbarrier": word, "coordinates": corner, "homes": homes
            }  # fmt: skip
            effect = partial(run, geometry=geometry, corner=corner)
            thread = int(lanes.index[position])
            cta.engines.issue(AsyncOperation("tensor_load", decoded, lanes, thread, effect, (), details))

    return handler


for _multicast, _mask in (("", ""), (".multicast::cluster", ", mask:u16")):
    machine(
        f"cp.async.bulk.tensor.<dim>.<dst>.global{{.tile}}.mbarrier::complete_tx::bytes{_multicast}"
        f"{{.cta_group::1}}{{.L2::cache_hint}} [d], [a:tensor], [m]{_mask}{{, policy:b64}}",
        chapter=CHAPTER, effects=ASYNC_LOAD, dim=DIMS, dst="shared::cta shared::cluster",
    )(_make_load)  # fmt: skip


def _make_store(reduces: bool):
    def make(decoded, bus):
        publish = AsyncAccess(decoded, bus)
        op = decoded.mods["op"] if reduces else None

        def handler(lanes, mask, tensor, src, policy=None):
            address, coordinates = tensor
            cta = lanes.cta
            for position, (source, where, *point) in distinct(lanes, mask, src, address, *coordinates):
                geometry = _find_map(lanes, decoded, where, len(point))
                source = shared_address(source)
                corner = tuple(_signed(c) for c in point)
                _check_shared(cta, source, geometry)

                def run(operation, geometry=geometry, source=source, corner=corner):
                    memory = cta.machine.global_memory
                    cta.shared.check_range(source, geometry.box_bytes)
                    chunks = chunk_index(source, geometry.box_bytes, geometry.swizzle)
                    box = cta.shared.view(8, 2)[chunks].view(np.uint8).reshape(box_shape(geometry))
                    window = geometry.window(corner)
                    cta.progress += 1
                    publish(operation, "read", "shared", source, geometry.box_bytes)
                    if window.is_empty:
                        return
                    region = memory.region(window.address, 1)
                    memory.check_writable(region)
                    place, data = window.view(region), box[window.box_slices()]
                    place[...] = data if op is None else reduce_bytes(op, _reduce_type(geometry, op), place, data)
                    if publish.sink:
                        kind = "write" if op is None else "atomic"
                        publish(operation, kind, "global", window.row_addresses(), window.row_bytes)

                engine = "bulk_reduce" if reduces else "bulk_store"
                details = {"shared": source, "bytes": geometry.box_bytes, "coordinates": corner}
                operation = AsyncOperation(engine, decoded, lanes, int(lanes.index[position]), run, (), details)
                cta.engines.join_group("bulk", operation)
                cta.engines.issue(operation)

        return handler

    return make


def _reduce_type(geometry: TensorMapGeometry, op: str) -> str:
    if geometry.dtype in ("tf32", "u8", "u16"):
        raise UnsupportedPtx(f"reducing tensor copy .{op} of {geometry.dtype}")
    return geometry.dtype


machine(
    "cp.async.bulk.tensor.<dim>.global.shared::cta{.tile}.bulk_group{.L2::cache_hint} [d:tensor], [a]{, policy:b64}",
    chapter=CHAPTER, effects=ASYNC_STORE, dim=DIMS,
)(_make_store(False))  # fmt: skip
machine(
    "cp.reduce.async.bulk.tensor.<dim>.global.shared::cta.<op>{.tile}.bulk_group{.L2::cache_hint} "
    "[d:tensor], [a]{, policy:b64}",
    chapter=CHAPTER, effects=(*ASYNC_STORE, Effect("read", "global", "async")), dim=DIMS, op=REDUCE_OPS,
)(_make_store(True))  # fmt: skip
machine(
    "cp.async.bulk.prefetch.tensor.<dim>.L2.global{.tile}{.L2::cache_hint} [a:tensor]{, policy:b64}",
    chapter=CHAPTER, effects=NO_EFFECTS, dim=DIMS,
)(lambda decoded, bus: lambda lanes, mask, *sources: None)  # fmt: skip
