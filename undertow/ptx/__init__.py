"""PTX text to a parsed module; knows nothing of execution and needs only the standard library.

>>> from undertow import ptx
>>> module = ptx.parse_module('''.version 8.8
... .target sm_100a
... .address_size 64
... .visible .entry k(.param .u32 n) { .reg .b32 %r<2>; ld.param.b32 %r1, [n]; ret; }''')
>>> [i.mnemonic for i in module.entry("k").instructions]
['ld.param.b32', 'ret']
"""

from .lexer import PtxSyntaxError, SourceText
from .parser import parse_module
from .program import (
    TYPE_BITS,
    Address,
    Function,
    Group,
    Guard,
    Immediate,
    Instruction,
    LabelRef,
    Module,
    Negated,
    Operand,
    Pair,
    Parameter,
    Register,
    Sink,
    SourceSpan,
    Special,
    Symbol,
    Variable,
    Vector,
)  # fmt: skip

__all__ = [
    "TYPE_BITS", "Address", "Function", "Group", "Guard", "Immediate", "Instruction", "LabelRef", "Module", "Negated",
    "Operand", "Pair", "Parameter", "PtxSyntaxError", "Register", "Sink", "SourceSpan", "SourceText", "Special",
    "Symbol", "Variable", "Vector", "parse_module",
]  # fmt: skip
