"""Attention with every option of the library, for CPU and CUDA tensors alike."""

from __future__ import annotations

# By name: an attribute of torch costs 50 ns, and host time is counted.
from torch import Tensor, are_deterministic_algorithms_enabled
from torch._C import _are_functorch_transforms_active
from torch.compiler import is_compiling

from . import _autograd, _library

__all__ = ["flash_attention", "flash_attention_varlen"]


def _attend(tensors, options, return_lse):
    # What traces or transforms a call needs an op to look at.
    if is_compiling() or _are_functorch_transforms_active():
        out, lse = _library.attention(*tensors, *options)
        return (out, lse) if return_lse else out
    return _autograd.attend(_library.forward, tensors, options, return_lse)


def _check_tensors(optional: tuple[str, ...] = (), **tensors) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) or (tensor is None and name in optional):
            continue
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")


def _check_numbers(**numbers) -> None:
    """A tensor here would lose its gradient in silence."""
    for name, number in numbers.items():
        if isinstance(number, Tensor):
            raise TypeError(f"{name} must be a number, not a torch.Tensor; pass {name}.item()")


def _window(window) -> tuple[int, int]:
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window must be a pair (left, right), got {window!r}") from None
    return left, right


def _options(max_seqlen_q, max_seqlen_k, causal, window, scale, softcap, deterministic) -> tuple:
    """What the ops take after their tensors, in the order of their schema: only here.

    A plain tuple, which nobody takes apart; a NamedTuple costs 0.3 us more a call.
    """
    # isinstance() costs 70 ns: not for a default.
    if (
        (causal is not False and isinstance(causal, Tensor))
        or (scale is not None and isinstance(scale, Tensor))
        or (softcap is not None and isinstance(softcap, Tensor))
    ):
        _check_numbers(causal=causal, scale=scale, softcap=softcap)
    return (
        max_seqlen_q,
        max_seqlen_k,
        bool(causal),
        *((-1, -1) if window is None else _window(window)),
        scale,
        0.0 if softcap is None else softcap,
        are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
    )


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    key_lengths: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    *,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(softcap(scale * q @ k^T) + bias, over the allowed keys) @ v``.

    Takes the place of :func:`torch.nn.functional.scaled_dot_product_attention`, in its layout.

    Args:
        q: ``(..., Hq, Sq, D)``, with any number (at least one) of leading batch dimensions;
            float64, float32, float16 or bfloat16. Head dims from 1 to 256.
        k: ``(..., Hk, Sk, D)``; ``Hq`` is a multiple of ``Hk`` (grouped queries).
        v: ``(..., Hk, Sk, Dv)``.
        bias: anything that broadcasts to ``(..., Hq, Sq, Sk)``, in q's dtype or float32. Added to
            the scores; ``-inf`` masks. Its gradient has its own shape and is bitwise reproducible.
        causal: row ``i`` sees the keys ``j <= i + L - Sq``, ``L`` being the number of keys: the
            bottom right corners meet, so one new query over a cache of keys sees all of them.
        window: ``(left, right)``: row ``i`` sees ``p - left <= j <= p + right`` around its position
            ``p = i + L - Sq``; ``-1`` means no limit on that side.
        scale: ``1 / sqrt(D)`` unless given.
        softcap: ``c``: scores become ``c * tanh(scores / c)`` before the bias is added.
        key_lengths: int32 or int64, broadcastable to the leading dimensions: how many keys count in
            each sequence.
        return_lse: also return the natural log of the softmax denominator, ``(..., Hq, Sq)``, in
            float32 (float64 for float64 inputs); it is differentiable too.
        deterministic: bitwise reproducible gradients. ``None`` follows
            :func:`torch.use_deterministic_algorithms`. On the CPU they always are.
        sinks: ``(Hq,)``, in q's dtype or float32: ``exp(sink)`` joins the denominator of every row
            of a head, as the score of a key whose value is 0. ``lse`` counts it; ``-inf`` is none.
            Their gradient is bitwise reproducible.

    Returns:
        ``out`` of shape ``(..., Hq, Sq, Dv)``, or ``(out, lse)``. A row that may see no key is 0,
        with ``lse = -inf``, or its sink.
    """
    required = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not required or bias is not None or key_lengths is not None or sinks is not None:
        optional = {"bias": bias, "key_lengths": key_lengths, "sinks": sinks}
        _check_tensors(tuple(optional), q=q, k=k, v=v, **optional)
    tensors = (q, k, v, bias, sinks, key_lengths, None, None)
    options = _options(0, 0, causal, window, scale, softcap, deterministic)
    return _attend(tensors, options, return_lse)


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    bias: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    *,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attention` over a ragged batch: sequences packed one after the other, unpadded.

    Args:
        q: ``(Tq, Hq, D)``, the queries of all sequences.
        k: ``(Tk, Hk, D)``.
        v: ``(Tk, Hk, Dv)``.
        cu_seqlens_q: ``(N + 1,)``, int32 or int64, starting at 0: sequence ``i`` has the queries
            ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]``. Tokens after the last entry give 0.
        cu_seqlens_k: the same for keys and values.
        max_seqlen_q: at least the length of the longest sequence of queries.
        max_seqlen_k: at least the length of the longest sequence of keys.
        bias: packed, ``(sum of n_i * m_i, Hq or 1)``: for each sequence its ``n_i x m_i`` scores,
            row after row, in q's dtype or float32. Its gradient has the same shape.

    The other arguments and the results are those of :func:`flash_attention`; ``lse`` is
    ``(Tq, Hq)``.
    """
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _check_tensors(("bias", "sinks"), q=q, k=k, v=v, **offsets, bias=bias, sinks=sinks)
    tensors = (q, k, v, bias, sinks, None, cu_seqlens_q, cu_seqlens_k)
    lengths = (max_seqlen_q, max_seqlen_k)
    options = _options(*lengths, causal, window, scale, softcap, deterministic)
    return _attend(tensors, options, return_lse)
