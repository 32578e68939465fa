"""The C interface of the built library, as ctypes sees it. Structures mirror runtime/launch.cpp and machine.hpp."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache

from . import build, generate


class ProgramArguments(Structure):
    """An encoded kernel."""

    _fields_ = [
        ("code", c_void_p), ("consts", c_void_p), ("lists", c_void_p), ("specials", c_void_p), ("num_code", c_int64),
        ("consts_bytes", c_int64), ("num_lists", c_int64), ("num_specials", c_int64), ("regs_bytes", c_int64),
        ("predicate_bytes", c_int64), ("local_bytes", c_int64), ("num_instructions", c_int64),
    ]  # fmt: skip


class BufferArguments(Structure):
    """A device buffer over host memory."""

    _fields_ = [
        ("base", c_uint64), ("size", c_uint64), ("host", c_void_p), ("writable", c_int64), ("label", c_char_p)
    ]  # fmt: skip


class MapArguments(Structure):
    """A tensor map and its offset in the parameter block."""

    _fields_ = [
        ("place", c_uint64), ("address", c_uint64), ("dims", c_int64 * 5), ("strides", c_int64 * 5),
        ("box", c_int32 * 5), ("rank", c_int32), ("element_bytes", c_int32), ("swizzle", c_int32), ("type", c_int32),
        ("fill_nan", c_int32),
    ]  # fmt: skip


class LaunchArguments(Structure):
    """A launch."""

    _fields_ = [
        ("grid", c_int32 * 3), ("block", c_int32 * 3), ("cluster", c_int32 * 3), ("dynamic_smem", c_int64),
        ("shared_base", c_uint64), ("shared_size", c_uint64), ("parameters", c_void_p),
        ("buffers", POINTER(BufferArguments)),
        ("maps", POINTER(MapArguments)), ("cta_order", c_void_p), ("parameter_bytes", c_int64),
        ("num_buffers", c_int64), ("num_maps", c_int64), ("num_ctas", c_int64), ("completion", c_int64),
        ("random_schedule", c_int64), ("threads", c_int64), ("completion_seed", c_uint64), ("schedule_seed", c_uint64),
    ]  # fmt: skip


class Blocked(Structure):
    """One group of lanes that cannot go on."""

    _fields_ = [
        ("cta", c_int32), ("warp", c_int32), ("code", c_int32), ("kind", c_int32), ("mask", c_uint32),
        ("subject", c_uint64), ("detail", c_char * 160),
    ]  # fmt: skip


class Outcome(Structure):
    """What a launch did, or the fault that stopped it."""

    _fields_ = [
        ("executions", c_void_p), ("completions", c_void_p), ("instructions", c_int64), ("fault_kind", c_int32),
        ("cta", c_int32), ("warp", c_int32), ("code", c_int32), ("mask", c_uint32), ("is_completion", c_int32),
        ("num_blocked", c_int32), ("num_notes", c_int32), ("blocked", POINTER(Blocked)), ("max_blocked", c_int32),
        ("max_notes", c_int32), ("notes", c_void_p), ("rule", c_char * 48), ("fact", c_char * 1024),
    ]  # fmt: skip


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Build if need be, and load the library.

    Raises: CompilerMissing.
    """
    try:
        library = ctypes.CDLL(str(build.library()))
    except OSError as error:
        raise build.CompilerMissing(f"the built library does not load: {error}") from None
    library.undertow_program.restype = c_void_p
    library.undertow_program.argtypes = [POINTER(ProgramArguments)]
    library.undertow_free_program.argtypes = [c_void_p]
    library.undertow_free_program.restype = None
    library.undertow_run.argtypes = [c_void_p, POINTER(LaunchArguments), POINTER(Outcome)]
    library.undertow_run.restype = None
    library.undertow_machine_op.argtypes = [c_char_p]
    assert library.undertow_num_lane_handlers() == len(generate.all_forms())
    return library


@cache
def machine_op(name: str) -> int:
    """Number of a machine form of the runtime."""
    number = load().undertow_machine_op(name.encode())
    assert number >= 0, f"the runtime has no form {name}"
    return number
