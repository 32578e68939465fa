"""A kernel made ready to run: decoded instructions, basic blocks, register slots and the shared-memory layout.

Both back ends start from a Program; nothing here depends on how instructions are executed.
"""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from undertow import ptx

from . import semantics
from .async_flow import suspicious_accesses
from .errors import UnsupportedPtx
from .semantics.table import Decoded, decode

SHARED_BASE = 1024
"""First shared address a kernel sees; the kilobyte below is reserved by the system on sm_90 and later."""


CARRY = "%cc"
"""Name under which the carry flag of a lane has its slot among the predicates."""


@dataclass(frozen=True)
class Slot:
    """Where a virtual register lives: `file` is p, 16, 32, 64 or 128 (bits), `index` counts within that file."""

    file: str
    index: int


@dataclass(frozen=True)
class Block:
    """Instructions [start, end) that run without a branch into or out of them, or one blocking instruction."""

    start: int
    end: int


@dataclass
class Program:
    """A decoded kernel.

    code:       one Decoded per PTX instruction, same indices as `kernel.instructions`
    blocks:     basic blocks by start index, in text order
    slots:      register name -> Slot; `num_slots` counts per file
    shared:     shared variable name -> address (unsized extern variables are placed at `dynamic_base`)
    local:      local variable name -> offset in the thread's local memory of `local_bytes`
    """

    module: ptx.Module
    kernel: ptx.Function
    code: tuple[Decoded, ...]
    blocks: dict[int, Block]
    slots: dict[str, Slot]
    num_slots: dict[str, int]
    shared: dict[str, int]
    dynamic_base: int
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    block_cache: dict = field(default_factory=dict, repr=False)

    @cached_property
    def suspicious_accesses(self) -> frozenset[int]:
        """Instructions that may touch a register of an asynchronous MMA in flight; see `async_flow`."""
        return suspicious_accesses(self)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.name

    def target(self, label: ptx.LabelRef) -> int:
        """Instruction index that a label stands for (may be one past the last)."""
        return self.kernel.labels[label.name]

    def where(self, index: int) -> str:
        """Describe an instruction's place: PTX file and line, and the source line by `.loc`."""
        if index >= len(self.code):
            return f"{self.module.source.name}: end of {self.name}"
        instruction = self.code[index].instruction
        origin = f" ({instruction.source})" if instruction.source else ""
        return f"{self.module.source.name}:{instruction.line}{origin}"


def load_program(module: ptx.Module | str, kernel: str | None = None) -> Program:
    """Decode one kernel of a module (or of PTX text).

    Raises: PtxSyntaxError, UnsupportedPtx, or ValueError for an unknown kernel name.
    """
    if isinstance(module, str):
        module = ptx.parse_module(module)
    function = module.entry(kernel)
    assert semantics.ROWS
    code = tuple(decode(i, module.source) for i in function.instructions)
    slots, num_slots = _assign_slots(function)
    shared, dynamic_base = _place_shared(module, function)
    local, local_bytes = _place_local(function)
    return Program(
        module, function, code, _find_blocks(function, code), slots, num_slots, shared, dynamic_base, local, local_bytes
    )


@lru_cache(maxsize=128)  # decoding takes longer than running a small batch; `undertow sweep` has 96 kernels
def remembered_program(text: str, kernel: str | None = None) -> Program:
    """`load_program` of PTX text, which decodes the same text once while it is remembered: a Program never changes."""
    return load_program(text, kernel)


def _assign_slots(function: ptx.Function) -> tuple[dict[str, Slot], dict[str, int]]:
    slots, counts = {}, {"p": 0, "16": 0, "32": 0, "64": 0, "128": 0}
    for name, type_name in function.registers.items():
        if type_name not in ptx.TYPE_BITS:
            raise UnsupportedPtx(f"register {name} of type .{type_name} in {function.name}")
        bits = ptx.TYPE_BITS[type_name]
        file = "p" if type_name == "pred" else str(max(bits, 16))
        slots[name] = Slot(file, counts[file])
        counts[file] += 1
    slots[CARRY] = Slot("p", counts["p"])
    counts["p"] += 1
    return slots, counts


def _place_shared(module: ptx.Module, function: ptx.Function) -> tuple[dict[str, int], int]:
    """Lay out shared variables in declaration order; all unsized ones share the dynamic base behind them."""
    variables = [v for v in (*module.variables.values(), *function.variables.values()) if v.space == "shared"]
    places, offset, dynamic_align = {}, SHARED_BASE, 16
    for variable in variables:
        if variable.size is None:
            dynamic_align = max(dynamic_align, variable.align)
            continue
        offset = -(-offset // variable.align) * variable.align
        places[variable.name] = offset
        offset += variable.size
    dynamic_base = -(-offset // dynamic_align) * dynamic_align
    places.update({v.name: dynamic_base for v in variables if v.size is None})
    return places, dynamic_base


def _place_local(function: ptx.Function) -> tuple[dict[str, int], int]:
    places, offset = {}, 0
    for variable in function.variables.values():
        if variable.space == "local" and variable.size is not None:
            offset = -(-offset // variable.align) * variable.align
            places[variable.name] = offset
            offset += variable.size
    return places, -(-offset // 16) * 16


def _find_blocks(function: ptx.Function, code: tuple[Decoded, ...]) -> dict[int, Block]:
    leaders = {0, *function.labels.values()}
    for decoded in code:
        if decoded.row.blocking:
            leaders.update((decoded.index, decoded.index + 1))
        elif decoded.row.control:
            leaders.add(decoded.index + 1)
    starts = sorted(place for place in leaders if place < len(code))
    return {start: Block(start, end) for start, end in zip(starts, [*starts[1:], len(code)], strict=True)}
