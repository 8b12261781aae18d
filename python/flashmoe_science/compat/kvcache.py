"""flash-attn's functions over a cache: append and attend, contiguous or paged."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..paged import explain_paged, flash_attention_paged, kv_cache_append
from .checks import (
    check_int,
    check_integers,
    check_tensor,
    check_together,
    descale,
    readable,
    refuse_q_descale,
    refuse_values,
    traced,
    within,
)

__all__ = ["flash_attn_with_kvcache"]


class _Rotary(NamedTuple):
    """Rotary embedding: the first 2 R numbers of a row are R pairs, each turned by its angle."""

    cos: Tensor  # (positions, R)
    sin: Tensor
    interleaved: bool  # pairs are neighbours; else one from each half

    def check(self, head_dim: int, capacity: int) -> None:
        check_tensor("rotary_cos", self.cos, "(positions, pairs)")
        check_tensor("rotary_sin", self.sin, "(positions, pairs)")
        shapes = tuple(self.cos.shape), tuple(self.sin.shape)
        if shapes[0] != shapes[1] or 2 * shapes[0][1] > head_dim:
            raise ValueError(
                f"rotary_cos has shape {shapes[0]} and rotary_sin {shapes[1]}; both must be "
                f"(positions, pairs), with at most {head_dim // 2} pairs for head dim {head_dim}"
            )
        if shapes[0][0] < capacity:
            raise ValueError(
                f"rotary_cos has {shapes[0][0]} positions; this cache has room for {capacity}"
            )

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, S, H, D) at positions (B, S) or (B, 1); in float32 at least, and rounded once."""
        wide = torch.promote_types(x.dtype, torch.float32)
        # Positions past the cache are nobody's: such tokens are not written, or an error.
        positions = positions.clamp(0, self.cos.shape[0] - 1)
        cos, sin = (table[positions][:, :, None].to(wide) for table in (self.cos, self.sin))
        width = 2 * cos.shape[-1]
        pairs, rest = x[..., :width].to(wide), x[..., width:]
        a, b = (pairs[..., ::2], pairs[..., 1::2]) if self.interleaved else pairs.chunk(2, -1)
        both = (a * cos - b * sin, a * sin + b * cos)
        turned = torch.stack(both, -1).flatten(-2) if self.interleaved else torch.cat(both, -1)
        return torch.cat((turned.to(x.dtype), rest), -1)


def _places(before: Tensor, new: int, leftpad: Tensor | None, capacity: int) -> tuple:
    """Where the new keys of each sequence begin, and how many it has then from its padding on.

    What cannot be is an error where the values can be read. Elsewhere such a sequence has -1 keys,
    which attention makes NaN, and its new keys begin where none is written.
    """
    before = before.long()
    total = before + new
    if leftpad is None and readable(before) and within(before, 0, capacity - new):
        return before, total
    good = (before >= 0) & (before <= capacity - new)
    if new:
        good = good | (total == 0)  # only padding
    if readable(before):
        room = f"from 0 to {capacity - new}: the cache has room for {capacity} keys, {new} are new"
        refuse_values("cache_seqlens", before, good, lambda i: room)
    if leftpad is not None:
        inside = (leftpad >= 0) & (leftpad <= total)
        if readable(leftpad) and readable(total):
            keys = "from 0 to {}, the keys of its sequence"
            refuse_values("cache_leftpad", leftpad, inside, lambda i: keys.format(total[i]))
        total, good = total - leftpad, good & inside
    return before.where(good, -new), total.where(good, -1)


def _check_caches(cache_batch_idx: Tensor, caches: int, total: Tensor) -> None:
    if readable(cache_batch_idx) and readable(total):
        good = (cache_batch_idx >= 0) & (cache_batch_idx < caches) | (total == 0)
        limits = f"from 0 to {caches - 1}, one of k_cache"
        refuse_values("cache_batch_idx", cache_batch_idx, good, lambda i: limits)


def _check_blocks(block_table: Tensor, k_cache: Tensor, before, total, queries, window) -> None:
    """The blocks exist that new keys are written to, or that queries see through their window."""
    if not (readable(block_table) and readable(total)):
        return
    blocks, page = k_cache.shape[:2]
    if within(block_table, 0, blocks - 1):
        return
    left = -1 if window is None else window[0]
    first = before
    if queries:
        first_seen = total - queries - left if left >= 0 else torch.zeros_like(total)
        first = torch.minimum(before, first_seen)
    starts = torch.arange(block_table.shape[1]) * page
    needed = (starts + page > first[:, None]) & (starts < total[:, None])
    good = ~needed | (block_table >= 0) & (block_table < blocks)
    limits = f"from 0 to {blocks - 1}, a block of k_cache"
    refuse_values("block_table", block_table, good, lambda *index: limits)


def _slots(positions: Tensor, table: Tensor, page: int) -> Tensor:
    """Where tokens at these positions (B, n) of their sequences belong; -1: nowhere."""
    entries = positions.div(page, rounding_mode="floor")
    inside = (positions >= 0) & (entries < table.shape[1])
    blocks = table.long().gather(1, entries.where(inside, 0))
    return (blocks * page + positions % page).where(inside & (blocks >= 0), -1).flatten()


def _tokens(caches: Tensor, leftpad: Tensor, page: int) -> Tensor:
    """What each of these caches (B, 1) holds from its padding on, as a table of pages of a token.

    Nothing for a negative one: counted on from, it would come to those of cache 0.
    """
    first = caches.long() * page + leftpad[:, None]
    return (first + torch.arange(page, device=leftpad.device)).where(caches >= 0, -1)


def _one_token_pages(cache: Tensor) -> Tensor:
    """(batch, length, heads, dim) as pages of one token each, without a copy."""
    if cache.shape[0] > 1 and cache.stride(0) != cache.shape[1] * cache.stride(1):
        raise NotImplementedError(
            "cache_leftpad needs caches whose sequences lie one after the other; strides "
            f"{cache.stride()} of shape {tuple(cache.shape)} do not"
        )
    return cache.flatten(0, 1)[:, None]


def _check_shapes(q, k_cache, v_cache, k, v, cache_batch_idx, cache_leftpad, block_table) -> None:
    check_tensor("q", q, "(B, Sq, Hq, D)")
    batch, cache = q.shape[0], "(caches, S, Hk, D)"
    if block_table is not None:
        cache = "(blocks, page, Hk, D)"
        check_tensor("block_table", block_table, "(B, n)")
        check_integers("block_table", block_table, q, "(B, n)", (batch, block_table.shape[1]))
    check_tensor("k_cache", k_cache, cache)
    check_tensor("v_cache", v_cache, cache)
    for name, x in {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}.items():
        if x is not None:
            check_integers(name, x, q, "(B,)", (batch,))
    if block_table is None and cache_batch_idx is None and batch > k_cache.shape[0]:
        raise ValueError(f"q has {batch} sequences and k_cache has {k_cache.shape[0]}")
    if k is not None:
        check_tensor("k", k, "(B, Snew, Hk, D)")
        new = (batch, k.shape[1])
        check_tensor("k", k, "(B, Snew, Hk, D)", (*new, *k_cache.shape[2:]))
        check_tensor("v", v, "(B, Snew, Hk, D)", (*new, *v_cache.shape[2:]))


def _lengths(cache_seqlens: int | Tensor | None, q: Tensor, capacity: int) -> Tensor:
    """The keys that each sequence has before this call."""
    if isinstance(cache_seqlens, Tensor):
        check_integers("cache_seqlens", cache_seqlens, q, "(B,)", (q.shape[0],))
        return cache_seqlens
    length = capacity if cache_seqlens is None else cache_seqlens
    check_int("cache_seqlens", length)
    return torch.full(q.shape[:1], length, dtype=torch.int64, device=q.device)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
):
    """New tokens over a cache, as ``flash_attn.flash_attn_with_kvcache``. Forward only.

    Args:
        q: ``(B, Sq, Hq, D)``.
        k_cache: ``(caches, S, Hk, D)``, or with ``block_table`` pages ``(blocks, page, Hk, D)``;
            in q's dtype or float8_e4m3fn.
        v_cache: the same for values.
        k: ``(B, Snew, Hk, D)``: written to the cache in place, from position ``cache_seqlens`` on,
            before anything is read. Of a sequence whose new keys do not all fit nothing is written,
            and it is an error, on CUDA NaN.
        v: the same for values.
        rotary_cos: ``(positions, R)``, with ``k``: the first ``2 R`` of each row of the new keys
            are turned by the angles of their positions, and those of ``q`` too: at
            ``cache_seqlens + i`` with ``causal`` or a window, else all at ``cache_seqlens``.
        rotary_sin: the same for sines.
        cache_seqlens: keys in the cache before this call, one number or ``(B,)``, int32 or int64;
            all of it unless given. With ``k``, minus their number says that a sequence is only
            padding, as transformers does: nothing is written or seen, and its results are 0.
        cache_batch_idx: ``(B,)``: which cache a sequence has; ``0 .. B - 1`` unless given.
        cache_leftpad: ``(B,)``: the position at which each sequence begins. Positions before it are
            not seen; ``cache_seqlens`` counts them.
        block_table: ``(B, n)``, int32 or int64.
        rotary_interleaved: pairs are neighbours, 0 and 1, 2 and 3; else 0 and R, 1 and R + 1.
        num_splits: changes nothing: how keys are split follows from the call.
        return_softmax_lse: return ``(out, softmax_lse)``, the latter ``(B, Hq, Sq)``.
        s_aux: sinks ``(Hq,)``, float32 or q's dtype.
        k_descale: the scale of a float8_e4m3fn cache: ``()``, ``(1,)``, ``(Hk,)``, or one of these
            expanded to ``(B, Hk)``. New keys are divided by it.
        v_descale: the same for values.

    The other arguments are those of :func:`flash_attn_func`. ``alibi_slopes`` and ``q_descale`` are
    refused. What a call is refused for is found before anything is written.
    """
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes is not supported over a cache")
    refuse_q_descale(q_descale)
    append = check_together(k=k, v=v)
    rotary = None
    if check_together(rotary_cos=rotary_cos, rotary_sin=rotary_sin):
        rotary = _Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    if rotary and not append:
        raise ValueError("rotary_cos is given without k and v; it turns new keys and their queries")
    if append and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k and v: it says where they are written")
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        name = "cache_leftpad" if cache_batch_idx is None else "cache_batch_idx"
        raise ValueError(f"{name} and block_table are both given; a table says where all keys are")
    _check_shapes(q, k_cache, v_cache, k, v, cache_batch_idx, cache_leftpad, block_table)
    if s_aux is not None:
        check_tensor("s_aux", s_aux, "(Hq,)")

    for name, tensor in {"q": q, "s_aux": s_aux}.items():  # before anything is written
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"flash_attn_with_kvcache has no gradient, and {name} would need one. Call "
                f"it under torch.no_grad() or torch.inference_mode(), or pass {name}.detach()"
            )

    (batch, length), page = q.shape[:2], k_cache.shape[1]
    new = k.shape[1] if append else 0
    steps = torch.arange(max(batch + 1, length, new), device=q.device)
    # A contiguous cache is its sequence's one page.
    table = block_table
    if table is None:
        table = (steps[:batch] if cache_batch_idx is None else cache_batch_idx)[:, None]
    capacity = table.shape[1] * page
    before = _lengths(cache_seqlens, q, capacity)
    if new > 1 or cache_leftpad is not None or readable(before):
        start, seq_lens = _places(before, new, cache_leftpad, capacity)
    else:  # one key has no slot where its length cannot be, and attention finds that length
        start, seq_lens = before.long(), before + new if new else before
    if cache_batch_idx is not None:
        _check_caches(cache_batch_idx, k_cache.shape[0], before + new)
    scales = {
        "k_scale": descale("k_descale", k_descale, batch),
        "v_scale": descale("v_descale", v_descale, batch),
    }

    if append:
        start = start[:, None]
        positions = start + steps[:new]
        if rotary:
            rotary.check(q.shape[-1], capacity)
            moves = causal or (window_size is not None and tuple(window_size) != (-1, -1))
            q = rotary.turn(q, start + steps[:length] if moves else start)
            k = rotary.turn(k, positions)
        rows = (k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, _slots(positions, table, page))
    if cache_leftpad is not None:
        table = _tokens(table, cache_leftpad, page)
        k_cache, v_cache = _one_token_pages(k_cache), _one_token_pages(v_cache)
    call = (q.flatten(0, 1), k_cache, v_cache, table, seq_lens)
    options = {
        "cu_seqlens_q": None if length == 1 else steps[: batch + 1] * length,
        "max_seqlen_q": length,
        "causal": causal,
        "window": window_size,
        "scale": softmax_scale,
        "softcap": softcap,
        "sinks": s_aux,
        "return_lse": True,
        **scales,
    }
    if append:
        # Refuses what attention would, while nothing is written.
        if not traced():
            explain_paged(*call, **options)
        if block_table is not None:
            _check_blocks(block_table, k_cache, before, before + new, length, window_size)
        kv_cache_append(*rows, **scales)
    out, lse = flash_attention_paged(*call, **options)
    out, lse = (x.unflatten(0, (batch, length)) for x in (out, lse))
    return (out, lse.mT) if return_softmax_lse else out
