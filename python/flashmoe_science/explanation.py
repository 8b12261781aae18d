"""What would run, and why."""

from __future__ import annotations

from torch import Tensor, empty, int64

from . import _library, _nested
from .attention import _check_tensors, _in_autocast, _options

__all__ = ["explain"]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    key_lengths: Tensor | None = None,
    deterministic: bool = False,
    *,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    backward: bool = False,
    derivative: str | None = None,
    device: str | None = None,
) -> str:
    """Says which kernel would run, how the work is cut, and why each better one was passed over.

    Takes the arguments of :func:`flash_attention` (or, with ``cu_seqlens``, of
    :func:`flash_attention_varlen`); only shapes, strides and dtypes matter, so meta tensors do.

    Args:
        backward: ask about the backward pass.
        derivative: ask about forward mode (``"tangent"``), or the backward pass of a backward pass
            (``"second"``).
        device: ask for another machine: ``"cpu"``, or a chip such as ``"sm_90"``.

    Raises:
        RuntimeError: nothing can run the call; the message says why and what would work.
    """
    if derivative not in (None, "tangent", "second"):
        raise ValueError(f'derivative must be "tangent" or "second", got {derivative!r}')
    if derivative is not None and backward:
        raise ValueError("backward and derivative ask about different passes; give one of them")
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks, "key_lengths": key_lengths}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _check_tensors(("bias", "sinks", "key_lengths", "cu_seqlens_q", "cu_seqlens_k"), **tensors)
    if _nested.any_nested(q, k, v):
        ragged = _nested.as_ragged(q, k, v, bias=bias, key_lengths=key_lengths)
        (*qkv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) = ragged
        cumulative = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        tensors |= dict(zip("qkv", qkv, strict=True)) | cumulative
    seed = None if dropout_p == 0 else empty((), dtype=int64, device=q.device)
    lengths = (max_seqlen_q, max_seqlen_k)
    return _library.explain(
        *_in_autocast(tuple(tensors.values())),
        *_options(q, *lengths, causal, window, scale, softcap, deterministic, dropout_p, seed),
        derivative or ("backward" if backward else "forward"),
        device or "",
    )
