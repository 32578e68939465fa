"""Register moves and address arithmetic: PTX ISA, "Data Movement and Conversion Instructions".

Generic addresses: shared, parameter and local memory each own a window of the 64-bit space (`WINDOWS`); everything
else is global. `mov` with a vector on either side packs or unpacks, first element lowest.
"""

from .table import NO_EFFECTS, alu, machine

CHAPTER = "data-movement-and-conversion-instructions"

SHARED_WINDOW = 0x7F40_0000_0000
PARAM_WINDOW = 0x7F50_0000_0000
LOCAL_WINDOW = 0x7F60_0000_0000
WINDOW_BYTES = 1 << 32
WINDOWS = {"shared": SHARED_WINDOW, "param": PARAM_WINDOW, "local": LOCAL_WINDOW, "const": 0, "global": 0}
"""Where each state space begins in the generic address space; window of 4 GiB each; constants live in global."""

alu("mov.pred d:pred, a:pred", chapter=CHAPTER, numpy="copyto(d, a)", cpp="d = a")
alu(
    "mov.<type> d, a", chapter=CHAPTER, type="b8 b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64 b128 f16 bf16",
    numpy="copyto(d, a)", cpp="d = a",
)  # fmt: skip
alu(
    "cvta.<space>.<type> d, a", chapter=CHAPTER, type="u64", space="shared shared::cta shared::cluster param local "
    "const global param::entry",
    numpy=lambda m: f"add(a, {WINDOWS[m['space'].partition('::')[0]]}, d)",
    cpp=lambda m: f"d = a + {WINDOWS[m['space'].partition('::')[0]]}ull",
)  # fmt: skip
alu(
    "cvta.to.<space>.<type> d, a", chapter=CHAPTER, type="u64", space="shared shared::cta shared::cluster param "
    "local const global param::entry",
    numpy=lambda m: f"subtract(a, {WINDOWS[m['space'].partition('::')[0]]}, d)",
    cpp=lambda m: f"d = a - {WINDOWS[m['space'].partition('::')[0]]}ull",
)  # fmt: skip
alu(
    "isspacep.<space> d:pred, a:u64", chapter=CHAPTER,
    space="shared shared::cta shared::cluster param local const global param::entry",
    numpy=lambda m: f"in_window(a, d, {m['space'].partition('::')[0]!r})",
    cpp=lambda m: {"global": f"d = a < {SHARED_WINDOW}ull", "const": "d = false"}.get(
        m["space"], f"d = a - {WINDOWS[m['space'].partition('::')[0]]}ull < {WINDOW_BYTES}ull"
    ),
)  # fmt: skip


def _no_operation(decoded, bus):
    return lambda lanes, mask, *sources: None


for _syntax in (
    "prefetch{.<space>}.<level> [a]",
    "prefetch{.<space>}.tensormap [a]",
    "prefetchu.L1 [a]",
    "applypriority{.global}.L2::evict_normal [a], size:u32",
    "discard{.global}.L2 [a], size:u32",
):
    machine(
        _syntax, chapter=CHAPTER, effects=NO_EFFECTS, space="global local param const",
        level="L1 L2 L2::evict_last L2::evict_normal",
    )(_no_operation)  # fmt: skip


@machine(
    "createpolicy.fractional.<primary>{.L2::evict_first}.b64 d:b64{, fraction:f32}", chapter=CHAPTER,
    effects=NO_EFFECTS, primary="L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged",
)  # fmt: skip
def _createpolicy(decoded, bus):
    """Cache policies change no values; any number will do."""
    return lambda lanes, mask, *sources: 0
