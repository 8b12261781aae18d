"""What torch's transforms can ask of attention: first and second derivatives, forward mode, vmap.

Four ops, of which each is the derivative of another, with x for query, key, value, bias and
sinks:

    attention           out, lse of x
    attention_tangent   how they move along a tangent of x: forward mode
    attention_gradients gradients by x of <grad_out, out> + <grad_lse, lse>
    attention_second    gradients by x of <grad_out, tangent_out> + <grad_lse, tangent_lse>

Gradients are given out and lse, and second ones tangent_out and tangent_lse, as numbers that save
time: all of them follow from x, and derivatives by x count what comes through them.
"""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled, library, stack
from torch._C import (
    _AutoDispatchBelowAutograd,
    _is_fwd_grad_enabled,
    _len_torch_dispatch_stack,
)
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import Function
from torch.nn import Parameter

from . import _library
from ._derivatives import (
    below_autograd,
    give_autograd,
    has_tangent,
    in_forward_mode,
    inside_jvp,
    plain_apply,
    without_autograd,
)

_INSTEAD = "For this call use F.scaled_dot_product_attention with SDPBackend.MATH."
_THIRD = (
    "flashmoe_science attention has no third derivative: its second derivatives cannot be "
    f"differentiated again. {_INSTEAD}"
)
_FORWARD_TWICE = (
    "flashmoe_science attention has no forward mode over forward mode, which torch.func.jvp of jvp "
    "and jacfwd of jacfwd ask for. Second derivatives are there: torch.func.hessian, jvp of grad, "
    f"grad of jvp, grad of grad. {_INSTEAD}"
)
_INPUTS = 5  # x: query, key, value, bias, sinks
_NOTHING = (None,) * _INPUTS


def _split(args) -> tuple[tuple, tuple]:
    """The tensors of an op, from query to cu_seqlens_k, and what comes after them."""
    return args[:8], args[8:]


def _save(ctx, options, tensors, moves=(), forward=True) -> None:
    """Saves the tensors of a call for both modes, and ``moves`` for reverse mode alone.

    The seed of dropout, the last of the options, is a tensor too: saved as one, so that torch
    refuses to use it once it was changed in place.
    """
    *ctx.options, seed = options
    ctx.save_for_backward(*moves, *tensors, seed)
    if forward:
        ctx.save_for_forward(*tensors, seed)


def _saved(ctx, tensors) -> tuple:
    """What _save() was given, the options last; ``tensors`` is what the context has of it."""
    *tensors, seed = tensors
    return *tensors, *ctx.options, seed


def _only(wanted, results) -> tuple:
    """None for what nobody asked for, which the ops return as empty tensors."""
    return tuple(x if want else None for x, want in zip(results, wanted, strict=True))


def _sum(a, b):
    return b if a is None else a if b is None else a + b


class _Attention(Function):
    """Differentiable in query, key, value, bias and sinks; both results have gradients.

    Host time is counted in microseconds here: what needs no gradient comes in one tuple, and lse is
    a result only where it is asked for.
    """

    @staticmethod
    def forward(ctx, query, key, value, bias, sinks, rest):
        run, lengths, options, return_lse = rest
        out, lse = run(query, key, value, bias, sinks, *lengths, *options)
        call, forward = (out, lse, query, key, value, bias, sinks, *lengths), in_forward_mode()
        _save(ctx, options, call, forward=forward)
        if forward:
            ctx.set_materialize_grads(False)
            ctx.return_lse = return_lse
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse=None):
        saved, needs = _saved(ctx, ctx.saved_tensors), ctx.needs_input_grad[:_INPUTS]
        run = _library.backward
        if is_grad_enabled() or in_forward_mode():  # someone may differentiate again
            run = _library.gradients
        grads = run(grad_out, grad_lse, *saved, *needs)
        return *_only(needs, grads), None

    @staticmethod
    def jvp(ctx, *tangents):
        with inside_jvp(ctx) as saved:
            moved = _library.tangent(*tangents[:_INPUTS], *_saved(ctx, saved))
        return moved if ctx.return_lse else moved[0]


_apply = plain_apply(_Attention)


def _is_plain(tensors, options) -> bool:
    """Whether a node in C++ has all there is of a call: q, k, v, a bias, causal and scale.

    What traces a call is given an op of ours, and so is a meta tensor, or one among others.
    """
    q, k, v, bias, sinks, key_lengths, cu_seqlens_q, _ = tensors
    if sinks is not None or key_lengths is not None or cu_seqlens_q is not None:
        return False
    if not (type(q) is type(k) is type(v) is Tensor) or _len_torch_dispatch_stack():
        return False
    if bias is not None and type(bias) is not Tensor and type(bias) is not Parameter:
        return False
    if not (
        (q.is_cuda and k.is_cuda and v.is_cuda and (bias is None or bias.is_cuda))
        or (q.is_cpu and k.is_cpu and v.is_cpu and (bias is None or bias.is_cpu))
    ):
        return False
    _, _, _, left, right, _, softcap, deterministic, allow_tf32, dropout_p, _ = options
    return left == -1 == right and not (softcap or deterministic or allow_tf32 or dropout_p)


def attend(run, tensors, options, return_lse):
    """``run`` on the tensors, recorded where a derivative is wanted.

    Without one it is called directly: autograd costs half as much again.
    """
    q, k, v, bias, sinks = tensors[:_INPUTS]
    if (
        is_grad_enabled()
        and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sinks is not None and sinks.requires_grad)
        )
    ) or (in_forward_mode() and has_tangent((q, k, v, bias, sinks))):
        if (
            run is _library.forward
            and not return_lse
            and _library.node is not None
            and not in_forward_mode()
            and _is_plain(tensors, options)
        ):
            return _library.node(q, k, v, bias, 0.0, options[2], scale=options[5])[0]
        return _apply(q, k, v, bias, sinks, (run, tensors[_INPUTS:], options, return_lse))
    out, lse = run(*tensors, *options)
    return (out, lse) if return_lse else out


class _Tangent(Function):
    """Differentiable in the tangents, and by reverse mode in x."""

    @staticmethod
    def forward(ctx, rest, *inputs):
        run, out, lse, lengths, options = rest
        tangents, x = inputs[:_INPUTS], inputs[_INPUTS:]
        call = (out, lse, *x, *lengths)
        moved = run(*tangents, *call, *options)
        _save(ctx, options, call, moves=(*tangents, *moved))
        ctx.set_materialize_grads(False)
        return moved

    @staticmethod
    def backward(ctx, *grads):
        saved = _saved(ctx, ctx.saved_tensors)
        moves, call = saved[: _INPUTS + 2], (*grads, *saved[_INPUTS + 2 :])
        needs = ctx.needs_input_grad[1:]
        by_tangents, by_x = needs[:_INPUTS], needs[_INPUTS:]
        first = second = _NOTHING
        if any(by_tangents):
            first = _only(by_tangents, _library.gradients(*call, *by_tangents))
        if any(by_x):
            second = _only(by_x, _library.second(*moves, *call, *by_x))
        return None, *first, *second

    @staticmethod
    def jvp(ctx, _, *moves):
        if any(x is not None for x in moves[_INPUTS:]):
            raise NotImplementedError(_FORWARD_TWICE)
        with inside_jvp(ctx) as saved:
            return _library.tangent(*moves[:_INPUTS], *_saved(ctx, saved))


class _Gradients(Function):
    """Differentiable in the gradients of both results and in x."""

    @staticmethod
    def forward(ctx, rest, *inputs):
        return _give_gradients(ctx, (), rest, inputs)

    @staticmethod
    def backward(ctx, *tangents):
        needs = ctx.needs_input_grad[1:]
        call = _saved(ctx, ctx.saved_tensors)
        moved, grads = _differentiate_twice(tangents, call, needs[2:])
        return None, *_only(needs[:2], moved), *grads

    @staticmethod
    def jvp(ctx, _, *moves):
        first = second = _NOTHING
        with inside_jvp(ctx) as saved:
            call = _saved(ctx, saved)
            if any(x is not None for x in moves[:2]):
                first = _only(ctx.needs, _library.gradients(*moves[:2], *call[2:], *ctx.needs))
            if any(x is not None for x in moves[2:]):
                # The Hessian is symmetric: how gradients move along a tangent is the gradient of
                # how the results do.
                _, second = _differentiate_twice(moves[2:], call, ctx.needs)
            return tuple(map(_sum, first, second))


class _AtMostTwice(Function):
    """The tensor itself, by which no derivative can be taken."""

    @staticmethod
    def forward(ctx, rest, x):
        (run,) = rest
        return run(x)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(_THIRD)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(_THIRD)


class _Second(Function):
    """Differentiable in the tangents alone: the rest would be a third derivative."""

    @staticmethod
    def forward(ctx, rest, *inputs):
        run, moved, *rest = rest
        first = (*inputs[:_INPUTS], *moved)
        return _give_gradients(ctx, first, (run, *rest), inputs[_INPUTS:])

    @staticmethod
    def backward(ctx, *tangents):
        needs = ctx.needs_input_grad[1 : 1 + _INPUTS]
        call = _saved(ctx, ctx.saved_tensors)
        _, grads = _differentiate_twice(tangents, call, needs)  # the Hessian is symmetric
        return None, *grads, *(None,) * (2 + _INPUTS)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(_THIRD)


def _give_gradients(ctx, first, rest, inputs):
    """The forward pass of what gives gradients: ``first``, then grad_out, grad_lse and x."""
    run, out, lse, lengths, options, ctx.needs = rest
    call = (*inputs[:2], out, lse, *inputs[2:], *lengths)
    grads = run(*first, *call, *options, *ctx.needs)
    _save(ctx, options, call)
    unwanted = (grad for grad, need in zip(grads, ctx.needs, strict=True) if not need)
    ctx.mark_non_differentiable(*unwanted)
    ctx.set_materialize_grads(False)
    return grads


def _differentiate_twice(tangents, call, needs) -> tuple[tuple, tuple]:
    """How the results move along the tangents, and the gradients by x of that.

    ``call``: of the backward pass, from grad_out to its options.
    """
    moved = _library.tangent(*tangents, *call[2:])
    if not any(needs):
        return moved, _NOTHING
    return moved, _only(needs, _library.second(*tangents, *moved, *call, *needs))


def _recorded(function: type[Function], op, rest, inputs, args):
    """``op`` on its arguments; through the function where a derivative may be wanted."""
    if not is_grad_enabled() and not (in_forward_mode() and _is_fwd_grad_enabled()):
        with _AutoDispatchBelowAutograd():
            return op(*args)
    with enable_single_level_autograd_function():  # torch.func wants to hear that we mean it
        return plain_apply(function)((below_autograd(op), *rest), *inputs)


# Called eagerly this would cost twice what attend() does (38 us for 21 on a GPU host).
def _attention_autograd(*args):
    with enable_single_level_autograd_function():
        return attend(below_autograd(_library.attention), *_split(args), return_lse=True)


def _tangent_autograd(*args):
    tangents, (out, lse), call = args[:_INPUTS], args[_INPUTS : _INPUTS + 2], args[_INPUTS + 2 :]
    tensors, options = _split(call)
    inputs, lengths = (*tangents, *tensors[:_INPUTS]), tensors[_INPUTS:]
    return _recorded(_Tangent, _library.tangent, (out, lse, lengths, options), inputs, args)


def _gradient_arguments(args) -> tuple[tuple, tuple]:
    """Of what gives gradients, from grad_out on: what has derivatives, and the rest."""
    (grad_out, grad_lse, out, lse), (tensors, options) = args[:4], _split(args[4:])
    inputs, lengths = tensors[:_INPUTS], tensors[_INPUTS:]
    rest = (out, lse, lengths, options[:-_INPUTS], options[-_INPUTS:])
    return (grad_out, grad_lse, *inputs), rest


def _gradients_autograd(*args):
    inputs, rest = _gradient_arguments(args)
    return _recorded(_Gradients, _library.gradients, rest, inputs, args)


def _second_autograd(*args):
    tangents, moved = args[:_INPUTS], args[_INPUTS : _INPUTS + 2]
    inputs, rest = _gradient_arguments(args[_INPUTS + 2 :])
    inputs = tuple(
        None if x is None else _recorded(_AtMostTwice, torch.ops.aten.alias.default, (), (x,), (x,))
        for x in inputs
    )
    return _recorded(_Second, _library.second, (moved, *rest), (*tangents, *inputs), args)


give_autograd("attention", _attention_autograd)
give_autograd("attention_tangent", _tangent_autograd)
give_autograd("attention_gradients", _gradients_autograd)
give_autograd("attention_second", _second_autograd)
without_autograd("attention_forward", "attention_backward", "attention_backward_plain")


# vmap: one leading dimension more, which the kernels take as it is.


def _stack(tensor: Tensor | None, dim: int | None, size: int, rank: int = 0) -> Tensor | None:
    """The mapped dimension first, then as many of size 1 as broadcasting to `rank` needs."""
    if tensor is None:
        return None
    stacked = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return stacked[(slice(None), *([None] * (rank - stacked.dim())))]


def _stack_all(info, dims, tensors) -> tuple:
    return tuple(_stack(x, dim, info.batch_size) for x, dim in zip(tensors, dims, strict=False))


def _stack_inputs(info, dims, tensors) -> tuple:
    (q, k, v, bias, sinks, key_lengths, _, _), size = tensors, info.batch_size
    _refuse_ragged(tensors)
    q, k, v = _stack_all(info, dims, (q, k, v))
    bias = _stack(bias, dims[3], size, q.dim())
    return q, k, v, bias, sinks, _stack(key_lengths, dims[5], size, q.dim() - 3), None, None


def _refuse_ragged(tensors) -> None:
    *_, cu_seqlens_q, _ = tensors
    if cu_seqlens_q is not None:
        raise NotImplementedError(
            "flashmoe_science attention over ragged batches has no vmap yet, which torch.func.vmap "
            "and jacrev ask for. Pack the sequences of all samples into one call, or map over "
            "flash_attention."
        )


def _has_sink_gradient(args) -> bool:
    """Whether the sinks' gradient is wanted, by the arguments from grad_out on."""
    (*_, sinks, _, _, _), (*_, needed) = _split(args[4:])
    return needed and sinks is not None


def _one_by_one(op, info, dims, args, first):
    """For samples with sinks of their own, or gradients of them: a call has one sink for a head.

    ``first``: where query is among the arguments.
    """
    _refuse_ragged(_split(args[first:])[0])
    results = [
        op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, dims, strict=True)))
        for i in range(info.batch_size)
    ]
    return tuple(stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])


def _stack_tangents(info, dims, tangents, rank: int) -> tuple:
    bias = _stack(tangents[3], dims[3], info.batch_size, rank)
    return *_stack_all(info, dims, tangents[:3]), bias, tangents[4]


def _refuse_dropout(options) -> None:
    """Which pairs are dropped depends on where they are in the batch, which vmap would change.

    ``options``: up to dropout_p and the seed.
    """
    *_, dropout_p, _ = options
    if dropout_p != 0:
        raise NotImplementedError(
            "flashmoe_science attention with dropout has no vmap, which torch.func.vmap and jacrev "
            "ask for. Leading dimensions of q, k and v may hold the samples instead."
        )


@library.register_vmap("flashmoe::attention")
def _attention_vmap(info, dims, *args):
    tensors, options = _split(args)
    _refuse_dropout(options)
    stacked = _stack_inputs(info, dims, tensors)
    if dims[4] is not None:
        return _one_by_one(_library.attention, info, dims, args, 0)
    return _library.attention(*stacked, *options), (0, 0)


@library.register_vmap("flashmoe::explain")
def _explain_vmap(info, dims, *args):
    tensors, rest = _split(args)
    stacked = list(_stack_inputs(info, dims, tensors))
    if dims[4] is not None:
        stacked[4] = stacked[4].select(dims[4], 0)
    return _library.explain(*stacked, *rest), None


def _stacked_gradients(run, first, info, dims, args):
    """``run`` on ``first`` and the arguments from grad_out on."""
    tensors, rest = _split(args[4:])
    _refuse_dropout(rest[:-_INPUTS])
    inputs, needs = _stack_inputs(info, dims[4:], tensors), rest[-_INPUTS:]
    wanted = [need and x is not None for x, need in zip(inputs[:_INPUTS], needs, strict=True)]
    results = _stack_all(info, dims, args[:4])
    grads = list(run(*first(inputs[0].dim()), *results, *inputs, *rest))
    if wanted[3]:  # of the rank that the sample's bias has: its derivative is asked for next
        of_sample = (size for i, size in enumerate(tensors[3].shape) if i != dims[7])
        grads[3] = grads[3].reshape(info.batch_size, *of_sample)
    return tuple(grads), tuple(0 if want else None for want in wanted)


@library.register_vmap("flashmoe::attention_gradients")
def _attention_gradients_vmap(info, dims, *args):
    if _has_sink_gradient(args):
        return _one_by_one(_library.gradients, info, dims, args, 4)
    args = (*args[:8], None, *args[9:])  # sinks are in out and lse; only their gradient asks
    return _stacked_gradients(_library.gradients, lambda rank: (), info, dims, args)


@library.register_vmap("flashmoe::attention_tangent")
def _attention_tangent_vmap(info, dims, *args):
    first, results = _INPUTS, _INPUTS + 2
    if dims[first - 1] is not None or dims[results + 4] is not None:
        return _one_by_one(_library.tangent, info, dims, args, results)
    tensors, options = _split(args[results:])
    _refuse_dropout(options)
    inputs = _stack_inputs(info, dims[results:], tensors)
    tangents = _stack_tangents(info, dims, args[:first], inputs[0].dim())
    results = _stack_all(info, dims[first:], args[first:results])
    return _library.tangent(*tangents, *results, *inputs, *options), (0, 0)


@library.register_vmap("flashmoe::attention_second")
def _attention_second_vmap(info, dims, *args):
    moved, call = _INPUTS, _INPUTS + 2
    if dims[moved - 1] is not None or dims[call + 8] is not None or _has_sink_gradient(args[call:]):
        return _one_by_one(_library.second, info, dims, args, call + 4)

    def first(rank):
        tangents = _stack_tangents(info, dims, args[:moved], rank)
        return *tangents, *_stack_all(info, dims[moved:], args[moved:call])

    return _stacked_gradients(_library.second, first, info, dims[call:], args[call:])
