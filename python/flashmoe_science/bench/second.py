"""Second derivatives: a case whose output is the gradients of another, as forces are of an energy.

The forward pass of such a case is both passes of the other, so that the backward pass alone is what
a model of atoms needs beyond them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from flashmoe_science.bench.case import Case, Implementation, Outputs, Tensors

# Matrix products with a score for each of their numbers, or for each that they sum: two forward,
# five backward, and twelve in the backward pass of that: q k^T, dout v^T, ddq k^T, q ddk^T and
# dout ddv^T for the scores; two each for the gradients of dout, q and k, one for that of v.
FIRST, SECOND = 7, 12
GRADIENT = "dout"  # the leaf that is the gradient of the other's output


def gradients(run: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], Outputs]:
    """The gradients that run's output has, as a function that has gradients itself."""

    def both(leaves: Tensors) -> Outputs:
        inputs = {name: leaf for name, leaf in leaves.items() if name != GRADIENT}
        with torch.enable_grad():
            out = run(inputs)
            return torch.autograd.grad(
                out, list(inputs.values()), leaves[GRADIENT], create_graph=True
            )

    return both


def twice(case: Case, explain: Callable[[Tensors, bool], str]) -> Case:
    """A case of attention one derivative further; its peer is PyTorch's math, the only one that has
    the derivative. explain says what ours would run: the backward pass, or that of it."""

    def further(implementation: Implementation) -> Implementation:
        return dataclasses.replace(implementation, run=gradients(implementation.run))

    def explain_inputs(leaves: Tensors, backward: bool) -> str:
        return explain({n: leaf for n, leaf in leaves.items() if n != GRADIENT}, backward)

    return dataclasses.replace(
        case,
        leaves={**case.leaves, GRADIENT: case.grad},
        grad=tuple(map(torch.randn_like, case.leaves.values())),
        flops=case.flops * FIRST / 2,
        ours=dataclasses.replace(further(case.ours), explain=explain_inputs),
        reference=further(case.reference),
        peers={"math": further(case.reference)},
        wrap=gradients,
    )
