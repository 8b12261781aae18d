"""The most memory a call of ours holds, and what it cannot do without."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from flashmoe_science.bench.case import Case, named


def needed_bytes(case: Case, backward: bool) -> int | None:
    """Inputs, output, and what a pass must keep; backward also the gradients of all of them."""
    if (kept := case.kept_bytes(backward)) is None:
        return None
    inputs = sum(leaf.nbytes for leaf in case.leaves.values())
    forward = inputs + grad_bytes(case) + kept
    return forward + (grad_bytes(case) + inputs if backward else 0)


def grad_bytes(case: Case) -> int:
    """Of the gradient of the output, which is as large as the output."""
    return sum(grad.nbytes for grad in named(case.grad).values())


def peak_bytes(case: Case, backward: bool, meter: Any) -> int:
    """The inputs, and what one call held beyond them at its worst moment.

    meter is torch.cuda, or something that has the same functions.
    """
    leaves = {n: t.detach().requires_grad_(backward) for n, t in case.leaves.items()}
    inputs = sum(leaf.nbytes for leaf in leaves.values()) + (grad_bytes(case) if backward else 0)
    meter.synchronize()
    meter.reset_peak_memory_stats()
    before = meter.memory_allocated()
    with nullcontext() if backward else torch.no_grad():
        out = case.ours.run(leaves)
        if backward:
            torch.autograd.grad(out, list(leaves.values()), case.grad)
    meter.synchronize()
    return inputs + meter.max_memory_allocated() - before


def measure(case: Case, backward: bool, meter: Any = torch.cuda) -> dict[str, int] | None:
    """Both as data; None where nobody knows, or the call fails, which the row says elsewhere."""
    if (needed := needed_bytes(case, backward)) is None:
        return None
    try:
        peak = peak_bytes(case, backward, meter)
    except Exception:  # a kernel that is missing, or too little memory: timing finds it, too
        return None
    return {"peak_bytes": peak, "needed_bytes": needed}
