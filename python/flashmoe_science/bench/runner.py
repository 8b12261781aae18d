"""Runs the rows of a benchmark and keeps everything that was learned as plain data (results.py)."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science.bench import accuracy, memory, timing
from flashmoe_science.bench.case import DTYPES, PASSES, Case, Implementation
from flashmoe_science.bench.peer_file import PeerFile
from flashmoe_science.bench.results import RESTED, SUSTAINED, Row, compare
from flashmoe_science.bench.workloads import WORKLOADS

# The forward pass reads q, k, v and writes its output; the backward pass reads all four and a
# gradient and writes three.
BYTES_OF_PASS = dict(zip(PASSES, (1, 2, 3), strict=True))
BIN = 10  # tokens, of the histogram of a ragged batch's lengths

# For estimated_seconds: of making, checking, first calls and captures of a row, and of
# FlexAttention's compilation, as on an H200's host.
ROW_S = 0.3
COMPILE_S = dict(zip(PASSES, (2.0, 4.0, 4.0), strict=True))


@dataclass(frozen=True)
class RowSpec:
    """One line of the table, before it is measured: a row in each regime."""

    workload: str
    shape: Any  # of the workload's shape_type
    dtype: str
    direction: str  # one of PASSES

    @property
    def label(self) -> str:
        return f"{self.workload} ({self.shape}) {self.dtype} {self.direction}"


def rows_of(
    workloads: Iterable[str],
    shapes: list[str] | None,
    dtypes: Iterable[str] | None,
    directions: Iterable[str] | None,
    device_type: str,
) -> list[RowSpec]:
    """Every combination asked for, the workload's own where nothing was.

    ValueError for a shape, dtypes or passes that some workload cannot have.
    """
    rows = []
    for name in workloads:
        workload = WORKLOADS[name]
        passes = workload.passes_for(directions, device_type)
        if not passes:
            raise ValueError(f"--pass: workload {name} has only {', '.join(workload.passes)}")
        own_dtypes = workload.dtypes_for(dtypes, device_type)
        if not own_dtypes:
            raise ValueError(f"--dtype: workload {name} has only {', '.join(workload.dtypes)}")
        for text in shapes or workload.shapes[device_type]:
            shape = workload.shape_type.parse(text)
            if refusal := workload.refuses(shape):
                raise ValueError(f"shape {text!r}: workload {name} {refusal}")
            rows += [RowSpec(name, shape, d, p) for d in own_dtypes for p in passes]
    return rows


@dataclass(frozen=True)
class Setting:
    """What all rows of a run have in common."""

    device: torch.device
    peers: list[str]  # PyTorch's, by name
    files: list[PeerFile]  # and anybody's
    clock: timing.Clock
    schedule: timing.Schedule


def run_row(spec: RowSpec, setting: Setting) -> list[Row]:
    """Checks, then times; a row for each regime."""
    start = time.monotonic()
    torch.manual_seed(0)
    workload, backward = WORKLOADS[spec.workload], spec.direction != "fwd"
    device = setting.device
    case = workload.make(spec.shape, DTYPES[spec.dtype], device)
    oracle = make_oracle(case, backward)
    common: Row = {
        "workload": spec.workload,
        "shape": dataclasses.asdict(spec.shape),
        "label": str(spec.shape),
        "dtype": spec.dtype,
        "pass": spec.direction,
        "flops": case.flops * workload.flops_of_pass(spec.direction),
        "check": run_check(oracle, case.ours, case.reproducible),
    }
    asked = [n for n in workload.peers(device.type) if n in setting.peers or n == case.baseline]
    asked = [name for name in asked if name in case.peers]
    checks = check_peers(case, asked, oracle) if device.type == "cuda" else {}
    case, file_checks = add_peer_files(case, spec, setting.files, oracle)
    del oracle  # its float64 tensors are large
    if kernels := kernels_of(case, spec.direction):
        common["kernels"], common["family"] = kernels, family_of(kernels)
    if case.lengths:
        common["lengths"] = spread(case.lengths)
    common["check"]["seconds"] = time.monotonic() - start  # with making the case
    if device.type == "cuda" and (held := memory.measure(case, backward)):
        common["memory"] = held
    right = [name for name, check in file_checks.items() if check["status"] == "ok"]
    present = [*asked, *right]
    clock = timing.make_clock(device, True) if workload.waits_for_host else setting.clock
    measured = timing.measure(
        case, present, spec.direction, clock, setting.schedule, workload.in_graph
    )
    moved = case.bytes * BYTES_OF_PASS[spec.direction]
    another = [name for name in present if case.peers[name].another]
    rows = []
    for regime, timings in measured.items():
        found = {n: as_data(t, common["flops"], moved) for n, t in timings.items()}
        for name, check in (checks | file_checks).items():
            not_timed = {"ms": None, "reason": check.get("reason")}
            found[name] = {**found.get(name, not_timed), "check": check}
        rows.append({**common, "regime": regime, "implementations": found})
        rows[-1] |= compare(found, case.baseline, another)
    for row in rows:
        row["seconds"] = (time.monotonic() - start) / len(rows)
    return rows


def check_peers(
    case: Case, names: list[str], oracle: accuracy.Oracle | None
) -> dict[str, dict[str, Any]]:
    """What checking PyTorch's peers found, of those that run and answer the question.

    One that is off is said to be, and timed all the same: it is what models use. On a CPU a call
    may take seconds, and the tests check them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timing says why a peer cannot run
        checks = {n: run_check(oracle, case.peers[n]) for n in names if not case.peers[n].another}
    return {name: check for name, check in checks.items() if check.pop("errors", None)}


def add_peer_files(
    case: Case, spec: RowSpec, files: list[PeerFile], oracle: accuracy.Oracle | None
) -> tuple[Case, dict[str, dict[str, Any]]]:
    """The case with the files' implementations among its peers, and what checking each found.

    Its status is ok, failed (wrong), refused (it raised, or has nothing for this row) or unchecked.
    Only what is right is to be timed.
    """
    found: dict[str, Implementation] = {}
    checks: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            found[file.name] = file.implementation(spec, case)
        except Exception as error:  # NotSupported, or what supports() itself raised
            checks[file.name] = {"status": "refused", "reason": str(error)}
            continue
        check = run_check(oracle, found[file.name])
        if check["status"] == "failed" and "errors" not in check:
            check["status"] = "refused"
        checks[file.name] = check
    return dataclasses.replace(case, peers={**case.peers, **found}), checks


def kernels_of(case: Case, direction: str) -> dict[str, str]:
    """The main kernel of ours of each pass that is run, as the planner says; {} if it refuses."""
    try:
        plans = {p: case.ours.explain(case.leaves, p == "bwd") for p in direction.split("+")}
    except RuntimeError:  # the check says why
        return {}
    named = {p: re.search(r"^  kernel +(\S+)", plan, re.M) for p, plan in plans.items()}
    return {p: found[1] for p, found in named.items() if found}


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


def make_oracle(case: Case, backward: bool) -> accuracy.Oracle | None:
    """None where the float64 reference does not fit in memory."""
    try:
        return accuracy.Oracle(case, backward)
    except torch.OutOfMemoryError:
        return None


def run_check(
    oracle: accuracy.Oracle | None, implementation: Implementation, reproducible: bool = False
) -> dict[str, Any]:
    """The correctness guard as data; status is ok, failed, refused or unchecked."""
    if oracle is None:
        return {"status": "unchecked", "reason": "the float64 reference does not fit in memory"}
    try:
        verdict = oracle.verdict(implementation, reproducible)
    except Exception as error:  # whatever was raised belongs in the table, not in a traceback
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
        "turn_medians_ms": [statistics.median(turn) for turn in timed.turns],
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


def estimated_seconds(specs: list[RowSpec], setting: Setting) -> float:
    """Roughly how long the rows will take, short calls not using up their budget."""
    schedule, device = setting.schedule, setting.device.type
    turn_s = {SUSTAINED: schedule.budget_s, RESTED: schedule.budget_s + timing.PAUSE_S}
    seconds = len(specs) * ROW_S
    for spec in specs:
        theirs = [p for p in WORKLOADS[spec.workload].peers(device) if p in setting.peers]
        count = 1 + max(1, len(theirs)) + len(setting.files)
        seconds += sum(count * schedule.turns * turn_s[r] for r in schedule.regimes)
        seconds += setting.clock.load_ms / 1e3
        seconds += COMPILE_S[spec.direction] if "flex" in theirs else 0
    return seconds


def run_rows(
    specs: list[RowSpec], setting: Setting, on_rows: Callable[[RowSpec, list[Row]], None]
) -> list[Row]:
    """Runs all rows. on_rows is told when a row starts ([]) and when it is done, in each regime."""
    rows = []
    for spec in specs:
        on_rows(spec, [])
        found = run_row(spec, setting)
        rows += found
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
        on_rows(spec, found)
    return rows
