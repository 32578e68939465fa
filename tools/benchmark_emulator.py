"""Print what the emulator costs: what the timing of a tile adds, and a launch on each back end.

    python tools/benchmark_emulator.py

The launch is the main kernel of `split` on 1024 x 1024, one head, 64 tile iterations: seconds, parsed and decoded
before, median and range of 3 after one warm-up. `checked` is the NumPy back end under all observers; the last column is
its cost relative to the plain NumPy run.

Timing is told of `split` and of the SM90 kernel: a CTA of 64 query tiles on the NumPy back end
alone, under the observer that records it, and, by tile, alone and recorded, lowered and replayed once (`run`); CPU
seconds, medians of 5 in turn.
"""

from statistics import median
from time import process_time

from undertow import emulator
from undertow.backward_case import batch_case, main_case
from undertow.cases import Kernel, fresh
from undertow.commands.recorded import claiming
from undertow.emulator.observers import all_observers
from undertow.inputs import Shape, random_batch
from undertow.kernels.sm100.plan import plan
from undertow.timing.chip import read_chip
from undertow.timing.observer import Recorder
from undertow.timing.run import run
from undertow.timing.trace import record

RUNS = 3
TIMED = (("split", "sm100", "b200"), ("pingpong", "sm90", "h200"))
TILES, FEWER, TURNS = 64, 16, 5


def seconds(program: emulator.Program, launch: emulator.Launch, backend: str, checked: bool) -> list[float]:
    """Seconds of each run but the first."""
    times = []
    for _ in range(RUNS + 1):
        observers = all_observers() if checked else []
        times.append(emulator.launch(program, launch, emulator.Options(backend=backend), observers).seconds)
    return times[1:]


def timing(schedule: str, arch: str, chip: str) -> str:
    """CPU seconds of a CTA, alone and recorded, and milliseconds of a tile from the emulator to the timeline."""
    point = read_chip(chip).point()
    kernels = {tiles: _kernel(schedule, arch, tiles) for tiles in (TILES, FEWER)}
    programs = {tiles: kernel.program() for tiles, kernel in kernels.items()}
    options = emulator.Options(cta_order=[0])

    def launched(tiles: int, observers: list) -> float:
        (copy,) = fresh((kernels[tiles],))  # a CTA that claims its work leaves none to the next launch
        return _cpu(lambda: emulator.launch(programs[tiles], copy.launch, options, observers))

    def timed(tiles: int) -> float:
        return _cpu(lambda: run(record(kernels[tiles], point), point))

    rows = [
        (
            launched(TILES, []),
            launched(TILES, [Recorder()]),
            launched(TILES, []) - launched(FEWER, []),
            timed(TILES) - timed(FEWER),
        )
        for _ in range(TURNS + 1)
    ][1:]
    plain, recorded, tile, whole = (median(column) for column in zip(*rows, strict=True))
    ratio = median(row[1] / row[0] for row in rows)
    each = 1e3 / (TILES - FEWER)
    return (
        f"{schedule:9} numpy {plain:.3f} s, recorded {recorded:.3f} s: {ratio:.2f} x; "
        f"a tile: {tile * each:.1f} ms, its timing {whole * each:.1f} ms"
    )


def _kernel(schedule: str, arch: str, tiles: int) -> Kernel:
    """Of one key tile and so many query tiles."""
    kernel = batch_case(random_batch(Shape(1, 128 * tiles, 128, 1), 0), schedule, False, arch)[1]
    return claiming(kernel, 1) if arch == "sm90" else kernel


def _cpu(call) -> float:
    begin = process_time()
    call()
    return process_time() - begin


def backends() -> None:
    """Print the three rows of a launch."""
    case = main_case(plan("split"), Shape(1, 1024, 1024, 1))
    program = emulator.load_program(case.ptx)
    plain = 0.0
    rows = (("compiled", "compiled", False), ("numpy", "numpy", False), ("checked", "numpy", True))
    for name, backend, checked in rows:
        times = seconds(program, case.launch, backend, checked)
        plain = median(times) if name == "numpy" else plain
        ratio = f"  {median(times) / plain:.1f} x numpy" if checked else ""
        print(f"{name:9} {median(times):.3f} s ({min(times):.3f} to {max(times):.3f}){ratio}")


def main() -> None:
    """Measure and print the rows."""
    for of in TIMED:  # first: collections of garbage take longer, the more there is beside
        print(timing(*of))
    backends()


if __name__ == "__main__":
    main()
