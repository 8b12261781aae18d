"""What torch's transforms can ask of attention: gradients and vmap are given, the rest refused."""

from __future__ import annotations

from torch import Tensor, is_grad_enabled, library, stack
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

_REFUSALS = Refusals.of(
    "attention",
    "torch.autograd.grad, torch.func.grad, vjp and jacrev",
    "For this call use F.scaled_dot_product_attention with SDPBackend.MATH.",
)


def _split(args) -> tuple[tuple, tuple]:
    """The tensors of an op, from query to cu_seqlens_k, and what comes after them."""
    return args[:8], args[8:]


class _Attention(Function):
    """Differentiable in query, key, value, bias and sinks; both results have gradients.

    Host time is counted in microseconds here: what needs no gradient comes in one tuple, and lse is
    a result only where it is asked for.
    """

    @staticmethod
    def forward(ctx, query, key, value, bias, sinks, rest):
        run, lengths, ctx.options, return_lse = rest
        out, lse = run(query, key, value, bias, sinks, *lengths, *ctx.options)
        ctx.save_for_backward(out, lse, query, key, value, bias, sinks, *lengths)
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse=None):
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[:5]
        if is_grad_enabled():  # under create_graph, which torch.func always asks for
            run = _recorded_backward
        else:
            run = _library.backward
            if forward_ad._current_level >= 0:
                _REFUSALS.refuse_tangents((grad_out, grad_lse, *saved[2:7]))
        grads = run(grad_out, grad_lse, *saved, *ctx.options, *needs)
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None


_recorded_backward = as_node("AttentionBackward", _library.backward, _REFUSALS)
_apply = plain_apply(_Attention)


def attend(run, tensors, options, return_lse):
    """``run`` on the tensors, recorded for the backward pass where a gradient is wanted.

    Without one it is called directly: autograd costs half as much again.
    """
    q, k, v, bias, sinks = tensors[:5]
    if forward_ad._current_level >= 0:
        _REFUSALS.refuse_tangents((q, k, v, bias, sinks))
    if is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    ):
        return _apply(q, k, v, bias, sinks, (run, tensors[5:], options, return_lse))
    out, lse = run(*tensors, *options)
    return (out, lse) if return_lse else out


# Called eagerly this would cost twice what attend() does (38 us for 21 on a GPU host).
def _attention_autograd(*args):
    with enable_single_level_autograd_function():  # torch.func wants to hear that we mean it
        return attend(below_autograd(_library.attention), *_split(args), return_lse=True)


give_autograd("attention", _attention_autograd)
without_autograd("attention_forward", "attention_backward")


# vmap: one leading dimension more, which the kernels take as it is.


def _stack(tensor: Tensor | None, dim: int | None, size: int, rank: int = 0) -> Tensor | None:
    """The mapped dimension first, then as many of size 1 as broadcasting to `rank` needs."""
    if tensor is None:
        return None
    stacked = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return stacked[(slice(None), *([None] * (rank - stacked.dim())))]


def _stack_inputs(info, dims, tensors) -> tuple:
    (q, k, v, bias, sinks, key_lengths, cu_q, _), size = tensors, info.batch_size
    if cu_q is not None:
        raise NotImplementedError(
            "flashmoe_science attention over ragged batches has no vmap yet, which torch.func.vmap "
            "and jacrev ask for. Pack the sequences of all samples into one call, or map over "
            "flash_attention."
        )
    q, k, v = (_stack(x, dim, size) for x, dim in zip((q, k, v), dims, strict=False))
    bias = _stack(bias, dims[3], size, q.dim())
    return q, k, v, bias, sinks, _stack(key_lengths, dims[5], size, q.dim() - 3), None, None


def _one_by_one(op, info, dims, args):
    """For samples with sinks of their own, or gradients of them: a call has one sink for a head."""
    results = [
        op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, dims, strict=True)))
        for i in range(info.batch_size)
    ]
    return tuple(stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])


@library.register_vmap("flashmoe::attention")
def _attention_vmap(info, dims, *args):
    tensors, options = _split(args)
    stacked = _stack_inputs(info, dims, tensors)
    if dims[4] is not None:
        return _one_by_one(_library.attention, info, dims, args)
    return _library.attention(*stacked, *options), (0, 0)


@library.register_vmap("flashmoe::explain")
def _explain_vmap(info, dims, *args):
    tensors, rest = _split(args)
    stacked = list(_stack_inputs(info, dims, tensors))
    if dims[4] is not None:
        stacked[4] = stacked[4].select(dims[4], 0)
    return _library.explain(*stacked, *rest), None


@library.register_vmap("flashmoe::attention_backward")
def _attention_backward_vmap(info, dims, *args):
    results, (tensors, rest) = args[:4], _split(args[4:])
    inputs, needs = _stack_inputs(info, dims[4:], tensors), rest[-5:]
    wanted = [need and x is not None for x, need in zip(inputs[:5], needs, strict=True)]
    if wanted[4]:
        return _one_by_one(_library.backward, info, dims, args)
    inputs = (*inputs[:4], None, *inputs[5:])  # sinks are in out and lse; only their gradient asks
    results = (_stack(x, dim, info.batch_size) for x, dim in zip(results, dims[:4], strict=True))
    grads = _library.backward(*results, *inputs, *rest)
    return grads, tuple(0 if want else None for want in wanted)
