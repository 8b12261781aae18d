"""Bars as SVG, written by hand: the same bytes on every machine, and a few kilobytes each."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

OURS, PEER, INK, FAINT, LOST, LINE = (
    "#1b6ca8", "#b9bfc9", "#2b2f36", "#7a808c", "#b3261e", "#e8eaee"
)  # fmt: skip
WIDTH = 880
PANEL_HEIGHT = 150  # of which the bars have BARS
BARS = 84
AXIS = 34  # room for the numbers of the axis


@dataclass(frozen=True)
class Panel:
    """A group of rows: for each size our rate and the best peer's, and the ratio."""

    name: str
    sizes: list[str]
    rates: list[tuple[float, float]]
    ratios: list[float]

    @property
    def width(self) -> int:
        each = max(36, 6 * max(len(size) for size in self.sizes))
        return max(280, AXIS + 12 + each * len(self.sizes))


def text(x: float, y: float, words: str, size: int = 10, color: str = INK, **more: str) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"{attributes}>'
        f"{escape(words)}</text>"
    )


def bar(x: float, y: float, width: float, height: float, color: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'
    )


def round_up(value: float) -> float:
    """The next number that looks good at the end of an axis."""
    step = 1.0
    while step * 10 <= value:
        step *= 10
    while step > value:
        step /= 10
    return next(step * m for m in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * m >= value)


def draw_panel(panel: Panel, left: float, top: float) -> list[str]:
    base = top + 26 + BARS
    limit = round_up(max(max(pair) for pair in panel.rates) or 1.0)
    parts = [text(left, top + 10, panel.name, 10, font_weight="bold")]
    for part in (0.0, 0.5, 1.0):
        y = base - part * BARS
        parts.append(bar(left + AXIS, y, panel.width - AXIS - 12, 0.8, LINE))
        parts.append(
            text(left + AXIS - 4, y + 3, f"{limit * part:,.4g}", 9, FAINT, text_anchor="end")
        )
    each = (panel.width - AXIS - 12) / len(panel.sizes)
    for i, (size, rates, ratio) in enumerate(
        zip(panel.sizes, panel.rates, panel.ratios, strict=True)
    ):
        middle, width = left + AXIS + (i + 0.5) * each, min(15.0, each * 0.36)
        heights = [rate / limit * BARS for rate in rates]
        for side, (height, color) in enumerate(zip(heights, (OURS, PEER), strict=True)):
            x = middle + (side - 1) * width
            parts.append(bar(x, base - height, width - 1, height, color))
        color = LOST if round(ratio, 2) < 1 else OURS
        y = base - max(heights) - 3
        parts.append(text(middle, y, f"{ratio:.2f}", 9, color, text_anchor="middle"))
        parts.append(text(middle, base + 12, size, 9, FAINT, text_anchor="middle"))
    return parts


def draw(title: str, note: str, panels: list[Panel], provenance: str) -> str:
    """The whole picture: as many panels beside each other as fit."""
    parts, x, y = [], 16, 62
    for panel in panels:
        if x > 16 and x + panel.width > WIDTH:
            x, y = 16, y + PANEL_HEIGHT
        parts += draw_panel(panel, x, y)
        x += panel.width
    width = max(WIDTH, 32 + max(panel.width for panel in panels))
    height = y + PANEL_HEIGHT + 12
    key = [bar(16, 38, 9, 9, OURS), text(29, 46, "flashmoe_science", 10)]
    key += [bar(130, 38, 9, 9, PEER), text(143, 46, "the best peer of each row", 10)]
    key += [
        text(
            290,
            46,
            f"{note}; numbers: the best peer's time over ours, red where we lose",
            10,
            FAINT,
        )
    ]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">',
        bar(0, 0, width, height, "#ffffff"),
        text(16, 24, title, 15, font_weight="bold"),
        *key,
        *parts,
        text(16, height - 8, provenance, 9, FAINT),
        "</svg>",
        "",
    ])  # fmt: skip
