"""Print what the emulator costs: the main kernel of `split` on 1024 x 1024, one head, 64 tile iterations.

    python tools/benchmark_emulator.py

Seconds of one launch, parsed and decoded before: median and range of 3 after one warm-up. `checked` is the NumPy back
end under all observers; the last column is its cost relative to the plain NumPy run.
"""

from statistics import median

from undertow import emulator
from undertow.backward_case import main_case
from undertow.emulator.observers import all_observers
from undertow.inputs import Shape
from undertow.kernels.sm100.plan import plan

RUNS = 3


def seconds(program: emulator.Program, launch: emulator.Launch, backend: str, checked: bool) -> list[float]:
    """Seconds of each run but the first."""
    times = []
    for _ in range(RUNS + 1):
        observers = all_observers() if checked else []
        times.append(emulator.launch(program, launch, emulator.Options(backend=backend), observers).seconds)
    return times[1:]


def main() -> None:
    """Measure and print the three rows."""
    case = main_case(plan("split"), Shape(1, 1024, 1024, 1))
    program = emulator.load_program(case.ptx)
    plain = 0.0
    rows = (("compiled", "compiled", False), ("numpy", "numpy", False), ("checked", "numpy", True))
    for name, backend, checked in rows:
        times = seconds(program, case.launch, backend, checked)
        plain = median(times) if name == "numpy" else plain
        ratio = f"  {median(times) / plain:.1f} x numpy" if checked else ""
        print(f"{name:9} {median(times):.3f} s ({min(times):.3f} to {max(times):.3f}){ratio}")


if __name__ == "__main__":
    main()
