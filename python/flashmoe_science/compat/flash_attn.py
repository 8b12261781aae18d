"""flash-attn's functions, names, arguments and ``(B, S, H, D)`` layout.

``from flashmoe_science.compat.flash_attn import flash_attn_func`` in place of
``from flash_attn import flash_attn_func``. An argument we do not support is refused by name.
"""

from __future__ import annotations

from torch import Tensor

from ..attention import flash_attention, flash_attention_varlen
from ..paged import flash_attention_paged
from .checks import check_int, check_integers, check_tensor, descale, refuse_q_descale
from .kvcache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _refuse(alibi_slopes) -> None:
    if alibi_slopes is not None:
        raise NotImplementedError(
            "alibi_slopes is not supported; pass the slopes as a bias to "
            "flashmoe_science.flash_attention"
        )


def _unpacked(name: str, packed: Tensor, shape: str) -> tuple[Tensor, ...]:
    """Views of what lies together in the third last dimension, a letter of the name for each."""
    check_tensor(name, packed, shape)
    if packed.shape[-3] != len(name):
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; it must be {shape}")
    return packed.unbind(-3)


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
    *,
    s_aux: Tensor | None = None,
):
    """Attention over ``(B, S, H, D)`` tensors, as ``flash_attn.flash_attn_func``.

    ``s_aux`` are sinks ``(Hq,)``, under the name that vLLM's FlashAttention-3 has for them.

    With ``return_attn_probs`` returns ``(out, softmax_lse, None)``: flash-attn itself fills the
    third only for dropout tests.
    """
    _refuse(alibi_slopes)
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        check_tensor(name, tensor, "(B, ..., S, H, D)")
    out, lse = flash_attention(
        *(t.transpose(-3, -2) for t in (q, k, v)),
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        sinks=s_aux,
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
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
):
    """Ragged attention over ``(T, H, D)`` tensors, as ``flash_attn.flash_attn_varlen_func``.

    With ``block_table`` k and v are pages of a cache, ``(blocks, page, Hk, D)``, and the call is
    forward only. Each sequence then has ``seqused_k`` keys, or those of ``cu_seqlens_k``, and an
    fp8 cache the scales ``k_descale`` and ``v_descale`` as in :func:`flash_attn_with_kvcache`.
    These are the names of FlashAttention-3 and of vLLM, as is ``s_aux``, sinks ``(Hq,)``.

    With ``return_attn_probs`` returns ``(out, softmax_lse, None)``, softmax_lse being ``(H, T)``.
    """
    _refuse(alibi_slopes)
    refuse_q_descale(q_descale)
    keys = "(T, H, D)" if block_table is None else "(blocks, page, Hk, D)"
    for name, tensor, shape in (("q", q, "(T, H, D)"), ("k", k, keys), ("v", v, keys)):
        check_tensor(name, tensor, shape)
    check_integers("cu_seqlens_q", cu_seqlens_q, q, "(B + 1,)")
    if cu_seqlens_k is not None:
        check_integers("cu_seqlens_k", cu_seqlens_k, q, "(B + 1,)")
    for name, bound in {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}.items():
        if bound is not None:
            check_int(name, bound)
    options = {
        "causal": causal,
        "window": window_size,
        "scale": softmax_scale,
        "softcap": softcap,
        "sinks": s_aux,
        "return_lse": True,
    }
    if block_table is None:
        paged = {"seqused_k": seqused_k, "k_descale": k_descale, "v_descale": v_descale}
        for name, value in paged.items():
            if value is not None:
                raise NotImplementedError(
                    f"{name} is only supported with block_table, for keys in the pages of a cache"
                )
        lengths = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q}
        for name, value in {**lengths, "max_seqlen_k": max_seqlen_k}.items():
            if value is None:
                raise TypeError(f"{name} must be given where there is no block_table")
        out, lse = flash_attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            deterministic=deterministic,
            dropout_p=dropout_p,
            **options,
        )
    else:
        if dropout_p:
            raise NotImplementedError(f"dropout_p={dropout_p}: there is none over a block_table")
        check_integers("block_table", block_table, q, "(B, n)")
        if seqused_k is None:
            if cu_seqlens_k is None:
                raise TypeError("seqused_k or cu_seqlens_k must be given with block_table")
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        batch = block_table.shape[0]
        check_integers("seqused_k", seqused_k, q, "(B,)", (batch,))
        out, lse = flash_attention_paged(
            q,
            k,
            v,
            block_table,
            seqused_k,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            k_scale=descale("k_descale", k_descale, batch),
            v_scale=descale("v_descale", v_descale, batch),
            **options,
        )
    return (out, lse.transpose(0, 1), None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """:func:`flash_attn_func` of ``qkv[:, :, 0]``, ``1`` and ``2``, ``(B, S, 3, H, D)``."""
    return flash_attn_func(
        *_unpacked("qkv", qkv, "(B, S, 3, H, D)"),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """:func:`flash_attn_func` of q, ``kv[:, :, 0]`` and ``1``, ``(B, S, 2, Hk, D)``."""
    return flash_attn_func(
        q,
        *_unpacked("kv", kv, "(B, S, 2, Hk, D)"),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """:func:`flash_attn_varlen_func` of ``qkv[:, 0]``, ``1`` and ``2``, ``(T, 3, H, D)``."""
    q, k, v = _unpacked("qkv", qkv, "(T, 3, H, D)")
    check_integers("cu_seqlens", cu_seqlens, q, "(B + 1,)")
    check_int("max_seqlen", max_seqlen)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
):
    """:func:`flash_attn_varlen_func` of q, ``kv[:, 0]`` and ``1``, ``(T, 2, Hk, D)``."""
    return flash_attn_varlen_func(
        q,
        *_unpacked("kv", kv, "(T, 2, Hk, D)"),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
