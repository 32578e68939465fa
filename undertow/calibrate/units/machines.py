"""How the probes of matrix instructions differ between the architectures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """module: of the probes. elsewhere: where operand a may be, instead of in shared memory. rows: of an instruction.

    issuers: warpgroups that issue when a rate is measured. threads: of one of them, with what the probes need besides.
    smem: bytes of operands and barriers. blocks_at: first byte behind them, for what blocks load and store.
    """

    module: str
    elsewhere: str
    rows: int
    issuers: int
    threads: int
    smem: int
    blocks_at: int


MACHINES = {
    "sm_90a": Machine("wgmma", "registers", 64, 2, 128, 32768, 32768),
    "sm_100a": Machine("tcgen05", "tensor", 128, 1, 128, 33792, 34816),
}
K = 16  # of an instruction


def operand_passes(machine: Machine, n: int, a: str) -> float:
    """Passes of 128 bytes that the operands of an instruction take through the port of shared memory."""
    rows = n + (machine.rows if a == "shared" else 0)
    return rows * K * 2 / 128
