"""The section of the throughput: measured on a GPU from the records of `undertow bench`, and as others published it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from undertow.bench.charts import COLOURS
from undertow.bench.comparison import leads
from undertow.bench.records import MEASURED, TIMES, Record, RecordFile
from undertow.report.bars import Axis, Bar, Look, bars
from undertow.report.page import Figure, Label, Missing, Part, Section, Source, Table
from undertow.sweep.matrix import CELLS, Cell
from undertow.timing.published import Published, Throughput, published

KEY, TITLE = "throughput", "Throughput by shape"
COMMAND = "undertow bench"
BEFORE, AFTER = "published, baseline", "published, with slots and per-warp signals"
PUBLISHED_LOOKS = {BEFORE: Look("#d9c9ea"), AFTER: Look("#a77fd1")}
PREDICTED_FILLS = ("#f6d3ac", "#e08a3c")  # before, after
OTHER = "#b9c0c9"
SHARE = 0.4  # of the peak, marked in the chart: what the article says it reaches


def section(records: Path, predicted: Sequence[Bar] = (), by: Source | None = None) -> Section:
    """Published and measured bars. predicted: of the groups of `group_of`, with where they come from.

    Raises: RecordError for a file that holds something else.
    """
    parts = [_published(published(), predicted, by), *measured(records)]
    return Section(KEY, TITLE, COMMAND, parts)


def group_of(shape: Throughput) -> str:
    """What a published shape is called under its bars: two or three lines."""
    heads = f"{shape.heads[0]}:{shape.heads[1]} heads"
    length = f"{shape.batch} x {shape.seqlen // 1024}k"
    more = [shape.dtype] * (shape.dtype != "bf16") + ["deterministic"] * shape.deterministic
    return "\n".join([f"{shape.mask} {length}", heads, *more])


def _published(known: Published, predicted: Sequence[Bar], by: Source | None) -> Part:
    given: list[Bar] = []
    looks = dict(PUBLISHED_LOOKS)
    for shape in known.throughput:
        group = group_of(shape)
        given += [Bar(group, BEFORE, shape.before_tflops), Bar(group, AFTER, shape.after_tflops)]
        given += [bar for bar in predicted if bar.group == group]
    series = dict.fromkeys(bar.series for bar in predicted)
    looks |= {name: Look(fill, hatched=True) for name, fill in zip(series, PREDICTED_FILLS)}
    line = known.peak_tflops * SHARE, f"{SHARE:.0%} of the {known.peak_tflops} TFLOP/s peak"
    axis = Axis("TFLOP/s, backward", line=line)
    source = Source(Label.PUBLISHED, f"{known.title}, Figure 6, and {known.code}: {known.gpu}, {known.method}")
    beside = "beside what we predict" if predicted else "nothing of ours beside it"
    return Figure(
        bars(f"{known.gpu}, head dim 64", axis, looks, given), f"Published bars, {beside}.", source, (by,) if by else ()
    )


def measured(path: Path) -> list[Part]:
    """A chart for each layout and mask of a device, and a table of all cells."""
    if not path.exists():
        return [Missing(f"measured throughput, because there is no file `{path}`", "undertow bench --output FILE")]
    of_kind = [record for record in RecordFile(path).latest() if record.kind == TIMES]
    if not of_kind:
        return [Missing(f"measured throughput, because `{path}` has no times", "undertow bench --output FILE")]
    parts: list[Part] = []
    for device in dict.fromkeys(record.device for record in of_kind):
        parts += _of_device([record for record in of_kind if record.device == device], device, path)
    return parts


def _of_device(records: Sequence[Record], device: str, path: Path) -> list[Part]:
    cells = {cell.name: cell for cell in CELLS}
    first = records[0]
    versions = ", ".join(
        f"{name} {first.versions[name]}" for name in ("torch", "cudnn", "flash-attn-4") if name in first.versions
    )
    days = " to ".join(
        dict.fromkeys(day for day in (min(r.when for r in records)[:10], max(r.when for r in records)[:10]))
    )
    source = Source(Label.MEASURED, f"`{path}`, {device}, driver {first.driver}, {versions}, {days}", COMMAND)
    charts: dict[str, list[Record]] = {}
    for cell in CELLS:
        of_cell = [r for r in records if r.cell == cell.name and r.status == MEASURED]
        if of_cell:
            charts.setdefault(_panel(cell), []).extend(of_cell)
    looks = {name: Look(fill) for name, fill in COLOURS.items()}
    looks |= {record.provider: Look(OTHER) for record in records if record.provider not in looks}
    parts: list[Part] = []
    for panel, of_panel in charts.items():
        given = [_bar(record, _name(cells[record.cell])) for record in of_panel]
        drawn = bars(f"{device}: {panel}", Axis("TFLOP/s, backward"), looks, given, _width(given))
        parts.append(Figure(drawn, "Whiskers: from the slow to the fast fifth of the calls.", source))
    return [*parts, _table(records, source)]


def _source(records: Sequence[Record], device: str, path: Path) -> Source:
    """What was measured with: of the first record, and the days of all."""
    first = records[0]
    wanted = ("torch", "cudnn", "flash-attn-4")
    versions = ", ".join(f"{name} {first.versions[name]}" for name in wanted if name in first.versions)
    days = sorted(record.when[:10] for record in records)
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    return Source(Label.MEASURED, f"`{path}`, {device}, driver {first.driver}, {versions}, {when}", COMMAND)


def _panel(cell: Cell) -> str:
    plain = f"{'causal' if cell.causal else 'dense'}, {cell.layout}"
    kinds = {"plain": plain, "local": "windows of 1024 keys", "varlen": "packed sequences"}
    return kinds[cell.kind] + (", deterministic" if cell.deterministic else "")


def _name(cell: Cell) -> str:
    length = str(cell.seqlen) if cell.seqlen < 1024 else f"{cell.seqlen // 1024}k"
    if cell.kind == "plain":
        return length if cell.dtype == "bf16" else f"{length}\n{cell.dtype}"
    return f"{length}\n{cell.layout} {cell.dtype}{' causal' if cell.causal else ''}"


def _bar(record: Record, group: str) -> Bar:
    assert record.tflops and record.median_ms and record.p20_ms and record.p80_ms
    slow, fast = (record.tflops * record.median_ms / ms for ms in (record.p80_ms, record.p20_ms))
    return Bar(group, record.provider, record.tflops, (slow, fast))


def _width(given: Sequence[Bar]) -> int:
    """Pixels: few groups need not fill the page."""
    return min(1080, 140 + 230 * len({bar.group for bar in given}))


def _table(records: Sequence[Record], source: Source) -> Table:
    providers = list(dict.fromkeys(record.provider for record in records))
    ratios = {lead.cell: lead for lead in leads(records, TIMES)}
    rows = []
    for cell in dict.fromkeys(record.cell for record in records):
        of_cell = {record.provider: record for record in records if record.cell == cell}
        told = [_told(of_cell.get(name)) for name in providers]
        lead = ratios.get(cell)
        rows.append((f"`{cell}`", *told, "-" if lead is None else f"{lead.ratio:.3f} x {lead.best_peer}"))
    return Table(
        "TFLOP/s of the median call, and how many times the best other library ours is. `wrong`: gradients; `unable`: "
        "it does not compute this.",
        ("cell", *providers, "ours / best other"),
        (None, *[source] * (len(providers) + 1)),
        rows,
    )


def _told(record: Record | None) -> str:
    if record is None:
        return "-"
    return f"{record.tflops:.0f}" if record.status == MEASURED and record.tflops else record.status
