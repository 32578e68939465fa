"""Pictures of the records: grouped bars over the sequence length, one panel a mask, as the published figures have them.

One picture for each device, head layout and mode (deterministic or not) with whole sequences, and one for each device
and mode with windows and packed sequences, whose layout and dtype turn with the length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from undertow.bench.records import MEASURED, TIMES, Record
from undertow.bench.work import peak_tflops
from undertow.record_file import RecordError
from undertow.sweep.matrix import CELLS, Cell

FORMATS = ("svg", "png")
PANEL_INCHES = (7.0, 4.2)
COLOURS = {  # a provider looks the same in every picture
    "undertow": "#00798c",
    "flash-attn-4": "#d1495b",
    "flash-attn-3": "#edae49",
    "torch-cudnn": "#66a182",
    "torch-flash": "#8d96a3",
    "flex": "#9d7fb8",
}


def draw(folder: Path, records: Iterable[Record]) -> list[Path]:
    """Write the pictures into `folder`; the files that were written.

    Raises: RecordError if the folder cannot be written or matplotlib is missing.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise RecordError(f"--plots={folder}: needs matplotlib, which cannot be imported: {error}") from error
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "undertow"  # the same records give the same file
    written = []
    for name, figure_records in pictures(records).items():
        figure = _figure(name, figure_records)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for suffix in FORMATS:
                path = folder / f"{name}.{suffix}"
                figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
                written.append(path)
        except OSError as error:
            raise RecordError(f"--plots={folder}: cannot be written: {error}") from error
    return written


def pictures(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The timed records of each picture, by the name of its file."""
    cells = {cell.name: cell for cell in CELLS}
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.kind != TIMES or record.status != MEASURED or record.cell not in cells:
            continue
        cell = cells[record.cell]
        words = [record.device.replace(" ", "-"), cell.layout if cell.kind == "plain" else "local-varlen"]
        found.setdefault("-".join([*words, *["deterministic"] * cell.deterministic]), []).append(record)
    return found


def _figure(name: str, records: Sequence[Record]) -> Any:
    from matplotlib.figure import Figure

    cells = {cell.name: cell for cell in CELLS}
    panels: dict[str, list[Record]] = {}
    for cell in CELLS:  # the order of the matrix, whatever order they were measured in
        of_cell = [record for record in records if record.cell == cell.name]
        if of_cell:
            panels.setdefault(_panel(cell), []).extend(of_cell)
    width, height = PANEL_INCHES
    groups = [len({record.cell for record in of_panel}) for of_panel in panels.values()]
    figure = Figure(figsize=(width * len(panels), height), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True, width_ratios=groups)[0]
    for axis, (title, panel_records) in zip(axes, panels.items()):
        _bars(axis, panel_records, cells)
        axis.set_title(title)
    peak = peak_tflops(records[0].device)
    axes[0].set_ylabel("TFLOP/s, backward")
    if peak is not None:
        right = axes[-1].secondary_yaxis("right", functions=(lambda x: x / peak * 100, lambda x: x * peak / 100))
        right.set_ylabel(f"% of the {peak:g} TFLOP/s dense peak")
    drawn = {label: bar for axis in axes for bar, label in zip(*axis.get_legend_handles_labels())}
    named = [name for name in COLOURS if name in drawn]
    axes[0].legend([drawn[name] for name in named], named, loc="upper left", fontsize="small")
    axes[0].set_ylim(top=axes[0].get_ylim()[1] * 1.25)  # room for the legend
    figure.suptitle(f"{name}: 64k tokens, 32 query heads, head dim 64 (measured, sustained)")
    return figure


def _panel(cell: Cell) -> str:
    if cell.kind == "plain":
        return "causal" if cell.causal else "dense"
    return {"local": "windows of 1024 keys", "varlen": "packed sequences"}[cell.kind]


def _label(cell: Cell) -> str:
    seqlen = str(cell.seqlen) if cell.seqlen < 1024 else f"{cell.seqlen // 1024}k"
    if cell.kind == "plain":
        return seqlen if cell.dtype == "bf16" else f"{seqlen}\n{cell.dtype}"
    return f"{seqlen}\n{cell.layout} {cell.dtype}\n{'causal' if cell.causal else ''}"


def _bars(axis: Any, records: Sequence[Record], cells: dict[str, Cell]) -> None:
    groups = list(dict.fromkeys(record.cell for record in records))
    providers = [name for name in COLOURS if any(record.provider == name for record in records)]
    width = 0.8 / max(1, len(providers))
    for number, provider in enumerate(providers):
        for record in (record for record in records if record.provider == provider):
            assert record.tflops is not None and record.median_ms and record.p20_ms and record.p80_ms
            place = groups.index(record.cell) + (number - (len(providers) - 1) / 2) * width
            fast, slow = (record.tflops * record.median_ms / ms for ms in (record.p20_ms, record.p80_ms))
            first = record is next(r for r in records if r.provider == provider)
            axis.bar(
                place,
                record.tflops,
                width,
                color=COLOURS[provider],
                label=provider if first else None,
                yerr=[[record.tflops - slow], [fast - record.tflops]],
                ecolor="#333333",
                error_kw={"linewidth": 0.8},
            )
            axis.annotate(f"{record.tflops:.0f}", (place, record.tflops), ha="center", va="bottom", fontsize=5)
    axis.set_xticks(range(len(groups)), [_label(cells[group]) for group in groups])
    axis.set_xlabel("sequence length")
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
