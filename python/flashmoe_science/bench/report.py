"""The results for people: progress and tables, from the data that goes to the JSON file."""

from __future__ import annotations

import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashmoe_science.bench.append import COPY, INDEX_COPY
from flashmoe_science.bench.attention import NONDETERMINISTIC, ROUNDED_BIAS, WITHOUT_BIAS
from flashmoe_science.bench.case import BACKENDS
from flashmoe_science.bench.machine import title
from flashmoe_science.bench.options import MASK_AS_BIAS, WITHOUT_DROPOUT
from flashmoe_science.bench.paged import APART, CHUNK, CONTIGUOUS, DECODES, SIXTEEN_BITS
from flashmoe_science.bench.results import OURS, Row, name_of, regimes_of, rows_in
from flashmoe_science.bench.runner import RowSpec
from flashmoe_science.bench.training import SDPA
from flashmoe_science.bench.workloads import WORKLOADS

MARKS = {"few": "*", "estimated": "~"}
LEGEND = "~ one call on a few heads, scaled   * few samples   - cannot run"
PYTORCH = {*BACKENDS, SDPA, "flex", "varlen", "loop", "grouped_mm", COPY, INDEX_COPY}
OUR_LABELS = {
    OURS: "flashmoe_science",
    NONDETERMINISTIC: "flashmoe_science, not deterministic",
    WITHOUT_BIAS: "flashmoe_science without the bias",
    ROUNDED_BIAS: "flashmoe_science, bias in 16 bits",
    MASK_AS_BIAS: "flashmoe_science, the mask as a bias",
    WITHOUT_DROPOUT: "flashmoe_science without dropout",
    CONTIGUOUS: "flashmoe_science without pages",
    SIXTEEN_BITS: "flashmoe_science, cache in 16 bits",
    APART: "flashmoe_science, decodes and chunk apart",
    DECODES: "flashmoe_science, decodes alone",
    CHUNK: "flashmoe_science, chunk alone",
}


def make_console() -> Console:
    """A console; wide enough for the table where the output is a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=300, color_system=None)


def format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def label_of(name: str) -> str:
    """An implementation's name in a sentence or legend."""
    return f"PyTorch {name}" if name in PYTORCH else OUR_LABELS.get(name, name)


def rate_unit(device_type: str) -> tuple[str, float]:
    """Name of the unit of speed and how many GFLOP/s it is."""
    return ("TFLOP/s", 1e3) if device_type == "cuda" else ("GFLOP/s", 1.0)


class ProgressReport:
    """A bar on a terminal, a line per row elsewhere. Call it as run_rows' on_rows."""

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

    def __call__(self, spec: RowSpec, rows: list[Row]) -> None:
        if not rows:
            if self.bar:
                self.bar.update(self.task, description=spec.label)
            return
        self.done += 1
        if self.bar:
            self.bar.advance(self.task)
            return
        ratios = ["no ratio" if r["ratio"] is None else f"{r['ratio']:.2f}x" for r in rows]
        if len(rows) > 1:
            ratios = [f"{row['regime']} {x}" for row, x in zip(rows, ratios, strict=True)]
        print(f"[{self.done}/{self.total}] {spec.label}: {', '.join(ratios)}", flush=True)


def operators_of(rows: list[Row]) -> str:
    """What these rows are about: "attention and mixture of experts"."""
    return " and ".join(dict.fromkeys(WORKLOADS[row["workload"]].operator for row in rows))


def sizes_of(rows: list[Row]) -> str:
    """What the numbers of these rows' shapes are: "B,H,S,D"."""
    return " or ".join(dict.fromkeys(WORKLOADS[row["workload"]].sizes for row in rows))


def names_of(rows: list[Row]) -> list[str]:
    """Every implementation of these rows, ours first, each once."""
    return list(dict.fromkeys(name for row in rows for name in row["implementations"]))


def format_ms(implementation: dict[str, Any] | None) -> str:
    if implementation is None:
        return "-"
    if (ms := implementation["ms"]) is None:
        return "wrong" if is_wrong(implementation) else "-"
    text = format_number(ms)
    if "estimated_from_heads" in implementation:
        return text + MARKS["estimated"]
    return text + (MARKS["few"] if implementation["few_samples"] else "")


def is_wrong(implementation: dict[str, Any]) -> bool:
    """Of a peer from a file: its answer was checked, is wrong, and was not timed."""
    return is_off(implementation) and implementation["ms"] is None


def is_off(implementation: dict[str, Any]) -> bool:
    """Its answer was checked and is further from float64's than is allowed."""
    return implementation.get("check", {}).get("status") == "failed"


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


def by_operator(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows, or means, whose peers are the same ones or nearly: a table for all would be wide."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(WORKLOADS[row["workload"]].operator, []).append(row)
    return found


def print_tables(console: Console, results: dict[str, Any]) -> None:
    """All rows, a table for each operator and regime."""
    regimes = regimes_of(results["rows"])
    for operator, rows in by_operator(results["rows"]).items():
        for regime in regimes:
            heading = f"{operator} on {title(results['about'])}"
            heading += f", {regime}" if len(regimes) > 1 else ""
            print_table(console, results["about"], rows_in(rows, regime), heading)


def print_table(console: Console, about: dict[str, Any], rows: list[Row], heading: str) -> None:
    """A narrow terminal does without the peers' rates and a column that never changes."""
    unit, per_unit = rate_unit(about["device"])
    names, on_gpu = names_of(rows), about["device"] == "cuda"
    rated = names if console.width >= 64 + 18 * len(names) else [OURS]
    keys = ["workload", "label", "dtype", "pass"]
    if len({row["workload"] for row in rows}) == 1:
        keys.remove("workload")
    table = Table(title=heading, caption=LEGEND, box=box.SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for key in keys:
        table.add_column(sizes_of(rows) if key == "label" else key, no_wrap=True)
    for name in names:
        table.add_column(f"{name}\nms", justify="right", no_wrap=True)
        if name in rated:
            table.add_column(f"\n{unit}", justify="right", no_wrap=True, style="dim")
    if on_gpu:
        table.add_column("host us\nours / best", justify="right", no_wrap=True)
        table.add_column("peak memory\n/ needed", justify="right", no_wrap=True)
    if len(names) > 2:
        table.add_column("best\npeer", no_wrap=True)
    table.add_column("best peer\n/ ours", justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], rows[-1]], strict=True):
        cells = [row[key] for key in keys]
        for name in names:
            implementation = row["implementations"].get(name)
            cells.append(format_ms(implementation))
            if name in rated:
                cells.append(format_rate(implementation, per_unit))
        cells += [format_host(row), format_memory(row)] if on_gpu else []
        cells += [row["best_peer"] or "-"] if len(names) > 2 else []
        cells.append(format_ratio(row, row["ratio"]))
        ends = any(row[key] != following[key] for key in ("workload", "label"))
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
    for means in by_operator(results["means"]).values():
        print_means_table(console, means)


def print_means_table(console: Console, means: list[dict[str, Any]]) -> None:
    peers = list(dict.fromkeys(p for mean in means for p in mean["peers"]))
    columns = ["workload", "dtype", "pass", "regime"]
    if len({mean["regime"] for mean in means}) < 2:
        columns.remove("regime")
    table = Table(title="peer / ours: geometric mean (lowest)", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column)
    for column in ("rows", "best peer", *(peers if len(peers) > 1 else ())):
        table.add_column(column, justify="right")
    for mean in means:
        of_peers = [mean["peers"].get(peer) for peer in peers] if len(peers) > 1 else []
        ratios = [f"{r['ratio']:.2f}x ({r['lowest']:.2f})" if r else "-" for r in (mean, *of_peers)]
        table.add_row(*(mean[column] for column in columns), str(mean["rows"]), *ratios)
    console.print(table)


HOST_CALLS = {
    "without_grad": "a forward call without gradients",
    "with_grad": "a forward call with gradients",
    "with_backward": "a forward and a backward call",
    "paged": "a decode over pages",
}


def print_host_times(console: Console, results: dict[str, Any]) -> None:
    """On a GPU: what one call costs the host, next to SDPA's."""
    for key, times in (results.get("host_us") or {}).items():
        sdpa = times["sdpa"]
        ways = {"ours": "ours", "hook": "through enable_sdpa()"}
        parts = [
            f"{words} {times[way]:.1f} us ({times[way] / sdpa:.2f} of SDPA's)"
            for way, words in ways.items()
            if way in times
        ]
        text = ", ".join([*parts, f"SDPA {sdpa:.1f} us"])
        console.print(f"host time of {HOST_CALLS[key]}: {text}")


def print_problems(console: Console, results: dict[str, Any]) -> None:
    """What to know before believing the numbers: wrong rows, missing peers, a busy machine."""
    others = results["about"]["cores_busy_with_other_work"] or 0
    if others > 0.1:
        text = (
            f"other programs kept {others:.1f} cores busy meanwhile: measure again when it is quiet"
        )
        console.print(text, markup=False, style="bold yellow")
    # What is to be said, and the rows it is about: a row is there once in each regime.
    wrong: dict[str, dict[str, None]] = {}
    missing: dict[str, dict[str, None]] = {}
    for row in results["rows"]:
        where, check = name_of(row), row["check"]
        if check["status"] != "ok":
            wrong.setdefault(f"ours {check['status']}: {check['reason']}", {})[where] = None
        for name, implementation in row["implementations"].items():
            if is_wrong(implementation):
                text = f"{name} is wrong and not timed: {implementation['reason']}"
                wrong.setdefault(text, {})[where] = None
            elif implementation["ms"] is None:
                text = f"{name} cannot run: {implementation['reason']}"
                missing.setdefault(text, {})[where] = None
            elif is_off(implementation):
                text = f"{name} is timed, and less exact than allowed: "
                text += implementation["check"]["reason"].split(" is off")[0]
                missing.setdefault(text, {})[where] = None
            if "no CUDA graph" in (method := implementation.get("method") or ""):
                missing.setdefault(f"{name} is timed by {method}", {})[where] = None
    for found, style in ((wrong, "bold red"), (missing, None)):
        for text, places in found.items():
            where = f"{len(places)} rows, first {next(iter(places))}"
            console.print(f"{text} ({where})", markup=False, style=style)


def provenance(about: dict[str, Any]) -> str:
    """Versions, commit and date in one line."""
    versions = about["versions"]
    commit = f"commit {about['commit'][:10]}" if about["commit"] else "no commit"
    dirty = " with changes" if about["dirty"] else ""
    package = f"flashmoe_science {versions['flashmoe_science']} ({about['cpu_target']})"
    return f"{package}, torch {versions['torch']}, {commit}{dirty}, {about['date'][:10]}"
