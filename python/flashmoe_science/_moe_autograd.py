"""What torch's transforms can ask of the experts and the router: gradients, the rest is refused."""

from __future__ import annotations

from torch import is_grad_enabled, library
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad

from . import _library
from ._derivatives import (
    Refusals,
    as_node,
    below_autograd,
    give_autograd,
    plain_apply,
    without_autograd,
)

_GRADIENTS = "torch.autograd.grad, torch.func.grad and vjp"
_MOE = Refusals.of("moe", _GRADIENTS, "For this call loop over the experts with F.linear.")
_ROUTE = Refusals.of("route", _GRADIENTS, "For this call use torch.softmax and torch.topk.")


class _Moe(Function):
    """Differentiable in x, gate_up, down, both biases and weights.

    Kept for the backward pass: the inputs, the pre-activations and the routing.
    """

    @staticmethod
    def forward(ctx, x, gate_up, down, up_bias, down_bias, weights, rest):
        run, ids, ctx.activation, all_results = rest
        inputs = (x, gate_up, down, up_bias, down_bias, ids, weights)
        out, pre, routing = run(*inputs, ctx.activation, True)
        ctx.save_for_backward(pre, routing, *inputs)
        if not all_results:
            return out
        ctx.mark_non_differentiable(pre, routing)
        ctx.set_materialize_grads(False)  # for these two they would be large
        return out, pre, routing

    @staticmethod
    def backward(ctx, grad_out, *_):
        needs = ctx.needs_input_grad[:6]
        if grad_out is None:
            return (None,) * 7
        saved = ctx.saved_tensors
        if is_grad_enabled():  # under create_graph, which torch.func always asks for
            run = _recorded_moe_backward
        else:
            run = _library.moe_backward
            if forward_ad._current_level >= 0:
                _MOE.refuse_tangents((grad_out, *saved[2:]))
        grads = run(grad_out, *saved, ctx.activation, *needs)
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None


_recorded_moe_backward = as_node("MoeBackward", _library.moe_backward, _MOE)
_apply_moe = plain_apply(_Moe)


def wants_gradient(tensors) -> bool:
    """Whether a call on these is recorded."""
    if is_grad_enabled():
        for x in tensors:  # any() of a generator takes twice as long
            if x is not None and x.requires_grad:
                return True
    return False


def mix(run, tensors, activation, keep=False, all_results=False):
    """``run`` on the tensors, recorded for the backward pass where a gradient is wanted.

    ``keep``: another level of torch.func wants what the backward pass needs.
    """
    if forward_ad._current_level >= 0:
        _MOE.refuse_tangents(tensors)
    if wants_gradient(tensors):
        x, gate_up, down, up_bias, down_bias, ids, weights = tensors
        rest = (run, ids, activation, all_results)
        return _apply_moe(x, gate_up, down, up_bias, down_bias, weights, rest)
    results = run(*tensors, activation, keep)
    return results if all_results else results[0]


class _Route(Function):
    """Differentiable in the logits."""

    @staticmethod
    def forward(ctx, logits, rest):
        run, bias, k, *ctx.options = rest
        weights, ids = run(logits, bias, k, *ctx.options)
        ctx.save_for_backward(logits, ids)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)
        return weights, ids

    @staticmethod
    def backward(ctx, grad_weights, _):
        if grad_weights is None:
            return None, None
        saved = ctx.saved_tensors
        if is_grad_enabled():
            run = _recorded_route_backward
        else:
            run = _library.route_backward
            if forward_ad._current_level >= 0:
                _ROUTE.refuse_tangents((grad_weights, saved[0]))
        return run(grad_weights, *saved, *ctx.options), None


_recorded_route_backward = as_node("RouteBackward", _library.route_backward, _ROUTE)
_apply_route = plain_apply(_Route)


def choose(run, logits, *rest):
    """``run`` on the logits, recorded for the backward pass where a gradient is wanted."""
    if forward_ad._current_level >= 0:
        _ROUTE.refuse_tangents((logits,))
    if wants_gradient((logits,)):
        return _apply_route(logits, (run, *rest))
    return run(logits, *rest)


def _moe_autograd(*args):
    *tensors, activation, keep = args
    with enable_single_level_autograd_function():
        return mix(below_autograd(_library.moe), tensors, activation, keep, all_results=True)


def _route_autograd(*args):
    with enable_single_level_autograd_function():
        return choose(below_autograd(_library.route), *args)


give_autograd("moe", _moe_autograd)
give_autograd("route", _route_autograd)
without_autograd("moe_forward", "moe_backward", "route_forward", "route_backward")


def _refuse_vmap(operator: str, *ops: str) -> None:
    def refuse(info, dims, *args):
        raise NotImplementedError(
            f"flashmoe_science {operator} has no vmap yet, which torch.func.vmap, jacrev and "
            "is_grads_batched ask for. All its inputs but the experts may have any leading "
            "dimensions: pass the batch as it is."
        )

    for op in ops:
        library.register_vmap(f"flashmoe::{op}", refuse)


_refuse_vmap("moe", "moe", "moe_backward", "explain_moe")
_refuse_vmap("route", "route", "route_backward")
