"""The pictures: speed of every row, and for crystals one that says it in milliseconds."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

from flashmoe_science.bench.machine import title
from flashmoe_science.bench.report import (
    MARKS,
    OUR_LABELS,
    format_ms,
    label_of,
    names_of,
    operators_of,
    provenance,
    rate_unit,
    sizes_of,
)
from flashmoe_science.bench.results import OURS, Row, headline

# The palette: ours stands out, peers are quiet and still told apart in grey.
OUR_COLOUR = "#1b6ca8"
PEER_COLOURS = (
    "#c9ced6", "#9aa3b0", "#e0c9a6", "#b7c9b1", "#d8b4b4", "#b9d3e6", "#cdbfe0", "#8fa89b"
)  # fmt: skip
INK = "#2b2f36"
FAINT = "#7a808c"
ROWS_PER_PANEL = 8

CRYSTALS = {"crystals": "", "crystals_bias": "with pair bias"}
PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}


def panels_of(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each panel by title: one per workload, dtype and pass, split where crowded."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(f"{row['workload']} · {row['dtype']} · {row['pass']}", []).append(row)
    split: dict[str, list[Row]] = {}
    for name, members in panels.items():
        for row in members:
            detail = "".join(f" · {word}" for word in kind_of(row["shape"]))
            split.setdefault(name + detail * (len(members) > ROWS_PER_PANEL), []).append(row)
    return split


def kind_of(shape: dict[str, Any]) -> list[str]:
    """What rows have in common that are to be seen beside each other."""
    flags = [flag for flag in ("causal", "e4m3") if shape.get(flag)]
    if shape.get("page"):
        return [f"pages of {shape['page']}", *flags]
    return [f"dim {shape['dim']}", *flags] if "dim" in shape else []


def rate_of(implementation: dict[str, Any], per_unit: float) -> float:
    return implementation.get("gb_per_s") or implementation["gflops"] / per_unit


def draw_panel(axes: Any, rows: list[Row], colours: dict[str, str], per_unit: float) -> None:
    """Grouped bars: one group a shape, one bar an implementation, the ratio above ours."""
    names = names_of(rows)
    width = 0.86 / len(names)
    # Numbers over thirty narrow bars must be small not to run into each other.
    size = 8 if len(names) * len(rows) <= 18 else 6
    top = 0.0
    for index, name in enumerate(names):
        for place, row in enumerate(rows):
            implementation = row["implementations"].get(name)
            x = place + (index - (len(names) - 1) / 2) * width
            if implementation is None or implementation["ms"] is None:
                axes.text(x, 0, "-", ha="center", va="bottom", color=INK, fontsize=8)
                continue
            rate = rate_of(implementation, per_unit)
            top = max(top, rate)
            axes.bar(x, rate, width * 0.92, color=colours[name], label=name, zorder=2)
            text = f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
            text += MARKS["estimated"] if "estimated_from_heads" in implementation else ""
            if name == OURS and row["ratio"] is not None:
                text += f"\n{row['ratio']:.2f}x"
            style = {"color": OUR_COLOUR, "weight": "bold"} if name == OURS else {"color": INK}
            axes.annotate(
                text, (x, rate), xytext=(0, 2), textcoords="offset points", ha="center",
                va="bottom", fontsize=size, **style,
            )  # fmt: skip
    axes.set_ylim(0, top * 1.22 or 1)
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_xticks(range(len(rows)), [tick_label(row) for row in rows])


def tick_label(row: Row) -> str:
    """Numbers in one line, each option in one of its own."""
    return re.sub(r",(?=[a-z])", "\n", row["label"])


def style_panel(axes: Any, name: str, unit: str) -> None:
    axes.set_title(name, loc="left", fontsize=10, color=INK, weight="bold")
    axes.set_ylabel(unit, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.grid(axis="y", color="#e8eaee", zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c0c4cc")


def pyplot() -> Any:
    """matplotlib that draws to a file, wherever there is no display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def write_plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """Every picture these results call for, about the regime that counts."""
    written = [folder / "results.png"]
    write_plot(results, written[0])
    if any(row["workload"] in CRYSTALS for row in results["rows"]):
        written.append(folder / "crystals.png")
        write_crystals(results, written[1])
    return written


def colours_of(names: list[str]) -> dict[str, str]:
    """Ours first; of many peers some share a colour."""
    return dict(
        zip(names, itertools.chain([OUR_COLOUR], itertools.cycle(PEER_COLOURS)), strict=False)
    )


def write_plot(results: dict[str, Any], path: Path) -> None:
    """One panel per dtype and pass, to be looked at."""
    plt = pyplot()
    about, rows = results["about"], headline(results["rows"])
    unit, per_unit = rate_unit(about["device"])
    panels, names = panels_of(rows), names_of(rows)
    colours = colours_of(names)
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 12 else 3
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(7.2 * columns, 3.1 * lines + 1.1), squeeze=False
    )
    for axes, (name, members) in zip(grid.flat, panels.items(), strict=False):
        draw_panel(axes, members, colours, per_unit)
        found = (i for row in members for i in row["implementations"].values())
        style_panel(axes, name, "GB/s" if any("gb_per_s" in i for i in found) else unit)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    note = f"higher is better; 1.25x: the best peer takes 1.25 times as long; {sizes_of(rows)}"
    legend = {label_of(name): colour for name, colour in colours.items()}
    what = operators_of(rows)
    heading = f"{what[0].upper()}{what[1:]} on {title(about)}, {rows[0]['regime']}"
    write_margins(plt, figure, heading, note, legend, about)
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def write_margins(
    plt: Any, figure: Any, heading: str, note: str, legend: dict[str, str], about: dict[str, Any]
) -> None:
    """Title above, legend and provenance below; sizes in inches, whatever the figure's height."""
    height = figure.get_size_inches()[1]
    top = 1 - 0.1 / height
    figure.text(0.012, top, heading, va="top", fontsize=13, color=INK, weight="bold")
    figure.text(0.012, top - 0.28 / height, note, va="top", fontsize=9, color=FAINT)
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in legend.values()]
    figure.legend(
        handles, list(legend), loc="lower left", bbox_to_anchor=(0, 0.22 / height),
        ncol=len(legend), frameon=False, fontsize=8, handlelength=1.2, columnspacing=1.2,
        labelcolor=INK,
    )  # fmt: skip
    figure.text(0.012, 0.12 / height, provenance(about), fontsize=8, color=FAINT)
    figure.tight_layout(rect=(0, 0.55 / height, 1, 1 - 0.55 / height), h_pad=1.8)


def crystal_label(name: str) -> str:
    """An implementation's name for someone who has crystals and no kernels."""
    if name == "varlen":
        return "PyTorch varlen_attn"
    return label_of(name) + ("" if name in OUR_LABELS else ", padded to the longest")


def draw_lengths(axes: Any, lengths: dict[str, Any]) -> None:
    """How many crystals have how many atoms."""
    width, bins = lengths["bin"], lengths["bins"]
    axes.bar(
        [(i + 0.5) * width for i in range(len(bins))], bins, width * 0.9, color=OUR_COLOUR, zorder=2
    )
    axes.axvline(lengths["median"], color=INK, linewidth=1, linestyle=":", zorder=3)
    text = (
        f"{lengths['sequences']:,} crystals\n{lengths['tokens']:,} atoms\n"
        f"half have at most {lengths['median']:.0f}\nthe largest has {lengths['longest']}"
    )
    axes.text(0.96, 0.94, text, transform=axes.transAxes, ha="right", va="top", fontsize=9,
              color=INK)  # fmt: skip
    axes.set_xlabel("atoms in a crystal", fontsize=9, color=INK)
    axes.set_xlim(0, len(bins) * width)


def draw_times(axes: Any, rows: list[Row], colours: dict[str, str]) -> None:
    """Milliseconds as lying bars: one group a row, one bar an implementation.

    A peer that takes many times as long as the best one is cut off, so that the others can be told
    apart; its number says how long it is.
    """
    names = names_of(rows)
    height = 0.84 / len(names)
    shown = [row["implementations"][n]["ms"] for row in rows for n in (OURS, row["best_peer"]) if n]
    limit = 1.1 * max((ms for ms in shown if ms), default=1.0)
    for place, row in enumerate(rows):
        for index, name in enumerate(names):
            if name not in row["implementations"]:
                continue
            y = place + (index - (len(names) - 1) / 2) * height
            ms = row["implementations"][name]["ms"]
            if ms is not None:
                axes.barh(y, min(ms, limit), height * 0.92, color=colours[name], zorder=2)
            text = "cannot run"
            if ms is not None:
                text = format_ms(row["implementations"][name]).rstrip(MARKS["few"]) + " ms"
                text += "  \u203a" if ms > limit else ""
            style = {"color": INK}
            if name == OURS:
                style = {"color": OUR_COLOUR, "weight": "bold"}
                text += f"   {row['ratio']:.1f}x" if row["ratio"] else ""
            axes.annotate(text, (min(ms or 0, limit), y), xytext=(3, 0), fontsize=8, va="center",
                          textcoords="offset points", **style)  # fmt: skip
    axes.set_xlim(0, limit * 1.25)  # with room for the numbers
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [crystal_row_label(row) for row in rows])


def crystal_row_label(row: Row) -> str:
    shape, bias = row["shape"], CRYSTALS[row["workload"]]
    lines = [f"{shape['heads']} heads of {shape['dim']}", bias, PASSES[row["pass"]]]
    return "\n".join(line for line in lines if line)


def write_crystals(results: dict[str, Any], path: Path) -> None:
    """What a batch of crystals looks like, and how long attention over it takes."""
    plt = pyplot()
    rows = [row for row in headline(results["rows"]) if row["workload"] in CRYSTALS]
    lengths = max((row["lengths"] for row in rows), key=lambda found: found["sequences"])
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    colours = dict(zip(names_of(rows), [OUR_COLOUR, *PEER_COLOURS], strict=False))
    tallest = max(sum(row["dtype"] == dtype for row in rows) for dtype in dtypes)
    lines = len(dtypes)
    figure = plt.figure(figsize=(13, max(4.0, 0.75 * tallest * lines) + 0.8 * lines + 1.1))
    grid = figure.add_gridspec(lines, 2, width_ratios=(1, 1.7))
    axes = figure.add_subplot(grid[0, 0])  # one for all: every row has the same crystals
    draw_lengths(axes, lengths)
    style_panel(axes, "The batch", "crystals")
    for line, dtype in enumerate(dtypes):
        axes = figure.add_subplot(grid[line, 1])
        draw_times(axes, [row for row in rows if row["dtype"] == dtype], colours)
        style_panel(axes, f"Milliseconds for the whole batch · {dtype}", "")
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color="#e8eaee", zorder=0)
    note = "lower is better; 4.0x: the best other one takes 4 times as long; \u203a goes on"
    legend = {crystal_label(name): colour for name, colour in colours.items()}
    heading = f"Attention over crystals like the Materials Project's, on {title(results['about'])}"
    heading += f", {rows[0]['regime']}"
    write_margins(plt, figure, heading, note, legend, results["about"])
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)
