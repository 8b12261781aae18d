"""Is our answer right? Asked before anything is timed, and by `doctor`.

The yardstick is PyTorch's math backend in the same dtype: computed against float64 on the same rounded
inputs, our error may be at most twice its error. Where a case is large, a few heads are compared; ours
still computes all of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from flashmoe_science.bench.workloads import Case, Implementation, Tensors, forced_backend

# 2^24 float64 scores are 128 MB, and autograd keeps a few such tensors.
MAX_SCORES = 1 << 24


@dataclass(frozen=True)
class Deviation:
    """Largest absolute errors of one result against float64."""

    ours: float
    math: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.ours <= self.limit  # also False for NaN


@dataclass(frozen=True)
class Verdict:
    """One deviation per result: out, and grad_q, grad_k, ... for the backward pass."""

    deviations: dict[str, Deviation]
    heads: int  # how many heads were compared

    @property
    def ok(self) -> bool:
        return all(deviation.ok for deviation in self.deviations.values())

    @property
    def worst(self) -> tuple[str, Deviation]:
        """The result nearest to, or furthest past, its limit."""

        def badness(item: tuple[str, Deviation]) -> float:
            deviation = item[1]
            if deviation.ours != deviation.ours:
                return float("inf")
            return deviation.ours / deviation.limit if deviation.limit else deviation.ours

        return max(self.deviations.items(), key=badness)


def compute(implementation: Implementation, case: Case, backward: bool) -> Tensors:
    """The output and, for the backward pass, the gradient of every leaf."""
    leaves = {n: t.detach().clone().requires_grad_(backward) for n, t in case.leaves.items()}
    with forced_backend(implementation), nullcontext() if backward else torch.no_grad():
        out = implementation.run(leaves)
        results = {"out": out.detach()}
        if backward:
            grads = torch.autograd.grad(out, list(leaves.values()), case.grad)
            results |= {f"grad_{name}": g for name, g in zip(leaves, grads, strict=True)}
    return results


def in_double(case: Case) -> Case:
    """The same numbers as float64."""
    doubled = {name: t.double() for name, t in case.leaves.items()}
    return Case(**{**vars(case), "leaves": doubled, "grad": case.grad.double()})


def heads_to_compare(case: Case) -> int:
    """As many heads as fit MAX_SCORES, at least one group of query heads that share a key head."""
    fit = int(MAX_SCORES * case.heads / max(case.scores, 1))
    return max(case.group, min(case.heads, fit) // case.group * case.group)


def check(case: Case, backward: bool) -> Verdict:
    """Compares ours with float64, PyTorch's math backend in the same dtype being the yardstick."""
    heads = heads_to_compare(case)
    part = case if heads == case.heads else case.take_heads(heads)
    exact = compute(case.reference, in_double(part), backward)
    math = compute(case.reference, part, backward)
    ours = compute(case.ours, case, backward)
    eps = torch.finfo(case.leaves["q"].dtype).eps
    deviations = {}
    for name, truth in exact.items():
        mine = ours[name][:, : truth.shape[1]]
        math_error = largest(math[name] - truth)
        # Half a unit in the last place of the largest value, where math happens to be exact.
        floor = eps / 2 * largest(truth)
        deviations[name] = Deviation(largest(mine - truth), math_error, max(2 * math_error, floor))
    return Verdict(deviations, heads)


def largest(values: torch.Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return values.abs().max().item() if values.numel() else 0.0
