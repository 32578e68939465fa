"""What operations of Hopper's and Blackwell's machine code do, as far as `kernels.fences` asks: by number.

Source: names as nvdisasm 13.5.37 gives them, see `kernels.sass`; what they do, from these names, from NVIDIA's list of
instruction sets and from what ptxas makes of which PTX. A number that is not here is not known.
"""

from __future__ import annotations

from itertools import chain

FENCE, MEMBAR = 0x1C6, 0x192
BSYNC, BSSY, BRA, WARPSYNC, EXIT, KILL, BPT = 0x141, 0x145, 0x147, 0x148, 0x14D, 0x15B, 0x15C
CALL_REL, PHASECHK = 0x944, 0x5A7  # with the form of their operands: of the other forms something else is true

# Lets others go on, or has memory read or written by the async proxy. Not here, because ptxas 12.9, which was not seen
# to lose a wait, has none before them either: stores, atomics on shared memory, EXIT, PREEXIT. A flag that a plain
# store raises would go unseen; the kernels of this package raise theirs by REDG, and arrive by SYNCS and BAR.
PUBLISHES = {
    0x11D: "BAR",
    0x18A: "ATOM",
    0x18B: "ATOM",
    0x18E: "REDG",
    0x1A2: "ATOM",
    0x1A3: "ATOMG",
    0x1A6: "REDG",
    0x1A7: "SYNCS",  # but for PHASECHK, which only asks
    0x1A8: "ATOMG",
    0x1A9: "ATOMG",
    0x1B0: "ARRIVES",
    0x1B1: "SYNCS",
    0x1B2: "SYNCS",
    0x1B4: "UTMALDG",
    0x1B5: "UTMASTG",
    0x1B6: "UTMAREDG",
    0x1BA: "UBLKCP",
    0x1BB: "UBLKRED",
    0x1BD: "STAS",
    0x1BE: "REDAS",
    0x1C7: "UCGABAR",
    0x1CA: "UGETNEXTWORKID",
    0x1CB: "UMEMSETS",
    0x1E3: "UTCATOMSWS",
    0x1E6: "UTCSHIFT",
    0x1E7: "UTCCP",
    0x1E9: "UTCBAR",
    0x1EA: "UTCHMMA",
    0x1F0: "HGMMA",
    0x1F1: "IGMMA",
    0x1F2: "BGMMA",
    0x1F3: "QGMMA",
}

# Tells nobody anything, and the next instruction comes next.
SILENT = frozenset(
    chain(
        (0x001,),  # PMTRIG, the mark of a named span
        range(0x002, 0x00D),  # MOV, predicates, VOTE, selections, comparisons
        range(0x00F, 0x018),  # VIMNMX3, IADD3, LEA, LOP3, IABS, VABSDIFF, PRMT, IMNMX
        range(0x019, 0x02D),  # SHF, SGXT, BMSK, PLOP3, FMUL, FADD, FFMA, IMAD, IDP, doubles, CLMAD
        range(0x02D, 0x041),  # PREEXIT, ACQBULK, ELECT, halves, VIADD, MMA on registers, conversions, LDSM
        range(0x043, 0x04D),  # F2IP, STSM, I2FP, VIADDMNMX, VHMNMX, VIMNMX, FFMA2, FMUL2, FADD2, UVIRTCOUNT
        (0x076, 0x07B, 0x07C, 0x07D),  # FMNMX3, QFMA4, QMUL4, QADD4
        (0x082, 0x083, 0x084, 0x086, 0x087, 0x08C, 0x090, 0x091, 0x092, 0x096, 0x097),  # on uniform registers
        (*range(0x099, 0x0A0), 0x0A4, 0x0A5, *range(0x0B8, 0x0C0), 0x0CA, 0x0CC),  # and from them, ULDC
        (0x100, 0x101, 0x102, 0x104, 0x105, 0x106, 0x108, 0x109),  # FLO, BREV, FCHK, conversions, MUFU, POPC
        (0x113, 0x118, 0x119, 0x11A, 0x11C),  # FRND, NOP, S2R, DEPBAR, B2R
        (0x142, 0x145, 0x146, 0x155, 0x156, 0x157, 0x15D),  # BREAK, BSSY, YIELD, BMOV, NANOSLEEP
        (0x17E, 0x17F, *range(0x180, 0x18A)),  # LDG, STG, LD, LDC, LDL, LDS, ST, STL, STS, SHFL
        (0x18C, 0x18D, 0x1AE, 0x1AF),  # ATOMS, LDGSTS, LDGDEPBAR
        (0x18F, 0x192, 0x1A1, 0x1AB, 0x1AC),  # CCTL, MEMBAR, MATCH, ERRBAR, LDCU
        (0x1B7, 0x1B8, 0x1B9, 0x1BC),  # UTMACMDFLUSH, UTMAPF, UTMACCTL, UBLKPF
        (0x1C3, 0x1C4, 0x1C5, 0x1C6, 0x1C8),  # S2UR, REDUX, WARPGROUP, FENCE, USETMAXREG
        (0x1ED, 0x1EE),  # STTM, LDTM
    )
)
