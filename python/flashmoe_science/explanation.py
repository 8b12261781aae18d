"""What would run, and why."""

from __future__ import annotations

from torch import Tensor

from . import _library
from .attention import _check_tensors, _options

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
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    backward: bool = False,
    device: str | None = None,
) -> str:
    """Says which kernel would run, how the work is cut, and why each better one was passed over.

    Takes the arguments of :func:`flash_attention` (or, with ``cu_seqlens``, of
    :func:`flash_attention_varlen`); only shapes, strides and dtypes matter, so meta tensors do.

    Args:
        backward: ask about the backward pass.
        device: ask for another machine: ``"cpu"``, or a chip such as ``"sm_90"``.

    Raises:
        RuntimeError: nothing can run the call; the message says why and what would work.
    """
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks, "key_lengths": key_lengths}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _check_tensors(("bias", "sinks", "key_lengths", "cu_seqlens_q", "cu_seqlens_k"), **tensors)
    return _library.explain(
        *tensors.values(),
        *_options(max_seqlen_q, max_seqlen_k, causal, window, scale, softcap, deterministic),
        backward,
        device or "",
    )
