"""Control flow: PTX ISA, "Control Flow Instructions". The machine interprets these itself; the rows only name them."""

from ..events import RegistersRequested
from .table import NO_EFFECTS, machine

CHAPTER = "control-flow-instructions"
MISC = "miscellaneous-instructions"


def _by_machine(decoded, bus):
    return None


machine("bra{.uni} target:label", chapter=CHAPTER, effects=NO_EFFECTS, control=True)(_by_machine)
machine("brx.idx{.uni} index:u32, targets:label", chapter=CHAPTER, effects=NO_EFFECTS, control=True)(_by_machine)
machine("ret{.uni}", chapter=CHAPTER, effects=NO_EFFECTS, control=True)(_by_machine)
machine("exit", chapter=CHAPTER, effects=NO_EFFECTS, control=True)(_by_machine)
machine("trap", chapter=MISC, effects=NO_EFFECTS, control=True)(_by_machine)
machine("brkpt", chapter=MISC, effects=NO_EFFECTS, control=True)(_by_machine)


def _nothing(decoded, bus):
    """Timing only: no value changes."""
    return lambda lanes, mask, *sources: None


machine("nanosleep.u32 duration:u32", chapter=MISC, effects=NO_EFFECTS)(_nothing)
machine("pmevent.mask event:u32", chapter=MISC, effects=NO_EFFECTS)(_nothing)
machine("pmevent event:u32", chapter=MISC, effects=NO_EFFECTS)(_nothing)
for _what in ("launch_dependents", "wait"):
    machine(f"griddepcontrol.{_what}", chapter="parallel-synchronization-griddepcontrol", effects=NO_EFFECTS)(_nothing)


@machine(
    "setmaxnreg.<action>.sync.aligned.u32 count:u32", chapter=MISC, effects=NO_EFFECTS, action="inc dec",
)  # fmt: skip
def _setmaxnreg(decoded, bus):
    """Check the argument; register pools have no effect on values.

    Raises: ProtocolError unless the count is a multiple of 8 in [24, 256] and the whole warp takes part.
    """
    from ..errors import ProtocolError

    sink = bus.sink(RegistersRequested)

    def handler(lanes, mask, count):
        value = int(count.flat[0])
        if value % 8 or not 24 <= value <= 256:
            raise ProtocolError(f"setmaxnreg to {value} registers; allowed are multiples of 8 from 24 to 256")
        if not lanes.full:
            raise ProtocolError("setmaxnreg executed by part of a warp", "register-pool")
        if sink:
            sink(RegistersRequested(lanes, decoded, decoded.mods["action"], value))

    return handler
