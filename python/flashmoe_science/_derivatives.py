"""What every operator's autograd is made of: a derivative that is not there is refused.

It has to fail: to autograd a result without a derivative is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad


def in_forward_mode() -> bool:
    """Whether tensors may have tangents."""
    # A compiled torch.func.jvp leaves Python's count of levels alone.
    return forward_ad._current_level >= 0 or _are_functorch_transforms_active()


def has_tangent(tensors) -> bool:
    """Whether forward mode asks how a result of these moves."""
    # As in torch, inference mode and _set_fwd_grad_enabled(False) leave tangents behind.
    if not torch._C._is_fwd_grad_enabled():
        return False
    return any(x is not None and torch._VF._unpack_dual(x, 0)[1] is not None for x in tensors)


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
        if has_tangent(tensors):
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

    With the grad modes of now: a Function turns them off while it computes, and to the levels of
    torch.func around this one, which the op comes by next, the result would be a constant.
    """
    enabled, forward_enabled = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()

    def run(*args):
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.set_grad_enabled(enabled),
            forward_ad._set_fwd_grad_enabled(forward_enabled),
        ):
            return op(*args)

    return run


@contextmanager
def inside_jvp(ctx) -> Iterator[tuple]:
    """What a Function has saved, for its jvp to call ops with.

    torch turns forward mode off there, so that primals do not move a second time; but to the levels
    of torch.func around this one the result would be a constant. So forward mode is on in this
    context, and the primals come without their tangents.
    """
    with forward_ad._set_fwd_grad_enabled(True):
        yield tuple(x if x is None else torch._VF._unpack_dual(x, 0)[0] for x in ctx.saved_tensors)


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
