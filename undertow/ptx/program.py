"""The parsed form of a PTX module: plain data, no meaning attached.

Names inside `{ }` scopes are made unique while parsing (inline assembly repeats `P1` and `DONE` in every block), so
everything below can use a register or label name as a key for a whole function.
"""

from dataclasses import dataclass, field

from .lexer import SourceText

TYPE_BITS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32, "e4m3x2": 16, "e5m2x2": 16,
    "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64, "b128": 128,
}  # fmt: skip
"""Width in bits of each fundamental or packed type that a register, variable or modifier can name."""


SPECIAL_REGISTERS = {
    "%tid", "%ntid", "%laneid", "%warpid", "%nwarpid", "%ctaid", "%nctaid", "%smid", "%nsmid", "%gridid",
    "%clusterid", "%nclusterid", "%cluster_ctaid", "%cluster_nctaid", "%cluster_ctarank", "%cluster_nctarank",
    "%is_explicit_cluster", "%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt", "%clock",
    "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%reserved_smem_offset_begin",
    "%reserved_smem_offset_end", "%reserved_smem_offset_cap", "%reserved_smem_offset_0", "%reserved_smem_offset_1",
    "%total_smem_size", "%aggr_smem_size", "%dynamic_smem_size", "%current_graph_exec",
}  # fmt: skip
"""Special registers of the ISA without their .x .y .z; %pm..., %envreg... and the like are known by prefix."""
SPECIAL_PREFIXES = ("%pm", "%envreg")


@dataclass(frozen=True)
class SourceSpan:
    """Where an instruction came from, by `.loc`: a file of the program that was compiled, line and column."""

    file: str
    line: int
    column: int
    inlined_at: "SourceSpan | None" = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Register:
    """A virtual register; `name` is unique in its function, `type` is the declared type such as b32 or pred."""

    name: str
    type: str


@dataclass(frozen=True)
class Immediate:
    """A literal. kind int: `value` is the integer; kind f32 or f64: `value` is the bit pattern of that width."""

    value: int
    kind: str = "int"


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x or %clock64."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of a variable or parameter (or a function's name), plus a constant offset in bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class LabelRef:
    """A label used as an operand; `name` is unique in its function."""

    name: str


@dataclass(frozen=True)
class Negated:
    """A predicate operand written `!p`."""

    register: Register


@dataclass(frozen=True)
class Sink:
    """The operand `_`: a destination whose value nobody wants."""


@dataclass(frozen=True)
class Vector:
    """Operands in braces, such as {%r1, %r2}."""

    items: tuple["Operand", ...]


@dataclass(frozen=True)
class Pair:
    """Two destinations joined by a bar, such as %r1|%p2."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True)
class Address:
    """Operands in brackets: base + offset bytes, and for tensor copies a tuple of coordinates (and im2col offsets)."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple["Operand", ...] = ()
    extra: tuple["Operand", ...] = ()


@dataclass(frozen=True)
class Group:
    """Operands in parentheses, as in `call (result), function, (arguments)`."""

    items: tuple["Operand", ...]


Operand = Register | Immediate | Special | Symbol | LabelRef | Negated | Sink | Vector | Pair | Address | Group


@dataclass(frozen=True)
class Guard:
    """The predicate in front of an instruction: @p or @!p."""

    register: Register
    negated: bool


@dataclass(frozen=True)
class Instruction:
    """One instruction: `mnemonic` with all its modifiers, operands in text order, and where it stands."""

    index: int
    mnemonic: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    column: int
    source: SourceSpan | None

    @property
    def opcode(self) -> str:
        """The mnemonic up to the first dot."""
        return self.mnemonic.partition(".")[0]


@dataclass(frozen=True)
class Variable:
    """A variable of module or function scope. `size` is in bytes; None for an unsized `.extern .shared x[]`."""

    name: str
    space: str
    type: str
    align: int
    size: int | None
    extern: bool = False
    initializer: tuple = ()


@dataclass(frozen=True)
class Parameter:
    """One `.param` of an entry: `offset` is its place in the parameter block, all sizes in bytes."""

    name: str
    type: str
    align: int
    size: int
    offset: int
    pointer_space: str | None = None


@dataclass
class Function:
    """One `.entry` or `.func` with a body (or a bare declaration: no instructions and `declared_only`)."""

    name: str
    is_entry: bool
    parameters: tuple[Parameter, ...]
    source: SourceText
    registers: dict[str, str] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    pragmas: list[str] = field(default_factory=list)
    declared_only: bool = False

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter block."""
        return max((p.offset + p.size for p in self.parameters), default=0)


@dataclass
class Module:
    """A whole PTX file: version, target, variables of module scope, functions by name."""

    source: SourceText
    version: str = ""
    target: tuple[str, ...] = ()
    address_size: int = 64
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)

    @property
    def entries(self) -> list[Function]:
        """The kernels, in text order."""
        return [f for f in self.functions.values() if f.is_entry and not f.declared_only]

    def entry(self, name: str | None) -> Function:
        """Return the kernel of that name, or the only one when name is None.

        Raises: ValueError if there is no such kernel or the choice is ambiguous.
        """
        names = [f.name for f in self.entries]
        if name is None and len(names) == 1:
            return self.entries[0]
        if name is None:
            raise ValueError(f"kernel: the module has {len(names)} entries, name one of {names}")
        if name not in names:
            raise ValueError(f"kernel: no entry named {name!r}; the module has {names}")
        return self.functions[name]
