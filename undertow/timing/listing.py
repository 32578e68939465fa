"""What the assembler made of a kernel, beside what this model takes it for: instructions per tile and warp by class.

The listing is nvdisasm's, of the cubin that the DSL keeps. Nothing here changes a prediction.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import TimingError
from .trace import Trace
from .uops import Kind, Unit

CLASSES = {
    "fma": "FMUL FADD FFMA", "packed fma": "FMUL2 FADD2 FFMA2", "mufu": "MUFU", "convert": "F2FP",
    "alu": "FMNMX FSEL SEL LOP3 SHF IADD3 ISETP FSETP PLOP3 LEA PRMT VIADD VIMNMX MOV CS2R", "multiply": "IMAD",
    "uniform": "UIADD3 UIMAD ULOP3 USHF ULEA UMOV USEL UISETP UPLOP3 UPRMT ULDC R2UR S2UR LDCU", "shuffle": "SHFL",
    "load": "LDS LDSM", "store": "STS STSM", "wgmma": "HGMMA", "mma": "UTCHMMA", "commit": "UTCBAR",
    "tmem load": "LDTM", "tmem store": "STTM", "mbarrier": "SYNCS", "barrier": "BAR", "fence": "FENCE",
    "copy": "UTMALDG UBLKCP UBLKRED UTMASTG", "collective": "ELECT VOTE VOTEU",
}  # fmt: skip
"""Class -> opcodes of the listing. Others (branches, NOP, MEMBAR, WARPGROUP) have none."""
TELLING = [name for name in CLASSES if name not in ("uniform", "alu", "multiply", "collective", "fence")]
"""Classes that tell one loop from another: the assembler has little choice in them."""
_OF_OPCODE = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes.split()}
_OF_UNIT = {Unit.PREDICATE: "alu", Unit.SPECIAL: "alu"}
_OF_KIND = {
    Kind.ARRIVE: "mbarrier", Kind.ASK: "mbarrier", Kind.BARRIER_ARRIVE: "barrier", Kind.BARRIER_SYNC: "barrier"
}  # fmt: skip
MIN_LOOP = 40  # instructions; a loop around a wait has fewer, one over tiles more
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)([^;]*);")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_JUMP = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Difference:
    """Instructions of a class in one tile of one warp: in the model, and in the listing's loop."""

    role: str
    name: str
    modelled: float
    listed: int


def disassembled(cubin: bytes) -> str:
    """The listing of a cubin.

    Raises: TimingError where there is no nvdisasm: on the path, with the CUDA toolkit's wheel, or with triton.
    """
    tool = shutil.which("nvdisasm") or _with_triton()
    if tool is None:
        raise TimingError("no nvdisasm: pip install triton, or put the CUDA toolkit's on the path")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise TimingError(f"nvdisasm: {done.stderr.strip()[:500]}")
    return done.stdout


def _with_triton() -> str | None:
    package = importlib.util.find_spec("triton")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    found = [path for folder in folders if (path := Path(folder) / "backends" / "nvidia" / "bin" / "nvdisasm").exists()]
    return str(found[0]) if found else None


def loops(listing: str) -> list[Counter[str]]:
    """Instructions by class of every loop of a listing that holds no other loop of more than a few instructions."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(opcodes)
        elif found := _INSTRUCTION.match(line):
            opcodes.append(found.group(1))
            target = _JUMP.search(found.group(2))
            if target and found.group(1) == "BRA" and target.group(1) in labels:
                spans.append((labels[target.group(1)], len(opcodes)))
    long = [span for span in spans if span[1] - span[0] >= MIN_LOOP]
    inner = [s for s in long if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in long)]
    return [Counter(_OF_OPCODE[opcode] for opcode in opcodes[b:e] if opcode in _OF_OPCODE) for b, e in inner]


def per_tile(trace: Trace, warp: int) -> Counter[str]:
    """Instructions by class that a warp issues in its most common tile: of the pieces that it runs once per tile."""
    part, tiles = trace.stream(warp), len(trace.tile_tokens)
    rows, pieces, places = trace.uops[trace.uop[part]], trace.segment[part], trace.place[part]
    counts: Counter[str] = Counter()
    for piece in np.unique(pieces).tolist():
        runs = int(np.bincount(places[pieces == piece]).max())
        often = round(runs / tiles)
        for kind, unit, issues in rows[pieces == piece][:, :3].tolist() if often else ():
            counts[_class_of(kind, unit)] += issues * often / runs
    return counts


def _class_of(kind: int, unit: int) -> str:
    if kind == Kind.ARITHMETIC:
        return _OF_UNIT.get(Unit(unit), Unit(unit).name.lower().replace("_", " "))
    return _OF_KIND.get(Kind(kind), Kind(kind).name.lower().replace("_", " "))


def compare(trace: Trace, listing: str) -> list[Difference]:
    """Every class of a tile's instructions, of one warp of each role, beside the loop of the listing most like it.

    Raises: TimingError for a listing without loops over tiles.
    """
    listed = loops(listing)
    if not listed:
        raise TimingError("the listing has no loop over tiles")
    found = []
    roles = {row.partition(" warp ")[0]: warp for warp, row in reversed(list(enumerate(trace.roles)))}
    for role, warp in sorted(roles.items()):
        modelled = per_tile(trace, warp)
        if modelled.total() < MIN_LOOP / 2:
            continue
        near = min(listed, key=lambda loop: sum(abs(loop[name] - modelled[name]) for name in TELLING))
        names = [name for name in CLASSES if near[name] or modelled[name] >= 0.5]
        found += [Difference(role, name, round(modelled[name], 1), near[name]) for name in names]
    return found
