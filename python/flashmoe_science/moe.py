"""A mixture of experts and its router, for CPU and CUDA tensors alike."""

from __future__ import annotations

# By name: an attribute of torch costs 50 ns, and host time is counted.
from torch import Tensor, float32, float64
from torch._C import _are_functorch_transforms_active
from torch.compiler import is_compiling

from . import _library, _moe_autograd
from ._autocast import any_autocast, cast
from .attention import _check_numbers, _check_tensors

__all__ = ["explain_moe", "moe", "route"]


def _traced() -> bool:
    """What traces or transforms a call needs an op to look at."""
    return is_compiling() or _are_functorch_transforms_active()


def _check_alike(shape, **tensors) -> None:
    """Leading dimensions are said in the caller's own terms, before they are flattened."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[:-1] != shape[:-1]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; its leading dimensions must be those of "
                f"x, {tuple(shape[:-1])}"
            )


def _rows(tensor: Tensor) -> Tensor:
    """All leading dimensions as one."""
    if tensor.dim() == 2:
        return tensor
    return tensor.flatten(0, -2) if tensor.dim() > 2 else tensor[None]


def _in_wide(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """In the precision of sums; differentiable."""
    wide = float64 if like.dtype == float64 else float32
    if tensor.dtype == wide:
        return tensor
    if not tensor.is_floating_point():
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be a floating-point type")
    return tensor.to(wide)


def _arguments(x, gate_up, down, ids, weights, up_bias, down_bias) -> tuple:
    """The tensors of the ops, in the order of their schema; x, ids and weights as rows."""
    required = isinstance(x, Tensor) and isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    if not (
        required
        and isinstance(ids, Tensor)
        and (weights is None or isinstance(weights, Tensor))
        and up_bias is None
        and down_bias is None
    ):
        tensors = {"x": x, "gate_up": gate_up, "down": down, "ids": ids, "weights": weights}
        optional = ("weights", "up_bias", "down_bias")
        _check_tensors(optional, **tensors, up_bias=up_bias, down_bias=down_bias)
    if not x.dim() == ids.dim() == 2:
        if x.dim() == 0 or ids.dim() == 0:
            name, given = ("x", x) if x.dim() == 0 else ("ids", ids)
            raise ValueError(f"{name} is a number, shape {tuple(given.shape)}; it must have rows")
        _check_alike(x.shape, ids=ids)
        if weights is not None and weights.shape != ids.shape:
            raise ValueError(
                f"weights has shape {tuple(weights.shape)}; it must be that of ids, "
                f"{tuple(ids.shape)}"
            )
        x, ids = _rows(x), _rows(ids)
        weights = None if weights is None else _rows(weights)
    experts = (x, gate_up, down, up_bias, down_bias)
    if is_compiling() or any_autocast():
        experts = cast(experts)
    if weights is not None:
        weights = _in_wide("weights", weights, experts[0])
    return *experts, ids, weights


def moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor | None = None,
    activation: str = "swiglu",
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """``sum over j of weights[j] * down[e] @ act(gate_up[e] @ x)``, ``e = ids[j]``, for each token.

    Args:
        x: ``(..., d)``, with any leading dimensions; float64, float32, float16 or bfloat16.
        gate_up: ``(E, 2n, d)``, gate rows first, then up rows; ``(E, n, d)`` for an activation
            without a gate. Any strides: ``(E, d, 2n)`` storage is passed as its transpose,
            ``w.mT``, and read in place.
        down: ``(E, d, n)``.
        ids: ``(..., k)``, int32 or int64: the experts of each token, chosen by :func:`route` or by
            anything else. An id outside ``0 .. E - 1`` means no expert: that pair adds nothing, and
            nothing of it is read.
        weights: ``(..., k)`` of any floating-point type; 1 unless given.
        activation: ``"swiglu"``, ``"geglu"`` or ``"reglu"``, which are ``silu(gate) * up``,
            ``gelu(gate) * up`` and ``relu(gate) * up``; ``"silu"``, ``"gelu"`` or ``"relu"``
            without a gate. gelu is the exact one (erf).
        up_bias: ``(E, 2n)``, or ``(E, n)`` without a gate: added before the activation.
        down_bias: ``(E, d)``: added after ``down``, and weighted with it.

    Under :class:`torch.autocast` x, the experts and their biases are cast to its dtype, as for
    :func:`torch.nn.functional.linear`.

    Returns:
        ``(..., d)``, contiguous, in the dtype of x; differentiable in x, gate_up, down, the biases
        and weights. The same bits in every run. Kept for the backward pass are the inputs, the
        pre-activations ``(T k, 2n)`` and the sorted pairs of tokens and experts.
    """
    tensors = _arguments(x, gate_up, down, ids, weights, up_bias, down_bias)
    if _traced():
        keep = _moe_autograd.wants_gradient(tensors)
        out = _library.moe(*tensors, activation, keep)[0]
    else:
        out = _moe_autograd.mix(_library.moe_forward, tensors, activation)
    return out if x.dim() == 2 else out.view(x.shape)


def route(
    logits: Tensor,
    k: int,
    scoring: str = "softmax",
    normalize: bool = True,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token and their weights, for :func:`moe`.

    Args:
        logits: ``(..., E)``; float64, float32, float16 or bfloat16.
        k: how many experts a token gets.
        scoring: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        normalize: divide the weights of a token by their sum.
        bias: ``(E,)`` of any floating-point type, added to the scores for the choice alone
            (balancing without a loss). The weights do not depend on it, so it gets no gradient.

    Returns:
        ``ids`` ``(..., k)``, int32, in the order of falling score + bias, ties to the lower id; and
        ``weights`` ``(..., k)``, their scores, in float32 (float64 for float64 logits) and
        differentiable in the logits.
    """
    if not isinstance(logits, Tensor) or bias is not None:
        _check_tensors(("bias",), logits=logits, bias=bias)
    if isinstance(k, Tensor) or isinstance(normalize, Tensor):
        _check_numbers(k=k, normalize=normalize)
    if isinstance(k, int) and k < 0:
        raise ValueError(f"k is {k}; it must be from 0 to the number of experts")
    if logits.dim() == 0:
        raise ValueError("logits is a number, shape (); it must have rows, (..., experts)")
    if bias is not None:
        bias = _in_wide("bias", bias, logits)
    options = (_rows(logits), bias, k, scoring, bool(normalize))
    if _traced():
        weights, ids = _library.route(*options)
    else:
        weights, ids = _moe_autograd.choose(_library.route_forward, *options)
    if logits.dim() == 2:
        return ids, weights
    shape = (*logits.shape[:-1], k)
    return ids.view(shape), weights.view(shape)


def explain_moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor | None = None,
    activation: str = "swiglu",
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    backward: bool = False,
    device: str | None = None,
) -> str:
    """Says which kernels would run for :func:`moe`, how the work is cut, and why not others.

    Takes the arguments of :func:`moe`; only shapes, strides and dtypes matter, so meta tensors do.
    The forward pass is explained as it would run: with what the backward pass needs where a tensor
    requires a gradient.

    Args:
        backward: ask about the backward pass, with all gradients.
        device: ask for another machine: ``"cpu"``, or a chip such as ``"sm_90"``.

    Raises:
        RuntimeError: nothing can run the call; the message says why and what would work.
    """
    tensors = _arguments(x, gate_up, down, ids, weights, up_bias, down_bias)
    keep = _moe_autograd.wants_gradient(tensors)
    return _library.explain_moe(*tensors, activation, keep, backward, device or "")
