"""Rewrites the parts of the documentation that are made from facts.

README.md            between <!-- support:begin --> and <!-- support:end -->: what runs where, asked
                     of the planner itself
docs/performance.md  between <!-- cpu:begin --> and <!-- cpu:end -->: the newest results of each
                     machine in bench/results/cpu-<machine>-<date>.json; and so for gpu. A name may
                     go on, -<date>-sm80.json: those are another series of the same machine

With --check nothing is written, and the exit code is 1 if anything would change.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
YES, NO = "\N{CHECK MARK}", "\N{EN DASH}"
DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
BACKENDS = {
    "cpu": ("fp64", "fp32", "fp16", "bf16"),
    "sm_75": ("fp32", "fp16", "bf16"),
    "sm_80": ("fp32", "fp16", "bf16"),
    "sm_90": ("fp32", "fp16", "bf16"),
}
RESULT_FILE = re.compile(
    r"(?P<kind>cpu|gpu)-(?P<machine>.+?)-(?P<date>\d{4}-\d{2}-\d{2})(?P<series>-.+)?\.json"
)
PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
PEERS = {"flash": "FlashAttention-2", "cudnn": "cuDNN", "nondeterministic": "not deterministic"}
ANCHORS = {"fa3": "FA3, measured before", "fa4": "FA4, measured before"}
BEST_OF_ALL = "the best of all, FA3 and FA4 included"

Maker = Callable[..., Any]  # makes a meta tensor of a size, in the dtype asked about or another
Call = dict[str, Any]  # arguments of explain()


def dense(meta: Maker, lead: tuple = (2,), kv_heads: int = 4, dim: int = 64, value_dim: int = 0):
    """q, k, v of an ordinary call: 4 heads, 48 queries, 64 keys."""
    return {
        "q": meta(*lead, 4, 48, dim),
        "k": meta(*lead, kv_heads, 64, dim),
        "v": meta(*lead, kv_heads, 64, value_dim or dim),
    }


def ragged(meta: Maker) -> Call:
    """The same two sequences, packed."""
    offsets = meta(3, dtype="int32")
    return {
        "q": meta(80, 4, 32),
        "k": meta(100, 4, 32),
        "v": meta(100, 4, 32),
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 48,
        "max_seqlen_k": 64,
    }


def transposed(meta: Maker) -> Call:
    """(B, S, H, D) tensors seen as (B, H, S, D), with rows of odd length in between."""
    return {name: meta(2, 64, 4, 65)[..., :64].transpose(1, 2) for name in "qkv"}


# What a row of the table asks: every call must be possible for a tick.
OPTIONS: dict[str, Callable[[Maker], list[Call]]] = {
    "head dims 64 and 128": lambda m: [dense(m, dim=d) for d in (64, 128)],
    "head dims 1 to 256": lambda m: [dense(m, dim=d) for d in (1, 8, 24, 33, 64, 128, 192, 256)],
    "values of another head dim": lambda m: [dense(m, value_dim=48)],
    "shared key heads (GQA, MQA)": lambda m: [dense(m, kv_heads=h) for h in (1, 2)],
    "more leading dimensions": lambda m: [dense(m, lead=(2, 3, 5))],
    "any strides": lambda m: [transposed(m)],
    "`causal`": lambda m: [dense(m) | {"causal": True}],
    "`window`": lambda m: [dense(m) | {"window": w} for w in ((8, 0), (-1, 4), (16, 16))],
    "`scale`, `softcap`": lambda m: [dense(m) | {"scale": 0.5, "softcap": 20.0}],
    "`key_lengths`": lambda m: [dense(m) | {"key_lengths": m(2, dtype="int32")}],
    "`bias` and its gradient": lambda m: [
        dense(m) | {"bias": m(*size)} for size in ((2, 4, 48, 64), (4, 48, 64), (2, 1, 1, 64))
    ],
    "`bias` in fp32": lambda m: [dense(m) | {"bias": m(2, 4, 48, 64, dtype="float32")}],
    "ragged": lambda m: [ragged(m), ragged(m) | {"causal": True}],
    "ragged with a packed `bias`": lambda m: [ragged(m) | {"bias": m(48 * 64 + 32 * 36, 4)}],
    "`deterministic=True`": lambda m: [dense(m) | {"deterministic": True}],
}


def can_run(make_calls: Callable[[Maker], list[Call]], dtype: str, device: str, back: bool) -> bool:
    """Asks the planner."""
    import torch

    from flashmoe_science import explain

    def meta(*size: int, dtype: str = dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=getattr(torch, dtype), device="meta")

    try:
        for call in make_calls(meta):
            explain(**call, backward=back, device=device)
    except RuntimeError:
        return False
    return True


def support_cell(make_calls: Callable[[Maker], list[Call]], dtype: str, device: str) -> str:
    forward, backward = (can_run(make_calls, DTYPES[dtype], device, b) for b in (False, True))
    return YES if forward and backward else "forward" if forward else NO


def support_table() -> str:
    """option x dtype x backend, as the planner answers."""
    columns = [(device, dtype) for device, dtypes in BACKENDS.items() for dtype in dtypes]
    header = ["", *(f"{device} {dtype}" for device, dtype in columns)]
    lines = [markdown_row(header), markdown_row(["---", *[":-:"] * len(columns)])]
    for name, make_calls in OPTIONS.items():
        cells = [support_cell(make_calls, dtype, device) for device, dtype in columns]
        lines.append(markdown_row([name, *cells]))
    legend = (
        f"{YES} forward and backward, {NO} refused with an error that says so. sm_75 is T4, sm_80 "
        "A100 (8.6 and 8.9, RTX 30 and 40 and L4, answer alike), sm_90 H100 and H200. "
        "`python -m flashmoe_science explain` answers for any other call."
    )
    return "\n".join([*lines, "", legend])


def markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def newest_results(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The last results of each machine and series, in the order of their names.

    Older files say neither which family ran a row nor what was measured before: added here.
    """
    from flashmoe_science.bench.anchors import add_anchors
    from flashmoe_science.bench.bars import name_families

    newest: dict[tuple[str, str], tuple[str, Path]] = {}
    for path in folder.glob("*.json"):
        found = RESULT_FILE.fullmatch(path.name)
        if found and found["kind"] == kind:
            key, dated = (found["machine"], found["series"] or ""), (found["date"], path)
            newest[key] = max(newest.get(key, dated), dated)
    found = [json.loads(path.read_text()) for _, (_, path) in sorted(newest.items())]
    for results in found:
        name_families(results)
        add_anchors(results["rows"], results["about"])
    return found


def format_ms(implementation: dict[str, Any] | None) -> str:
    if implementation is None or implementation["ms"] is None:
        return NO
    ms = implementation["ms"]
    text = f"{ms:.3f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"
    return f"~{text}" if "estimated_from_heads" in implementation else text


def provenance(about: dict[str, Any]) -> str:
    versions, commit = about["versions"], (about["commit"] or "unknown")[:10]
    changed = " with uncommitted changes" if about["dirty"] else ""
    return (
        f"Commit {commit}{changed}, {about['date'][:10]}, torch {versions['torch']}, "
        f"Python {versions['python']}"
    )


def cpu_results(results: dict[str, Any]) -> str:
    """One machine: where and when, every row, and the means."""
    about, rows = results["about"], results["rows"]
    peers = list(dict.fromkeys(n for r in rows for n in r["implementations"] if n != "ours"))
    header = ["batch, heads, length, dim", "dtype", "pass", "ours ms", "GFLOP/s"]
    header += [*(f"PyTorch {peer} ms" for peer in peers), "best peer / ours"]
    lines = [
        f"### {about['cpu']['name']}, {about['threads']} threads, {about['cpu_target']}",
        "",
        f"{provenance(about)}.",
        "",
        markdown_row(header),
        markdown_row(["---"] * 3 + ["--:"] * (len(header) - 3)),
    ]
    for row in rows:
        ours = row["implementations"]["ours"]
        name = shape_of(row)
        if row["workload"] != "dense":
            name = f"{row['workload']} {name}"
        rate = NO if ours["ms"] is None else f"{ours['gflops']:.1f}"
        times = [format_ms(row["implementations"].get(peer)) for peer in peers]
        ratio = format_ratio(row["ratio"])
        cells = [name, row["dtype"], row["pass"], format_ms(ours), rate, *times, ratio]
        lines.append(markdown_row(cells))
    means = []
    for mean in results["means"]:
        workload = mean.get("workload", "dense").replace("dense", "")
        name = f"{workload} {mean['dtype']} {mean['pass']}".strip()
        means.append(f"{name} {mean['ratio']:.2f}")
    return "\n".join([*lines, "", f"Geometric means of best peer / ours: {'; '.join(means)}."])


def shape_of(row: dict[str, Any]) -> str:
    return row["label"].replace(",", ", ")


def format_ratio(ratio: float | None) -> str:
    return NO if ratio is None else f"{ratio:.2f}"


def gpu_results(results: dict[str, Any]) -> str:
    """One machine: where and when, where we stand, and a table for each workload and pass."""
    about, rows = results["about"], results["rows"]
    forced = about.get("forced_family")
    clocks = [about.get(f"gpu_state_{when}") for when in ("before", "after")]
    where = provenance(about)
    if all(clocks):
        before, after = (state["clocks.sm"] for state in clocks)
        where += f"; SM clock {before} before the run, {after} after it"
    parts = [f"### {about['gpu']['name']}" + (f", FLASHMOE_FAMILY={forced}" if forced else "")]
    parts += filter(None, [f"{where}.", standings_table(rows)])
    sections: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        sections.setdefault((row["workload"], row["pass"]), []).append(row)
    for (workload, direction), members in sections.items():
        parts.append(f"#### {workload.replace('_', ' ').capitalize()}, {PASSES[direction]}")
        parts.append(section_table(members))
    return "\n\n".join(parts)


def standings_table(rows: list[dict[str, Any]]) -> str:
    """Where we stand against the bars of `bench --check`; nothing where none was measured."""
    from flashmoe_science.bench.bars import standings

    found = standings(rows, "cuda")
    if all(s.verdict == "not measured" for s in found):
        return ""
    header = ["peer / ours", "rows", "mean", "wanted", "lowest", "wanted", ""]
    lines = [markdown_row(header), markdown_row(["---", *["--:"] * 5, "---"])]
    for s in found:
        against = against_of(s.bar)
        name = f"{s.bar.name} ({against})" if against else s.bar.name
        lowest = s.ratios[s.lowest] if s.lowest else None
        verdict = {"met": YES, "missed": "**missed**"}.get(s.verdict, s.verdict)
        each = f"{s.bar.each:.2f}" if s.bar.each else NO
        cells = [name, s.rows, format_ratio(s.mean), f"{s.bar.mean:.2f}"]
        lines.append(markdown_row([*cells, format_ratio(lowest), each, verdict]))
    return "\n".join(lines)


def against_of(bar: Any) -> str | None:
    """Whom a bar is about, where its name does not say."""
    if bar.everyone:
        return BEST_OF_ALL
    return ANCHORS[bar.anchor] if bar.anchor else PEERS.get(bar.peer)


def ratios_of(rows: list[dict[str, Any]]) -> dict[str, dict[tuple[str, str], float | None]]:
    """Peer / ours by the peer's name in words, then by shape and dtype; anchors last.

    None where it cannot run or we are wrong; without those that have no ratio anywhere.
    """
    from flashmoe_science.bench.anchors import label_of
    from flashmoe_science.bench.bars import ratio_to, ratio_to_anchor

    peers: dict[str, dict] = {}
    known: dict[str, dict] = {}
    for row in rows:
        key, wrong = (shape_of(row), row["dtype"]), row["check"]["status"] == "failed"
        for name in row["implementations"]:
            ratio = None if wrong else ratio_to(row, name)
            peers.setdefault(PEERS.get(name, name), {})[key] = ratio
        for name in row.get("anchors", {}):
            ratio = None if wrong else ratio_to_anchor(row, name)
            known.setdefault(label_of(name), {})[key] = ratio
    del peers["ours"]
    return {h: found for h, found in {**peers, **known}.items() if any(found.values())}


def section_table(rows: list[dict[str, Any]]) -> str:
    """One line a shape, dtypes side by side: our time and rate, and peer / ours for each peer."""
    from flashmoe_science.bench.bars import geometric_mean

    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    ratios = ratios_of(rows)
    # Whom nobody asked in a dtype has no column there.
    asked = {heading: {dtype for _, dtype in found} for heading, found in ratios.items()}
    of_dtype = {d: [heading for heading in ratios if d in asked[heading]] for d in dtypes}
    unit = "GB/s" if "gb_per_s" in rows[0]["implementations"]["ours"] else "TFLOP/s"
    header = ["batch, heads, length, dim"]
    for dtype in dtypes:
        header += [f"{dtype} ms", unit, *(f"{heading} / ours" for heading in of_dtype[dtype])]
    lines = [markdown_row(header), markdown_row(["---", *["--:"] * (len(header) - 1)])]
    by_shape: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_shape.setdefault(shape_of(row), {})[row["dtype"]] = row
    for shape, members in by_shape.items():
        cells = [shape]
        for dtype in dtypes:
            cells += ours_cells(members.get(dtype))
            cells += [format_ratio(ratios[h].get((shape, dtype))) for h in of_dtype[dtype]]
        lines.append(markdown_row(cells))
    notes = []
    for heading, either in ratios.items():
        found = {key: ratio for key, ratio in either.items() if ratio}
        lowest = min(found, key=found.__getitem__)
        mean = geometric_mean(list(found.values()))
        where = " ".join(lowest)
        note = f"{heading} / ours: geometric mean {mean:.2f}"
        notes.append(f"{note}, lowest {found[lowest]:.2f} ({where}).")
    methods = {row["implementations"]["ours"].get("method") for row in rows}
    notes += [f"Timed as a {m}." for m in sorted(filter(None, methods)) if "graph of" in m]
    return "\n".join([*lines, "", *notes]).rstrip()


def ours_cells(row: dict[str, Any] | None) -> list[str]:
    """Our milliseconds and rate on a GPU."""
    ours = row["implementations"]["ours"] if row else {"ms": None}
    if row is None or ours["ms"] is None:
        return [NO, NO]
    if row["check"]["status"] == "failed":
        return ["wrong", NO]
    mark = "" if row["check"]["status"] == "ok" else " (unchecked)"
    fast = f"{ours['gb_per_s']:.0f}" if "gb_per_s" in ours else f"{ours['gflops'] / 1e3:.1f}"
    return [format_ms(ours) + mark, fast]


def tables_of(kind: str, folder: Path) -> str:
    table_of = {"cpu": cpu_results, "gpu": gpu_results}[kind]
    tables = [table_of(results) for results in newest_results(folder, kind)]
    if not tables:
        return "No results are committed yet; `make bench` measures your machine."
    note = "A ~ marks a peer so slow that it was called once on a few heads, and the time scaled."
    return "\n\n".join([*tables, note] if any("~" in table for table in tables) else tables)


def replace_block(text: str, name: str, content: str, path: Path) -> str:
    """text with what lies between the markers of name replaced by content."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        sys.exit(f"{path}: expected {begin} and then {end}, each once")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    args = parser.parse_args(argv)
    blocks = (
        ("README.md", "support", support_table()),
        ("docs/performance.md", "cpu", tables_of("cpu", args.root / "bench" / "results")),
        ("docs/performance.md", "gpu", tables_of("gpu", args.root / "bench" / "results")),
    )
    stale = False
    for file, name, content in blocks:
        path = args.root / file
        if not path.exists():
            sys.exit(f"{path} is missing")
        old = path.read_text()
        new = replace_block(old, name, content, path)
        if new == old:
            continue
        stale = True
        if args.check:
            changes = difflib.unified_diff(old.splitlines(), new.splitlines(), file, "generated")
            print("\n".join([*changes, f"{file} is out of date: run `make docs`"]))
        else:
            path.write_text(new)
            print(f"wrote {file}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
