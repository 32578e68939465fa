"""Just enough SVG to draw plans: boxes, text, lines, arrows, hatching, on a background of its own.

Pictures are read on light and dark pages, so every drawing brings its paper. Coordinates are pixels, y downwards.
"""

from __future__ import annotations

from html import escape

PAPER, INK, MUTED, GRID = "#fcfcfa", "#1f2933", "#5b6673", "#c9ced6"
ALARM = "#c81e3a"  # barriers and guards, everywhere
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"

# One colour per name of the mathematics; a 16-bit tile is the lighter sister of the accumulator that it comes from.
FILLS = {
    "S": "#8fb8ea",
    "P": "#cfe2fb",
    "dP": "#f2b880",
    "dS": "#fbe0c3",
    "dQ": "#c3a6e0",
    "dK": "#9fd3b4",
    "dV": "#a9d7d9",
    "QK": "#8fb8ea",
    "PdO": "#a9d7d9",
}
OTHER_FILL = "#e4e7ec"


def fill_of(name: str) -> str:
    """Colour of a region or GEMM."""
    return FILLS.get(name, OTHER_FILL)


class Drawing:
    """An SVG under construction.

    width, height: pixels. title, description: what a screen reader says.
    """

    def __init__(self, width: int, height: int, title: str, description: str = ""):
        self.width, self.height, self.title, self.description = width, height, title, description
        self._parts: list[str] = []
        self._heads: set[str] = set()  # inks of the arrowheads to define

    def box(self, x: float, y: float, w: float, h: float, fill: str, *, dashed: bool = False) -> None:
        style = f'fill="none" stroke="{MUTED}" stroke-dasharray="5 4"' if dashed else f'fill="{fill}" stroke="{INK}"'
        self._add(f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" rx="3" {style}/>')

    def bar(self, x: float, y: float, w: float, h: float, fill: str, *, hint: str = "") -> None:
        """A box without an outline, for many beside each other. hint: shown under the pointer, and read out."""
        place = f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" fill="{fill}"'
        self._add(f"{place}><title>{escape(hint)}</title></rect>" if hint else f"{place}/>")

    def hatch(self, x: float, y: float, w: float, h: float, *, opacity: float = 1) -> None:
        """Diagonal strokes over what lies below: cells that two regions share, time spent waiting, a guess."""
        paler = f' opacity="{_n(opacity)}"' if opacity < 1 else ""
        self._add(f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" fill="url(#hatch)"{paler}/>')

    def text(self, x: float, y: float, content: str, *, size: int = 15, anchor: str = "start", ink: str = INK) -> None:
        """Text whose baseline is at y. `**` at both ends makes it bold."""
        bold = content.startswith("**") and content.endswith("**")
        content = content.strip("*") if bold else content
        weight = ' font-weight="600"' if bold else ""
        self._add(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{size}" text-anchor="{anchor}" fill="{ink}"{weight}>'
            f"{escape(content)}</text>"
        )

    def line(self, start: tuple[float, float], end: tuple[float, float], ink: str, *, dashes: str = "") -> None:
        self._stroke(f"M{_p(start)} L{_p(end)}", ink, f' stroke-dasharray="{dashes}"' if dashes else "")

    def arrow(self, start: tuple[float, float], end: tuple[float, float], ink: str, *, dashed: bool = False) -> None:
        """A curve that leaves and arrives upright, with its head at `end`."""
        bend = (end[1] - start[1]) / 2
        path = f"M{_p(start)} C{_p((start[0], start[1] + bend))} {_p((end[0], end[1] - bend))} {_p(end)}"
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._stroke(path, ink, f'{dashes} marker-end="url(#head-{ink[1:]})"')
        self._heads.add(ink)

    def svg(self) -> str:
        """The finished file."""
        heads = "".join(
            f'<marker id="head-{ink[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            f' orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{ink}"/></marker>'
            for ink in sorted(self._heads)
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
                f' width="{self.width}" height="{self.height}" role="img" font-family="{FONT}">',
                f"<title>{escape(self.title)}</title>",
                *([f"<desc>{escape(self.description)}</desc>"] if self.description else []),
                '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse"'
                f' patternTransform="rotate(45)"><path d="M0,0 V7" stroke="{INK}" stroke-opacity="0.45"/></pattern>'
                f"{heads}</defs>",
                f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8"'
                f' fill="{PAPER}" stroke="{GRID}"/>',
                *self._parts,
                "</svg>",
                "",
            ]
        )

    def _stroke(self, path: str, ink: str, more: str) -> None:
        self._add(f'<path d="{path}" fill="none" stroke="{ink}" stroke-width="1.6"{more}/>')

    def _add(self, part: str) -> None:
        self._parts.append(part)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _p(point: tuple[float, float]) -> str:
    return f"{_n(point[0])},{_n(point[1])}"
