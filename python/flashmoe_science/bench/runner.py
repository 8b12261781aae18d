"""Runs the rows of a benchmark and keeps everything that was learned as plain data.

The result of run_rows goes to results.json as it is; the table and the plot read nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science.bench import accuracy, timing
from flashmoe_science.bench.workloads import WORKLOADS, Case, Shape

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PASSES = ("fwd", "fwd+bwd")
# The backward pass has five matrix products where the forward pass has two.
FLOPS_OF_PASS = {"fwd": 1.0, "fwd+bwd": 3.5}

# What `bench --check` demands on the CPU: ratios against PyTorch's better backend.
CPU_BARS = {"fp32": 1.0, "fp16": 1.2, "bf16": 1.2}
CPU_BAR_OF_ANY_ROW = 0.9

Row = dict[str, Any]


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
    directions: Iterable[str],
    device_type: str,
) -> list[RowSpec]:
    """Every combination asked for; ValueError for a shape some workload cannot have."""
    rows = []
    for name in workloads:
        workload = WORKLOADS[name]
        for text in shapes or workload.shapes[device_type]:
            shape = Shape.parse(text)
            if refusal := workload.refuses(shape):
                raise ValueError(f"shape {text!r}: workload {name} {refusal}")
            rows += [RowSpec(name, shape, d, p) for d in dtypes for p in directions]
    return rows


def run_row(
    spec: RowSpec, peers: list[str], device: torch.device, clock: timing.Clock, budget_s: float
) -> Row:
    """Checks, then times, one row."""
    torch.manual_seed(0)
    workload, backward = WORKLOADS[spec.workload], spec.direction == "fwd+bwd"
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
    present = [name for name in peers if name in case.peers]
    timings = timing.measure(case, present, backward, clock, budget_s)
    row["implementations"] = {n: as_data(t, row["flops"]) for n, t in timings.items()}
    row |= compare(row["implementations"])
    return row


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


def as_data(timed: timing.Timing, flops: float) -> dict[str, Any]:
    """A Timing for the JSON file."""
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
    }
    if timed.estimated_from_heads is not None:
        data["estimated_from_heads"] = timed.estimated_from_heads
    if timed.host_us is not None:
        data["host_us"] = timed.host_us
    return data


def compare(implementations: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Who is the best peer, and how many times its time is ours."""
    ours = implementations[timing.OURS]["ms"]
    peers = {n: i["ms"] for n, i in implementations.items() if n != timing.OURS and i["ms"]}
    best = min(peers, key=peers.__getitem__, default=None)
    return {"best_peer": best, "ratio": peers[best] / ours if best and ours else None}


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def means(rows: list[Row], *keys: str) -> list[dict[str, Any]]:
    """Geometric means of the ratios of rows that share these keys. Wrong rows do not count."""
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        if row["ratio"] is not None and row["check"]["status"] != "failed":
            groups.setdefault(tuple(row[k] for k in keys), []).append(row["ratio"])
    found = []
    for group, ratios in groups.items():
        mean = {"rows": len(ratios), "ratio": geometric_mean(ratios)}
        found.append(dict(zip(keys, group, strict=True)) | mean)
    return found


def missed_bars(rows: list[Row]) -> list[str]:
    """What `--check` finds missing on the CPU, in words."""
    missed = []
    by_dtype = {mean["dtype"]: mean["ratio"] for mean in means(rows, "dtype")}
    if not by_dtype:
        missed.append("no row has both our time and a peer's")
    for dtype, ratio in by_dtype.items():
        if ratio < CPU_BARS[dtype]:
            missed.append(f"{dtype}: geometric mean {ratio:.2f}, at least {CPU_BARS[dtype]} wanted")
    for row in rows:
        name = f"{row['workload']} ({row['label']}) {row['dtype']} {row['pass']}"
        if row["ratio"] is None:
            missed.append(f"{name}: no ratio")
        elif row["ratio"] < CPU_BAR_OF_ANY_ROW:
            missed.append(f"{name}: {row['ratio']:.2f}, at least {CPU_BAR_OF_ANY_ROW} wanted")
    return missed


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
