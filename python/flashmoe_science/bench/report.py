"""The results for people: progress and tables, from the data that goes to the JSON file."""

from __future__ import annotations

import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashmoe_science.bench import anchors
from flashmoe_science.bench.bars import Row, name_of, ratio_to_anchor, standings
from flashmoe_science.bench.machine import title
from flashmoe_science.bench.runner import RowSpec
from flashmoe_science.bench.timing import OURS
from flashmoe_science.bench.workloads import NONDETERMINISTIC

MARKS = {"few": "*", "estimated": "~"}
LEGEND = "~ one call on a few heads, scaled   * few samples   - cannot run"


def make_console() -> Console:
    """A console; wide enough for the table where the output is a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=190, color_system=None)


def format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def label_of(name: str) -> str:
    """An implementation's name in a sentence or legend."""
    ours = {OURS: "flashmoe_science", NONDETERMINISTIC: "flashmoe_science, not deterministic"}
    return ours.get(name, f"PyTorch {name}")


def rate_unit(device_type: str) -> tuple[str, float]:
    """Name of the unit of speed and how many GFLOP/s it is."""
    return ("TFLOP/s", 1e3) if device_type == "cuda" else ("GFLOP/s", 1.0)


class ProgressReport:
    """A bar on a terminal, a line per row elsewhere. Call it as run_rows' on_row."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.done = console, total, 0
        self.bar: Progress | None = None
        if console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TimeElapsedColumn(), console=console, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> ProgressReport:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def __call__(self, spec: RowSpec, row: Row | None) -> None:
        if row is None:
            if self.bar:
                self.bar.update(self.task, description=spec.label)
            return
        self.done += 1
        if self.bar:
            self.bar.advance(self.task)
        else:
            ratio = "no ratio" if row["ratio"] is None else f"{row['ratio']:.2f}x"
            print(f"[{self.done}/{self.total}] {spec.label}: {ratio}", flush=True)


def names_of(rows: list[Row]) -> list[str]:
    """Every implementation of these rows, ours first, each once."""
    return list(dict.fromkeys(name for row in rows for name in row["implementations"]))


def anchors_of(rows: list[Row]) -> list[str]:
    """Every peer of these rows that was measured before, each once."""
    return list(dict.fromkeys(name for row in rows for name in row.get("anchors", {})))


def format_ms(implementation: dict[str, Any] | None) -> str:
    if implementation is None or implementation["ms"] is None:
        return "-"
    ms = implementation["ms"]
    text = format_number(ms)
    if "estimated_from_heads" in implementation:
        return text + MARKS["estimated"]
    return text + (MARKS["few"] if implementation["few_samples"] else "")


def format_number(ms: float) -> str:
    digits = 4 if ms < 1 else 3 if ms < 10 else 1 if ms < 1000 else 0
    return f"{ms:.{digits}f}"


def format_rate(implementation: dict[str, Any] | None, per_unit: float) -> str:
    if implementation is None or implementation["ms"] is None:
        return "-"
    if "gb_per_s" in implementation:
        rate = implementation["gb_per_s"]
        return f"{rate:.0f} GB/s" if rate >= 10 else f"{rate:.1f} GB/s"
    return f"{implementation['gflops'] / per_unit:.1f}"


def format_ratio(row: Row, ratio: float | None) -> str:
    if row["check"]["status"] == "failed":
        return "[bold red]wrong[/]"
    if ratio is None:
        return "-"
    style = "green" if ratio >= 1 else "yellow" if ratio >= 0.9 else "red"
    return f"[{style}]{ratio:.2f}x[/]"


def print_table(console: Console, results: dict[str, Any]) -> None:
    """All rows. A narrow terminal does without the peers' rates and a column that never changes."""
    about, rows = results["about"], results["rows"]
    unit, per_unit = rate_unit(about["device"])
    names, on_gpu = names_of(rows), about["device"] == "cuda"
    known = anchors_of(rows)
    wide = 95 + 17 * len(names) + 21 * len(known) if known else 50 + 18 * len(names)
    rated = names if console.width >= wide else [OURS]
    keys = ["workload", "label", "dtype", "pass"]
    if len({row["workload"] for row in rows}) == 1:
        keys.remove("workload")
    table = Table(title=f"attention on {title(about)}", caption=LEGEND, box=box.SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for key in keys:
        table.add_column("B,H,S,D" if key == "label" else key, no_wrap=True)
    for name in names:
        table.add_column(f"{name}\nms", justify="right", no_wrap=True)
        if name in rated:
            table.add_column(f"\n{unit}", justify="right", no_wrap=True, style="dim")
    if on_gpu:
        table.add_column("host us\nours / best", justify="right", no_wrap=True)
        table.add_column("peak memory\n/ needed", justify="right", no_wrap=True)
    table.add_column("best peer\n/ ours", justify="right", no_wrap=True)
    with_flash = "flash" in names and len(names) > 2
    if with_flash:
        table.add_column("flash\n/ ours", justify="right", no_wrap=True)
    for name in known:
        heading = f"{anchors.label_of(name)} ms".replace("measured ", "measured\n")
        table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("\n/ ours", justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], rows[-1]], strict=True):
        cells = [row[key] for key in keys]
        for name in names:
            implementation = row["implementations"].get(name)
            cells.append(format_ms(implementation))
            if name in rated:
                cells.append(format_rate(implementation, per_unit))
        cells += [format_host(row), format_memory(row)] if on_gpu else []
        ends = any(row[key] != following[key] for key in ("workload", "label"))
        cells.append(format_ratio(row, row["ratio"]))
        if with_flash:
            cells.append(format_ratio(row, row["ratios"].get("flash")))
        for name in known:
            ms = row.get("anchors", {}).get(name)
            cells.append("-" if ms is None else format_number(ms))
            cells.append(format_ratio(row, ratio_to_anchor(row, name)))
        table.add_row(*cells, end_section=ends)
    console.print(table)


def format_host(row: Row) -> str:
    """Host time per call of ours and of the best peer."""
    pair = [row["implementations"].get(name or "", {}) for name in (OURS, row["best_peer"])]
    return " / ".join(f"{i['host_us']:.0f}" if i.get("host_us") else "-" for i in pair)


def format_memory(row: Row) -> str:
    """The most memory ours held, as a multiple of what inputs and results take."""
    held = row.get("memory")
    return f"{held['peak_bytes'] / held['needed_bytes']:.2f}" if held else "-"


def print_means(console: Console, results: dict[str, Any]) -> None:
    """Geometric means of peer / ours, and the lowest of each."""
    peers = list(dict.fromkeys(p for mean in results["means"] for p in mean["peers"]))
    known = anchors_of(results["rows"])
    table = Table(title="peer / ours: geometric mean (lowest)", box=box.SIMPLE_HEAD)
    for column in ("workload", "dtype", "pass"):
        table.add_column(column)
    headings = [*(peers if len(peers) > 1 else ()), *(anchors.label_of(name) for name in known)]
    for column in ("rows", "best peer", *headings):
        table.add_column(column, justify="right")
    for mean in results["means"]:
        of_peers = [mean["peers"].get(peer) for peer in peers] if len(peers) > 1 else []
        of_peers += [mean["anchors"].get(name) for name in known]
        ratios = [f"{r['ratio']:.2f}x ({r['lowest']:.2f})" if r else "-" for r in (mean, *of_peers)]
        cells = (mean["workload"], mean["dtype"], mean["pass"], str(mean["rows"]), *ratios)
        table.add_row(*cells)
    console.print(table)


def print_bars(console: Console, results: dict[str, Any]) -> None:
    """Where the run stands: each bar, what was wanted and what was reached."""
    table = Table(title="bars", box=box.SIMPLE_HEAD)
    for column in ("", "against", "rows", "mean", "wanted", "lowest", "wanted", ""):
        table.add_column(column, justify="right" if column not in ("", "against") else "left")
    for s in standings(results["rows"], results["about"]["device"]):
        lowest = f"{s.ratios[s.lowest]:.2f}" if s.lowest else "-"
        mean = "-" if s.mean is None else f"{s.mean:.2f}"
        style = {"met": "green", "missed": "bold red"}.get(s.verdict, "dim")
        table.add_row(
            s.bar.name, s.bar.against, s.rows, mean, f"{s.bar.mean:.2f}",
            lowest, f"{s.bar.each:.2f}" if s.bar.each else "-", f"[{style}]{s.verdict}[/]",
        )  # fmt: skip
    console.print(table)


def print_host_times(console: Console, results: dict[str, Any]) -> None:
    """On a GPU: what one call costs the host, next to SDPA's."""
    for key, times in (results.get("host_us") or {}).items():
        name, ratio = key.replace("_", " "), times["ours"] / times["sdpa"]
        text = f"ours {times['ours']:.1f} us, SDPA {times['sdpa']:.1f} us, {ratio:.2f} of it"
        console.print(f"host time of a forward call {name}: {text}")


def print_problems(console: Console, results: dict[str, Any]) -> None:
    """What to know before believing the numbers: wrong rows, missing peers, a busy machine."""
    others = results["about"]["cores_busy_with_other_work"] or 0
    if others > 0.1:
        text = (
            f"other programs kept {others:.1f} cores busy meanwhile: measure again when it is quiet"
        )
        console.print(text, markup=False, style="bold yellow")
    reasons: dict[str, list[str]] = {}
    for row in results["rows"]:
        where = name_of(row)
        if row["check"]["status"] != "ok":
            text = f"{row['check']['status']}: {row['check']['reason']}"
            console.print(f"{where}: {text}", markup=False, style="bold red")
        for name, implementation in row["implementations"].items():
            if implementation["ms"] is None:
                reason = f"{name} cannot run: {implementation['reason']}"
                reasons.setdefault(reason, []).append(where)
    for reason, places in reasons.items():
        console.print(f"{reason} ({len(places)} rows, first {places[0]})", markup=False)


def provenance(about: dict[str, Any]) -> str:
    """Versions, commit and date in one line."""
    versions = about["versions"]
    commit = f"commit {about['commit'][:10]}" if about["commit"] else "no commit"
    dirty = " with changes" if about["dirty"] else ""
    package = f"flashmoe_science {versions['flashmoe_science']} ({about['cpu_target']})"
    return f"{package}, torch {versions['torch']}, {commit}{dirty}, {about['date'][:10]}"
