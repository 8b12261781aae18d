"""Runs the rows of a benchmark and keeps everything that was learned as plain data.

The result of run_rows goes to results.json as it is; the table and the plot read nothing else.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science.bench import accuracy, memory, timing
from flashmoe_science.bench.bars import Row, geometric_mean, ratio_to_anchor
from flashmoe_science.bench.case import PASSES, Case, Shape
from flashmoe_science.bench.workloads import WORKLOADS

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# The backward pass has five matrix products where the forward pass has two.
FLOPS_OF_PASS = dict(zip(PASSES, (1.0, 2.5, 3.5), strict=True))
# The forward pass reads q, k, v and writes its output; the backward pass reads all four and a
# gradient and writes three.
BYTES_OF_PASS = dict(zip(PASSES, (1, 2, 3), strict=True))
BIN = 10  # tokens, of the histogram of a ragged batch's lengths

# For estimated_seconds: of making, checking and first calls of a row, and of FlexAttention's
# compilation, which is a guess.
ROW_S = 0.3
COMPILE_S = 8.0


@dataclass(frozen=True)
class RowSpec:
    """One line of the table, before it is measured."""

    workload: str
    shape: Shape
    dtype: str
    direction: str  # one of PASSES

    @property
    def label(self) -> str:
        return f"{self.workload} ({self.shape}) {self.dtype} {self.direction}"


def rows_of(
    workloads: Iterable[str],
    shapes: list[str] | None,
    dtypes: Iterable[str],
    directions: Iterable[str] | None,
    device_type: str,
) -> list[RowSpec]:
    """Every combination asked for; ValueError for a shape or passes some workload cannot have."""
    rows = []
    for name in workloads:
        workload = WORKLOADS[name]
        passes = workload.passes_for(directions, device_type)
        if not passes:
            raise ValueError(f"--pass: workload {name} has only {', '.join(workload.passes)}")
        for text in shapes or workload.shapes[device_type]:
            shape = Shape.parse(text)
            if refusal := workload.refuses(shape):
                raise ValueError(f"shape {text!r}: workload {name} {refusal}")
            rows += [RowSpec(name, shape, d, p) for d in dtypes for p in passes]
    return rows


def run_row(
    spec: RowSpec, peers: list[str], device: torch.device, clock: timing.Clock, budget_s: float
) -> Row:
    """Checks, then times, one row."""
    start = time.monotonic()
    torch.manual_seed(0)
    workload, backward = WORKLOADS[spec.workload], spec.direction != "fwd"
    case = workload.make(spec.shape, DTYPES[spec.dtype], device)
    row: Row = {
        "workload": spec.workload,
        "shape": dataclasses.asdict(spec.shape),
        "label": str(spec.shape),
        "dtype": spec.dtype,
        "pass": spec.direction,
        "flops": case.flops * FLOPS_OF_PASS[spec.direction],
        "check": run_check(case, backward),
    }
    if kernels := kernels_of(case, spec.direction):
        row["kernels"], row["family"] = kernels, family_of(kernels)
    if case.lengths:
        row["lengths"] = spread(case.lengths)
    row["check"]["seconds"] = time.monotonic() - start  # with making the case
    if device.type == "cuda" and (held := memory.measure(case, backward)):
        row["memory"] = held
    can_run = workload.peers(device.type)
    asked = [name for name in can_run if name in peers or name == case.baseline]
    present = [name for name in asked if name in case.peers]
    timings = timing.measure(case, present, spec.direction, clock, budget_s)
    moved = case.bytes * BYTES_OF_PASS[spec.direction]
    row["implementations"] = {n: as_data(t, row["flops"], moved) for n, t in timings.items()}
    row |= compare(row["implementations"], case.baseline)
    row["seconds"] = time.monotonic() - start
    return row


def kernels_of(case: Case, direction: str) -> dict[str, str]:
    """The main kernel of ours of each pass that is run, as the planner says; {} if it refuses."""
    try:
        plans = {p: case.ours.explain(case.leaves, p == "bwd") for p in direction.split("+")}
    except RuntimeError:  # the check says why
        return {}
    return {p: re.search(r"^  kernel +(\S+)", plan, re.M)[1] for p, plan in plans.items()}


def family_of(kernels: dict[str, str]) -> str:
    """ "sm90"; "sm90+sm80" where the backward pass is of another family than the forward pass."""
    return "+".join(dict.fromkeys(name.split("_")[0] for name in kernels.values()))


def spread(lengths: tuple[int, ...]) -> dict[str, Any]:
    """How long the sequences of a batch are; bins[i] counts those of up to (i + 1) * BIN tokens."""
    bins = [0] * -(-max(lengths) // BIN)
    for length in lengths:
        bins[(length - 1) // BIN] += 1
    return {
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "median": statistics.median(lengths),
        "longest": max(lengths),
        "bin": BIN,
        "bins": bins,
    }


def run_check(case: Case, backward: bool) -> dict[str, Any]:
    """The correctness guard as data; status is ok, failed, refused or unchecked."""
    try:
        verdict = accuracy.check(case, backward)
    except torch.OutOfMemoryError:
        return {"status": "unchecked", "reason": "the float64 reference does not fit in memory"}
    except Exception as error:  # whatever ours raised belongs in the table, not in a traceback
        # A call refused because there is no kernel for it yet is not a wrong answer.
        refused = "no CUDA kernel of this build" in str(error)
        status = "refused" if refused else "failed"
        return {"status": status, "reason": f"{type(error).__name__}: {error}"}
    errors = {n: dataclasses.asdict(d) for n, d in verdict.deviations.items()}
    if verdict.ok:
        return {"status": "ok", "heads_compared": verdict.heads, "errors": errors}
    name, bad = verdict.worst
    reason = f"{name} is off by {bad.ours:.3g}; at most {bad.limit:.3g} is allowed"
    return {
        "status": "failed", "reason": reason, "heads_compared": verdict.heads, "errors": errors
    }  # fmt: skip


def as_data(timed: timing.Timing, flops: float, moved_bytes: int = 0) -> dict[str, Any]:
    """A Timing for the JSON file; with GB/s where moving bytes is the work."""
    if timed.ms is None:
        return {"ms": None, "reason": timed.reason}
    data = {
        "ms": timed.ms,
        "gflops": flops / timed.ms / 1e6,
        "round_medians_ms": [statistics.median(r) for r in timed.rounds],
        "median_ms": statistics.median(timed.samples),
        "min_ms": min(timed.samples),
        "max_ms": max(timed.samples),
        "samples": len(timed.samples),
        "few_samples": timed.few,
        "method": timed.method,
    }
    if moved_bytes:
        data["gb_per_s"] = moved_bytes / timed.ms / 1e6
    if timed.estimated_from_heads is not None:
        data["estimated_from_heads"] = timed.estimated_from_heads
    if timed.host_us is not None:
        data["host_us"] = timed.host_us
    return data


def compare(
    implementations: dict[str, dict[str, Any]], baseline: str | None = None
) -> dict[str, Any]:
    """How many times our time the peers take, and which peer the row's own ratio is about."""
    ours = implementations[timing.OURS]["ms"]
    peers = {n: i["ms"] for n, i in implementations.items() if n != timing.OURS and i["ms"]}
    ratios = {name: ms / ours for name, ms in peers.items()} if ours else {}
    best = baseline or min(peers, key=peers.__getitem__, default=None)
    return {"best_peer": best, "ratio": ratios.get(best), "ratios": ratios}


def means(rows: list[Row], *keys: str) -> list[dict[str, Any]]:
    """Ratios of rows that share these keys: geometric means and the lowest; wrong rows left out.

    "ratio" is about the best peer of each row, "peers" about each of them, "anchors" about those
    that were measured before.
    """
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["ratio"] is not None and row["check"]["status"] != "failed":
            groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    found = []
    for group, members in groups.items():
        by_peer: dict[str, list[float]] = {}
        by_anchor: dict[str, list[float]] = {}
        for row in members:
            for peer, ratio in row["ratios"].items():
                by_peer.setdefault(peer, []).append(ratio)
            for anchor in row.get("anchors", {}):
                by_anchor.setdefault(anchor, []).append(ratio_to_anchor(row, anchor))
        mean = {
            **summary([row["ratio"] for row in members]),
            "peers": {peer: summary(ratios) for peer, ratios in by_peer.items()},
            "anchors": {anchor: summary(ratios) for anchor, ratios in by_anchor.items()},
        }
        found.append(dict(zip(keys, group, strict=True)) | mean)
    return found


def summary(ratios: list[float]) -> dict[str, Any]:
    return {"rows": len(ratios), "ratio": geometric_mean(ratios), "lowest": min(ratios)}


def estimated_seconds(
    specs: list[RowSpec], peers: list[str], budget_s: float, device: str
) -> float:
    """Roughly how long the rows will take, short calls not using up their budget."""
    seconds = len(specs) * ROW_S
    round_s = budget_s + (timing.REST_S if device == "cuda" else 0)
    for spec in specs:
        theirs = [p for p in WORKLOADS[spec.workload].peers(device) if p in peers]
        seconds += 2 * (1 + max(1, len(theirs))) * round_s
        seconds += COMPILE_S if "flex" in theirs else 0
    return seconds


def run_rows(
    specs: list[RowSpec],
    peers: list[str],
    device: torch.device,
    budget_s: float,
    on_row: Callable[[RowSpec, Row | None], None],
) -> list[Row]:
    """Runs all rows. on_row is told when a row starts (None) and when it is done."""
    clock = timing.make_clock(device)
    rows = []
    for spec in specs:
        on_row(spec, None)
        rows.append(run_row(spec, peers, device, clock, budget_s))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        on_row(spec, rows[-1])
    return rows
