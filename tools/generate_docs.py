"""Rewrites the parts of the documentation that are made from facts.

README.md            between <!-- support:begin --> and <!-- support:end -->: what runs where, asked
                     of the planner itself
docs/performance.md  between <!-- cpu:begin --> and <!-- cpu:end -->: the newest results of each
                     machine in bench/results/cpu-<machine>-<date>.json; and so for gpu

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
RESULT_FILE = re.compile(r"(?P<kind>cpu|gpu)-(?P<machine>.+)-(?P<date>\d{4}-\d{2}-\d{2})\.json")

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
    """The last results of each machine of a kind, in the order of the machines' names."""
    newest: dict[str, tuple[str, Path]] = {}
    for path in folder.glob("*.json"):
        found = RESULT_FILE.fullmatch(path.name)
        if found and found["kind"] == kind:
            machine, dated = found["machine"], (found["date"], path)
            newest[machine] = max(newest.get(machine, dated), dated)
    return [json.loads(path.read_text()) for _, (_, path) in sorted(newest.items())]


def format_ms(implementation: dict[str, Any] | None) -> str:
    if implementation is None or implementation["ms"] is None:
        return NO
    ms = implementation["ms"]
    text = f"{ms:.3f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"
    return f"~{text}" if "estimated_from_heads" in implementation else text


def result_table(results: dict[str, Any]) -> str:
    """One machine: where and when, every row, and the means."""
    about, rows = results["about"], results["rows"]
    versions, commit = about["versions"], (about["commit"] or "unknown")[:10]
    changed = " with uncommitted changes" if about["dirty"] else ""
    peers = list(dict.fromkeys(n for r in rows for n in r["implementations"] if n != "ours"))
    on_gpu = about.get("device") == "cuda"
    unit, per_unit = ("TFLOP/s", 1e3) if on_gpu else ("GFLOP/s", 1.0)
    header = ["batch, heads, length, dim", "dtype", "pass", "ours ms", unit]
    header += [*(f"PyTorch {peer} ms" for peer in peers), "best peer / ours"]
    lines = [
        f"### {about['gpu']['name']}"
        if on_gpu
        else f"### {about['cpu']['name']}, {about['threads']} threads, {about['cpu_target']}",
        "",
        f"Commit {commit}{changed}, {about['date'][:10]}, torch {versions['torch']}, "
        f"Python {versions['python']}.",
        "",
        markdown_row(header),
        markdown_row(["---"] * 3 + ["--:"] * (len(header) - 3)),
    ]
    for row in rows:
        ours = row["implementations"]["ours"]
        name = row["label"].replace(",", ", ")
        if row["workload"] != "dense":
            name = f"{row['workload']} {name}"
        rate = NO if ours["ms"] is None else f"{ours['gflops'] / per_unit:.1f}"
        ratio = NO if row["ratio"] is None else f"{row['ratio']:.2f}"
        times = [format_ms(row["implementations"].get(peer)) for peer in peers]
        cells = [name, row["dtype"], row["pass"], format_ms(ours), rate, *times, ratio]
        lines.append(markdown_row(cells))
    means = "; ".join(f"{m['dtype']} {m['pass']} {m['ratio']:.2f}" for m in results["means"])
    return "\n".join([*lines, "", f"Geometric means of best peer / ours: {means}."])


def tables_of(kind: str, folder: Path) -> str:
    tables = [result_table(results) for results in newest_results(folder, kind)]
    if not tables:
        return "No results are committed yet; `make bench` measures your machine."
    note = "A ~ marks a peer so slow that it was called once on a few heads, and the time scaled."
    return "\n\n".join([*tables, note])


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
