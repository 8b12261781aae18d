"""flash-attn's functions, names, arguments and ``(B, S, H, D)`` layout.

``from flashmoe_science.compat.flash_attn import flash_attn_func`` in place of
``from flash_attn import flash_attn_func``. An argument we do not support is refused by name.
"""

from __future__ import annotations

from torch import Tensor

from ..attention import flash_attention, flash_attention_varlen

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def _refuse(alibi_slopes, block_table=None) -> None:
    if alibi_slopes is not None:
        raise NotImplementedError(
            "alibi_slopes is not supported; pass the slopes as a bias to "
            "flashmoe_science.flash_attention"
        )
    if block_table is not None:
        raise NotImplementedError("block_table is not supported: there is no paged key cache")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """Attention over ``(B, S, H, D)`` tensors, as ``flash_attn.flash_attn_func``.

    With ``return_attn_probs`` returns ``(out, softmax_lse, None)``: flash-attn itself fills the
    third only for dropout tests.
    """
    _refuse(alibi_slopes)
    out, lse = flash_attention(
        *(t.transpose(-3, -2) for t in (q, k, v)),
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        return_lse=True,
        deterministic=deterministic,
        dropout_p=dropout_p,
    )
    out = out.transpose(-3, -2)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
):
    """Ragged attention over ``(T, H, D)`` tensors, as ``flash_attn.flash_attn_varlen_func``.

    With ``return_attn_probs`` returns ``(out, softmax_lse, None)``, softmax_lse being ``(H, T)``.
    """
    _refuse(alibi_slopes, block_table)
    out, lse = flash_attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        return_lse=True,
        deterministic=deterministic,
        dropout_p=dropout_p,
    )
    return (out, lse.transpose(0, 1), None) if return_attn_probs else out
