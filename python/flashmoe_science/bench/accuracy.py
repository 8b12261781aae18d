"""Is an answer right? Asked of ours and, on a GPU, of peers before they are timed, and by `doctor`.

The yardstick is plain PyTorch (of attention its math backend, of experts a loop), working in the
inputs' dtype as the tests' does: measured against float64 on the same rounded inputs, a root mean
square error may be at most twice its. The largest error, which finds a single wrong number, may be
that and a few rounding steps more: the largest of few is luck, and of a whole model's gradients it
is not judged. Where a case of attention is large, a few heads are compared; all are still computed,
and a gradient of a key needs all its queries, so that the least is one head: at length 16,384 one
float64 tensor of scores is then 2 GB. Each row's "check" says how many seconds it took.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from flashmoe_science.bench.case import (
    Case,
    Implementation,
    Tensors,
    each,
    forced_backend,
    named,
)

# 2^23 float64 scores are 64 MB, autograd keeps a few such tensors, and a CPU takes half a second.
MAX_SCORES = 1 << 23

# Rounding steps that (largest, root mean square) errors may be off besides, each a step of the
# largest or root mean square value. Where the math backend happens to be exact, they are all there
# is, and float64 is its own reference. In 1,000 small problems the worst fp32 error was 5.5 times
# math's and 0.64 of its limit.
STEPS = {
    torch.float64: (64, 64),
    torch.float32: (8, 0.5),
    torch.float16: (1, 0.25),
    torch.bfloat16: (1, 0.25),
}
# TF32 has as many bits as fp16, so the largest error may be off a step of that. (SDPA's math
# backend scales Q and K before they are rounded, others S: with the same root mean square error
# the largest of a million was 2.2 times math's.)
TF32_STEP = torch.finfo(torch.float16).eps


@dataclass(frozen=True)
class Deviation:
    """Errors against float64, and the most that is allowed."""

    ours: float  # of the implementation that is checked
    math: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.ours <= self.limit  # also False for NaN


@dataclass(frozen=True)
class Verdict:
    """Two deviations per result: "out max" and "out rms", and so for grad_q, grad_k, ...

    Where bits must repeat there is a third: how far "out twice" is from itself.
    """

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
            if deviation.limit and deviation.ours == deviation.ours:
                return deviation.ours / deviation.limit
            return 0.0 if deviation.ok else float("inf")

        return max(self.deviations.items(), key=badness)


def compute(implementation: Implementation, case: Case, backward: bool) -> Tensors:
    """The output and, for the backward pass, the gradient of every leaf."""
    leaves, grad = implementation.prepare(case.leaves, case.grad)
    leaves = {n: t.detach().clone().requires_grad_(backward) for n, t in leaves.items()}
    with forced_backend(implementation), nullcontext() if backward else torch.no_grad():
        out = implementation.run(leaves)
        results = {name: x.detach() for name, x in named(out).items()}
        if backward:
            if not all(x.requires_grad for x in named(out).values()):
                raise RuntimeError("gives no gradient")
            grads = torch.autograd.grad(out, list(leaves.values()), grad)
            results |= {f"grad_{name}": g for name, g in zip(leaves, grads, strict=True)}
    return results


@contextmanager
def math_in_its_dtype() -> Iterator[None]:
    """By default PyTorch's math backend computes fp16 and bf16 in fp32."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def in_double(case: Case) -> Case:
    """The same numbers as float64."""
    doubled = {name: t.double() for name, t in case.leaves.items()}
    return dataclasses.replace(case, leaves=doubled, grad=each(torch.Tensor.double, case.grad))


def heads_to_compare(case: Case) -> int:
    """As many heads as fit MAX_SCORES, at least one group of query heads that share a key head."""
    fit = int(MAX_SCORES * case.heads / max(case.scores, case.reference_scores, 1))
    return max(case.group, min(case.heads, fit) // case.group * case.group)


class Oracle:
    """What float64 and PyTorch's math backend in the same dtype say about a few heads of a case."""

    def __init__(self, case: Case, backward: bool) -> None:
        self.case, self.backward = case, backward
        self.heads = heads_to_compare(case)
        part = case if self.heads == case.heads else case.take_heads(self.heads)
        self.exact = compute(case.reference, in_double(part), backward)
        with math_in_its_dtype():
            self.math = compute(case.reference, part, backward)

    def verdict(self, implementation: Implementation, reproducible: bool = False) -> Verdict:
        """Compares an implementation with float64; reproducible: it must repeat its bits, too."""
        found = implementation.restore(compute(implementation, self.case, self.backward))
        dtype = next(iter(named(self.case.grad).values())).dtype
        deviations = {}
        for name, truth in self.exact.items():
            whole = found[name]
            mine = (whole if self.heads == self.case.heads else whole[:, : truth.shape[1]]).double()
            mine, theirs = mine - truth, self.math[name].double() - truth
            kinds = zip(("max", "rms"), (largest, root_mean_square), STEPS[dtype], strict=True)
            for kind, size, steps in kinds:
                skipped = kind == "max" and not self.case.judges_largest_of_gradients
                if skipped and name.startswith("grad_"):
                    continue
                besides = steps * torch.finfo(dtype).eps
                if implementation.tf32 and kind == "max":
                    besides += TF32_STEP
                limit = 2 * size(theirs) + besides * size(truth)
                deviations[f"{name} {kind}"] = Deviation(size(mine), size(theirs), limit)
        if reproducible:
            again = compute(implementation, self.case, self.backward)
            for name, first in found.items():
                deviations[f"{name} twice"] = Deviation(
                    largest(again[name].double() - first.double()), 0.0, 0.0
                )
        return Verdict(deviations, self.heads)


def check(case: Case, backward: bool) -> Verdict:
    """Compares ours with float64, PyTorch's math backend in the same dtype being the yardstick."""
    return Oracle(case, backward).verdict(case.ours, case.reproducible)


def root_mean_square(values: torch.Tensor) -> float:
    return values.square().mean().sqrt().item() if values.numel() else 0.0


def largest(values: torch.Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return values.abs().max().item() if values.numel() else 0.0
