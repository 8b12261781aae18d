"""Attention over the pages of a cache, and writing to one: what serving engines are made of."""

from __future__ import annotations

# By name: an attribute of torch costs 50 ns, and host time is counted.
from torch import Tensor, finfo, float32, float64, full

from . import _library
from ._forward_only import ForwardOnly
from .attention import _check_tensors, _score_options

__all__ = ["explain_append", "explain_paged", "flash_attention_paged", "kv_cache_append"]

_paged = ForwardOnly("attention_paged", "flash_attention_paged")
_paged_out = ForwardOnly("attention_paged_out", "flash_attention_paged")
_append = ForwardOnly("cache_append", "kv_cache_append")


def _scale(name: str, scale, like: Tensor) -> Tensor | None:
    """On the device, where the kernels read it; nobody waits for that."""
    if scale is None or isinstance(scale, Tensor):
        return scale
    try:
        number = float(scale)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be a torch.Tensor or a number, not {type(scale).__name__}"
        ) from None
    if not finfo(float32).tiny <= number <= finfo(float32).max:
        raise ValueError(f"{name} is {number}; it must be positive and finite in float32")
    return full((), number, dtype=float32, device=like.device)


def _tensors(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, sinks, k_scale, v_scale):
    """The inputs of the ops, in the order of their schema."""
    if not (
        isinstance(q, Tensor)
        and isinstance(k_cache, Tensor)
        and isinstance(v_cache, Tensor)
        and isinstance(block_table, Tensor)
        and isinstance(seq_lens, Tensor)
        and (cu_seqlens_q is None or isinstance(cu_seqlens_q, Tensor))
        and (sinks is None or isinstance(sinks, Tensor))
    ):
        caches = {"k_cache": k_cache, "v_cache": v_cache}
        lengths = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
        _check_tensors(("cu_seqlens_q", "sinks"), q=q, **caches, **lengths, sinks=sinks)
    if k_scale is not None or v_scale is not None:
        k_scale, v_scale = _scale("k_scale", k_scale, q), _scale("v_scale", v_scale, q)
    return q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, sinks, k_scale, v_scale


def _memory(q, out, return_lse) -> tuple[Tensor, Tensor | None]:
    """For the results: what the caller gave, and for lse new memory if it gave none."""
    if isinstance(out, Tensor):
        if not return_lse:
            return out, None
        wide = float64 if q.dtype == float64 else float32
        return out, q.new_empty(q.shape[:-1], dtype=wide)
    if not (return_lse and isinstance(out, (tuple, list)) and len(out) == 2):
        wanted = "a torch.Tensor or a pair of them" if return_lse else "a torch.Tensor"
        raise TypeError(f"out must be {wanted}, not {type(out).__name__}")
    _check_tensors(**{"out[0]": out[0], "out[1]": out[1]})
    return tuple(out)


def flash_attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attention` of new tokens over keys and values that lie in the pages of a cache.

    Decodes (one new token) and chunks of a prompt (many) go in one call. Forward only: where a
    gradient would be wanted, the call is refused.

    Args:
        q: ``(T, Hq, D)``, the new tokens of all sequences one after the other, as ``cu_seqlens_q``
            says; without it ``(B, Hq, D)``, one new token of each. float64, float32, float16 or
            bfloat16. Head dims from 1 to 512.
        k_cache: ``(blocks, page, Hk, D)``, a view with any strides (one half of rows that hold key
            and value, head-major pages) and any page, also of 1 token; ``Hq`` is a multiple of
            ``Hk``. In q's dtype or float8_e4m3fn. It is never copied.
        v_cache: ``(blocks, page, Hk, Dv)``.
        block_table: ``(B, n)``, int32 or int64: key ``j`` of sequence ``i`` is row ``j % page`` of
            block ``block_table[i, j // page]``. Entries past a sequence's last key are never read.
        seq_lens: ``(B,)``, int32 or int64: the keys of each sequence, its new tokens among them
            (write those with :func:`kv_cache_append` first). Its queries sit at its last positions.
        cu_seqlens_q: ``(B + 1,)``, int32 or int64, starting at 0: sequence ``i`` has the queries
            ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]``, and may have none. Tokens after the last
            entry give 0.
        max_seqlen_q: at least the most new tokens of a sequence. A bound, and no length: one call,
            captured in a CUDA graph, serves everything below it. ``T`` unless given.
        max_seqlen_k: at least the most keys of a sequence; ``n * page`` unless given. Which keys
            are summed together may depend on both bounds, never on the other sequences: under the
            same bounds a sequence has the same bits alone and in any batch.
        causal: row ``i`` of ``n`` sees the keys ``j <= i + seq_lens - n``.
        sinks: ``(Hq,)``, float32 or q's dtype: ``exp(sink)`` joins the denominator of every row of
            a head.
        k_scale: what the numbers of a float8_e4m3fn ``k_cache`` are times of: float32 on q's
            device, ``()``, ``(1,)`` or ``(Hk,)``; or a number, which is put there in every call.
        v_scale: the same for ``v_cache``.
        out: memory for the result, ``(T, Hq, Dv)`` in q's dtype with any strides; it is what is
            returned. With ``return_lse`` also a pair ``(out, lse)``.
        return_lse: also return the natural log of the softmax denominator, ``(T, Hq)``, in float32
            (float64 for float64 inputs). Sinks count.

    ``window``, ``scale`` and ``softcap`` are those of :func:`flash_attention`.

    Returns:
        ``out`` of shape ``(T, Hq, Dv)``, or ``(out, lse)``. Nothing waits for the device: on CUDA a
        sequence whose lengths or blocks cannot be is NaN, and no other; on the CPU it is an error.
    """
    tensors = _tensors(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, sinks, k_scale, v_scale
    )
    options = _score_options(max_seqlen_q, max_seqlen_k, causal, window, scale, softcap)
    if out is None:
        out, lse = _paged(*tensors, *options, bool(return_lse))
    else:
        out, lse = _memory(q, out, return_lse)
        _paged_out(*tensors, *options, out, lse)
    return (out, lse) if return_lse else out


def _append_tensors(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale) -> tuple:
    """The inputs of the ops, in the order of their schema."""
    tensors = (k, v, k_cache, v_cache, slot_mapping)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            caches = {"k_cache": k_cache, "v_cache": v_cache}
            _check_tensors(k=k, v=v, **caches, slot_mapping=slot_mapping)
    if k_scale is not None or v_scale is not None:
        k_scale, v_scale = _scale("k_scale", k_scale, k), _scale("v_scale", v_scale, k)
    return *tensors, k_scale, v_scale


def kv_cache_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> None:
    """Writes keys and values of new tokens to a cache that :func:`flash_attention_paged` reads.

    Args:
        k: ``(T, Hk, D)``, float64, float32, float16 or bfloat16, with any strides.
        v: ``(T, Hk, Dv)``.
        k_cache: ``(blocks, page, Hk, D)``, written in place; in k's dtype or float8_e4m3fn, with
            any strides.
        v_cache: ``(blocks, page, Hk, Dv)``.
        slot_mapping: ``(T,)``, int32 or int64: token ``t`` goes to row ``slot % page`` of block
            ``slot // page``. A negative slot is padding and one past the cache is skipped: nothing
            is written for either. No two tokens may have the same slot.
        k_scale: for a float8_e4m3fn cache: ``k / k_scale`` is stored, rounded to nearest even and
            held within +-448; a NaN stays one. As in :func:`flash_attention_paged`.
        v_scale: the same for ``v``.
    """
    tensors = _append_tensors(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if k_cache.requires_grad or v_cache.requires_grad:
        name = "k_cache" if k_cache.requires_grad else "v_cache"
        raise NotImplementedError(
            f"kv_cache_append writes to {name}, which requires a gradient; pass {name}.detach() "
            f"or make it without: {name}.requires_grad_(False)"
        )
    _append(*tensors)


def explain_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    return_lse: bool = False,
    device: str | None = None,
) -> str:
    """Says which kernels would run for :func:`flash_attention_paged`, and why not others.

    Takes its arguments; only shapes, strides and dtypes matter, so meta tensors do.

    Args:
        device: ask for another machine: ``"cpu"``, or a chip such as ``"sm_90"``.

    Raises:
        RuntimeError: nothing can run the call; the message says why and what would work.
    """
    tensors = _tensors(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, sinks, k_scale, v_scale
    )
    options = _score_options(max_seqlen_q, max_seqlen_k, causal, window, scale, softcap)
    return _library.explain_paged(*tensors, *options, bool(return_lse), device or "")


def explain_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    device: str | None = None,
) -> str:
    """Says which kernel would run for :func:`kv_cache_append`, and why not others.

    Takes its arguments, and ``device`` as :func:`explain_paged` does; meta tensors do.

    Raises:
        RuntimeError: nothing can run the call; the message says why and what would work.
    """
    tensors = _append_tensors(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return _library.explain_append(*tensors, device or "")
