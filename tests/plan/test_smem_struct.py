"""The DSL lays the plan's regions out where the plan says they are."""

from __future__ import annotations

import pytest

from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.schema import DType

cute = pytest.importorskip("cutlass.cute", reason="the kernel compiler is not installed")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_offsets_equal_those_of_a_cute_struct(schedule: str) -> None:
    """`_offsets` is private to the DSL: read here, built on nowhere."""
    from cutlass import BFloat16, Float32, Int32, Int64

    p = plan(schedule)
    element = {DType.BF16: BFloat16, DType.F32: Float32}
    fields: dict[str, object] = {
        "mbarriers": cute.struct.MemRange[Int64, len(p.mbarriers)],
        "tmem_pointer": Int32,
    }
    for region in p.smem:
        elements = cute.struct.MemRange[element[region.dtype], region.bytes // region.dtype.bytes]
        fields[region.name] = cute.struct.Align[elements, region.align]
    storage = cute.struct(type("Storage", (), {"__annotations__": fields}))
    expected = {"mbarriers": 0, "tmem_pointer": p.tmem_pointer_offset, **p.smem_offsets}
    assert dict(storage._offsets) == expected
    # The struct's size is rounded up to its largest alignment; the plan asks only for what is used.
    assert storage.size_in_bytes() == -(-p.smem_bytes // 1024) * 1024
