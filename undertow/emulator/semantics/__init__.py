"""What every PTX instruction form does: one table, one file per chapter of the PTX manual.

Importing this package registers all rows; see `table` for how a row is written and read.
"""

from . import (
    asynchronous_copy,
    barriers,
    bulk_copy,
    cluster,
    comparison,
    control,
    conversion,
    data_movement,
    floating,
    half_precision,
    integer,
    logic,
    mbarrier,
    memory,
    tcgen05,
    tensor_copy,
    warp,
    warp_matrix,
    wgmma,
)  # fmt: skip
from .table import (
    CPP_FUNCTIONS,
    NO_EFFECTS,
    ROWS,
    Decoded,
    Effect,
    OperandSpec,
    Row,
    TypedOperand,
    UnsupportedPtx,
    decode,
)  # fmt: skip

__all__ = [
    "CPP_FUNCTIONS", "NO_EFFECTS", "ROWS", "Decoded", "Effect", "OperandSpec", "Row", "TypedOperand", "UnsupportedPtx",
    "asynchronous_copy", "barriers", "bulk_copy", "cluster", "comparison", "control", "conversion", "data_movement",
    "decode", "floating", "half_precision", "integer", "logic", "mbarrier", "memory", "tcgen05", "tensor_copy", "warp",
    "warp_matrix", "wgmma",
]  # fmt: skip
