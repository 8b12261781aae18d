"""What every operator's autograd is made of: a derivative that is not there is refused.

It has to fail: to autograd a result without a derivative is a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd import forward_ad


class Refusals(NamedTuple):
    """What is said to who asks for more than a gradient."""

    forward_mode: str
    second: str

    @classmethod
    def of(cls, operator: str, gradients: str, instead: str) -> Refusals:
        """``gradients``: which ways to a gradient there are. ``instead``: what has the rest."""
        return cls(
            f"flashmoe_science {operator} has no forward-mode derivative yet, which "
            "torch.func.jvp, linearize, jacfwd, hessian and torch.autograd.forward_ad ask for. "
            f"Gradients are there: {gradients}. {instead}",
            f"flashmoe_science {operator} has no second derivative yet: its gradients cannot be "
            f"differentiated twice. {instead}",
        )

    def refuse_tangents(self, tensors) -> None:
        # As in torch, inference mode and _set_fwd_grad_enabled(False) leave tangents behind.
        if not torch._C._is_fwd_grad_enabled():
            return
        for tensor in tensors:
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError(self.forward_mode)


def as_node(name: str, run: Callable, refusals: Refusals) -> Callable:
    """A backward pass as a node of the graph: differentiating it fails, rather than giving 0."""

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args):
            return run(*args)

        @staticmethod
        def setup_context(ctx, inputs, output) -> None:
            pass

        @staticmethod
        def backward(ctx, *grads):
            raise NotImplementedError(refusals.second)

        @staticmethod
        def jvp(ctx, *tangents):
            raise NotImplementedError(refusals.forward_mode)

    Backward.__name__ = Backward.__qualname__ = name
    return Backward.apply


def plain_apply(function: type[torch.autograd.Function]) -> Callable:
    """Function.apply() without its Python part, which only unwraps tensors of functorch."""
    return super(torch.autograd.Function, function).apply


def below_autograd(op) -> Callable:
    """The op as its own autograd calls it.

    With the grad mode of now: a Function turns it off while it computes, and to the levels of
    torch.func around this one, which the op comes by next, the result would be a constant.
    """
    enabled = torch.is_grad_enabled()

    def run(*args):
        with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(enabled):
            return op(*args)

    return run


_fragment = torch.library.Library("flashmoe", "FRAGMENT")


def give_autograd(op: str, kernel: Callable) -> None:
    """Autograd of its own for an op that traced graphs hold.

    So an exported program can be trained. It is also what torch.func sees: each of its levels comes
    by there, so that none is forgotten.
    """
    _fragment.impl(op, kernel, "Autograd")


def without_autograd(*ops: str) -> None:
    """For ops without a gradient of their own.

    Each call would go through torch's fallback for ops that nobody gave one.
    """
    for op in ops:
        _fragment.impl(op, torch.library.fallthrough_kernel, "Autograd")


def at_key(op: str, key: str, kernel: Callable) -> None:
    """What an op does where the dispatcher comes by that key; the kernel is given those to come."""
    _fragment.impl(op, kernel, key, with_keyset=True)
