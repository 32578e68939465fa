"""The compiled back end: one C++ library that runs any kernel, built once per machine.

Compiling a C++ file per kernel costs 10 to 55 seconds of compiler each, which a sweep over configurations cannot
afford. Here the semantics table itself is compiled: the `cpp` column of every lane form becomes a function over 32
lanes (`generate`), the machine forms are hand-written C++ (`runtime/`), and a kernel is only encoded into an array of
instructions (`encode`), so new PTX runs with no build at all. Both back ends thus still follow the same rows.

Results equal those of the NumPy machine bit for bit. CTAs run on several threads when nothing orders them, with
reductions into global memory committed in the order of CTAs, so results do not depend on timing.
"""

from .build import CompilerMissing
from .encode import NotCompiled
from .launch import run

__all__ = ["CompilerMissing", "NotCompiled", "run"]
