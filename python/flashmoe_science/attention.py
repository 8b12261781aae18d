"""Attention with every option of the library, for CPU and CUDA tensors alike."""

from __future__ import annotations

from operator import index

# By name: an attribute of torch costs 50 ns, and host time is counted.
from torch import Tensor, are_deterministic_algorithms_enabled, float32, full, int64, randint
from torch._C import _are_functorch_transforms_active, _get_cublas_allow_tf32
from torch.compiler import is_compiling

from . import _autograd, _library, _nested
from ._autocast import any_autocast, cast

__all__ = ["flash_attention", "flash_attention_varlen"]


def _in_autocast(tensors: tuple) -> tuple:
    """query, key, value, bias and sinks as torch.autocast wants them; sinks may stay float32."""
    q, k, v, bias, sinks, *lengths = tensors
    if sinks is not None and sinks.dtype == float32:
        return *cast((q, k, v, bias)), sinks, *lengths
    return *cast((q, k, v, bias, sinks)), *lengths


def _attend(tensors, options, return_lse):
    traced = is_compiling()
    if traced or any_autocast():
        tensors = _in_autocast(tensors)
    # What traces or transforms a call needs an op to look at.
    if traced or _are_functorch_transforms_active():
        out, lse = _library.attention(*tensors, *options)
        return (out, lse) if return_lse else out
    return _autograd.attend(_library.forward, tensors, options, return_lse)


def _check_tensors(optional: tuple[str, ...] = (), **tensors) -> None:
    for name, tensor in tensors.items():
        # A tensor of torch's whose numbers nobody has written: a word that SDPA understands.
        if type(tensor).__name__ == "CausalBias":
            raise TypeError(
                f"{name} is a CausalBias of torch.nn.attention.bias; causal=True means "
                "causal_lower_right here, and inside enable_sdpa() "
                "F.scaled_dot_product_attention takes both"
            )
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


def _seed(dropout_p, seed, device) -> Tensor:
    """A number in the device's memory: a captured graph draws a new one in each replay."""
    _check_numbers(dropout_p=dropout_p)
    if not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p must be a number, not {type(dropout_p).__name__}")
    if not 0 <= dropout_p <= 1:  # before anything is drawn
        raise ValueError(f"dropout_p is {dropout_p}; it must be from 0 to 1")
    if seed is None:
        return randint(2**63 - 1, (), dtype=int64, device=device)
    if isinstance(seed, Tensor):
        return seed.clone()  # the backward pass reads it again, when it may have moved on
    try:
        number = index(seed)
    except TypeError:
        raise TypeError(f"seed must be an int or an int64 tensor, not {seed!r}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"seed is {number}; it must fit 64 bits")
    return full((), number, dtype=int64, device=device)


def _score_options(max_seqlen_q, max_seqlen_k, causal, window, scale, softcap) -> tuple:
    """What all ops take after their tensors, in the order of their schema: only here.

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
    )


def _allows_tf32(q: Tensor) -> bool:
    """Whether fp32 products on a GPU may be TF32's, as torch's own matmul would say now.

    torch.compile guards on it, and what it traces keeps it.
    """
    return q.dtype is float32 and not q.is_cpu and _get_cublas_allow_tf32()


def _options(
    q,
    max_seqlen_q,
    max_seqlen_k,
    causal,
    window,
    scale,
    softcap,
    deterministic,
    dropout_p=0,
    seed=None,
) -> tuple:
    """The same for ops that have a gradient."""
    if deterministic is None:
        deterministic = are_deterministic_algorithms_enabled()
    scores = _score_options(max_seqlen_q, max_seqlen_k, causal, window, scale, softcap)
    return (*scores, deterministic, _allows_tf32(q), dropout_p, seed)


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
    dropout_p: float = 0,  # torch.compile would make an input of 0.0
    seed: int | Tensor | None = None,
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
            Or a mask in bool, ``True`` where a key may be looked at: read as it is, byte by byte.
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
            :func:`torch.use_deterministic_algorithms`. On the CPU and in float32 they always are.
        sinks: ``(Hq,)``, in q's dtype or float32: ``exp(sink)`` joins the denominator of every row
            of a head, as the score of a key whose value is 0. ``lse`` counts it; ``-inf`` is none.
            Their gradient is bitwise reproducible.
        dropout_p: the share of weights that is dropped after the softmax, in any mode; the others
            are multiplied by ``1 / (1 - dropout_p)``. ``lse`` does not know of it.
        seed: which weights are dropped: an int, or one number in an int64 tensor on q's device.
            The same seed drops the same on every device, forward and backward. ``None`` draws it
            from torch's default generator of the device, which :func:`torch.manual_seed` sets.

    float32 on a GPU has float32's accuracy, or TF32's where
    :func:`torch.set_float32_matmul_precision` allows that for matrix products.

    Under :class:`torch.autocast` q, k, v and bias are cast to its dtype (float64 is left alone), as
    for SDPA; gradients have the dtypes of the inputs.

    Jagged nested tensors ``(B, H, j, D)`` are ragged batches: q has lengths of its own, k and v
    share theirs; a bias and key_lengths are refused; the results are nested as q is.

    Returns:
        ``out`` of shape ``(..., Hq, Sq, Dv)``, or ``(out, lse)``. A row that may see no key is 0,
        with ``lse = -inf``, or its sink.
    """
    # isinstance() costs 70 ns a tensor.
    plain = type(q) is type(k) is type(v) is Tensor
    if not plain or bias is not None or key_lengths is not None or sinks is not None:
        optional = {"bias": bias, "key_lengths": key_lengths, "sinks": sinks}
        _check_tensors(tuple(optional), q=q, k=k, v=v, **optional)
        if not plain and _nested.any_nested(q, k, v):
            ragged = _nested.as_ragged(q, k, v, bias=bias, key_lengths=key_lengths)
            options = (None, causal, window, scale, softcap, True, deterministic)
            more = {"sinks": sinks, "dropout_p": dropout_p, "seed": seed}
            out, lse = flash_attention_varlen(*ragged, *options, **more)
            out = _nested.like(q, out)
            return (out, _nested.like(q, lse)) if return_lse else out
    tensors = (q, k, v, bias, sinks, key_lengths, None, None)
    seed = None if dropout_p == 0 else _seed(dropout_p, seed, q.device)
    options = _options(q, 0, 0, causal, window, scale, softcap, deterministic, dropout_p, seed)
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
    dropout_p: float = 0,
    seed: int | Tensor | None = None,
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
            row after row, in q's dtype or float32. Its gradient has the same shape. Or a mask in
            bool.

    The other arguments and the results are those of :func:`flash_attention`; ``lse`` is
    ``(Tq, Hq)``.
    """
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _check_tensors(("bias", "sinks"), q=q, k=k, v=v, **offsets, bias=bias, sinks=sinks)
    if not type(q) is type(k) is type(v) is Tensor:
        _nested.refuse("flash_attention_varlen", q, k, v)
    tensors = (q, k, v, bias, sinks, None, cu_seqlens_q, cu_seqlens_k)
    seed = None if dropout_p == 0 else _seed(dropout_p, seed, q.device)
    lengths = (max_seqlen_q, max_seqlen_k)
    options = _options(q, *lengths, causal, window, scale, softcap, deterministic, dropout_p, seed)
    return _attend(tensors, options, return_lse)
