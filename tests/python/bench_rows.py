"""Rows of the benchmark, without making the tensors of a GPU's."""

from __future__ import annotations

from flashmoe_science.bench import ragged
from flashmoe_science.bench.case import Shape
from flashmoe_science.bench.workloads import WORKLOADS

ATTENTION = {n: workload for n, workload in WORKLOADS.items() if workload.operator == "attention"}


def flops_of(workload: str, shape: str) -> float:
    """Of the forward pass of attention."""
    parsed = Shape.parse(shape)
    pairs = parsed.batch * parsed.pairs
    if workload == "mixed_lengths" and not parsed.even:
        lengths = ragged.uniform_lengths(parsed.batch, parsed.length)
        pairs = sum(n * n for n in lengths) // (2 if parsed.causal else 1)
    return 4.0 * pairs * parsed.heads * parsed.dim
