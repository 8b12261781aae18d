"""flash-attn's functions over a cache: append and attend, contiguous or paged."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..paged import flash_attention_paged, kv_cache_append

__all__ = ["flash_attn_with_kvcache"]


def descale(name: str, scale: Tensor | None, batch: int) -> Tensor | None:
    """flash-attn's scales are (batch, key heads); ours are of a head, or of all."""
    if scale is None or scale.dim() < 2:
        return scale
    if scale.dim() != 2 or scale.shape[0] != batch:
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; it must be (batch, key heads)")
    if batch > 1 and scale.stride(0) != 0:
        raise NotImplementedError(
            f"{name} has a scale for each sequence; a cache here has one, or one for each key "
            "head. Pass () or (heads,), or that expanded to (batch, heads)"
        )
    return scale[0] if batch else scale.new_ones(scale.shape[1])


def refuse_q_descale(q_descale: Tensor | None) -> None:
    if q_descale is not None:
        raise NotImplementedError(
            "q_descale is not supported: queries are not fp8 here; pass them in 16 bits"
        )


def _check_together(**arguments) -> bool:
    """Whether they are given: all or none."""
    given = [name for name, value in arguments.items() if value is not None]
    if given and len(given) < len(arguments):
        raise ValueError(f"{' and '.join(arguments)} must be given together; only {given[0]} is")
    return bool(given)


class _Rotary(NamedTuple):
    """Rotary embedding: the first 2 R numbers of a row are R pairs, each turned by its angle."""

    cos: Tensor  # (positions, R)
    sin: Tensor
    interleaved: bool  # pairs are neighbours; else one from each half

    def check(self, head_dim: int, capacity: int) -> None:
        shapes = tuple(self.cos.shape), tuple(self.sin.shape)
        if self.cos.dim() != 2 or shapes[0] != shapes[1] or 2 * shapes[0][1] > head_dim:
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


def _slots(positions: Tensor, table: Tensor, page: int) -> Tensor:
    """Where tokens at these positions (B, n) of their sequences belong; -1 past the cache's end."""
    entries = positions.div(page, rounding_mode="floor")
    inside = (positions >= 0) & (entries < table.shape[1])
    blocks = table.long().gather(1, entries.where(inside, 0))
    return (blocks * page + positions % page).where(inside & (blocks >= 0), -1).flatten()


def _one_token_pages(cache: Tensor) -> Tensor:
    """(batch, length, heads, dim) as pages of one token each, without a copy."""
    if cache.shape[0] > 1 and cache.stride(0) != cache.shape[1] * cache.stride(1):
        raise NotImplementedError(
            "cache_leftpad needs caches whose sequences lie one after the other; strides "
            f"{cache.stride()} of shape {tuple(cache.shape)} do not"
        )
    return cache.flatten(0, 1)[:, None]


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
            before anything is read. Where the cache is full nothing is written, and that sequence
            is an error, on CUDA NaN.
        v: the same for values.
        rotary_cos: ``(positions, R)``, with ``k``: the first ``2 R`` of each row of the new keys
            are turned by the angles of their positions, and those of ``q`` too: at
            ``cache_seqlens + i`` with ``causal`` or a window, else all at ``cache_seqlens``.
        rotary_sin: the same for sines.
        cache_seqlens: keys in the cache before this call, one number or ``(B,)``, int32 or int64;
            all of it unless given.
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
    refused.
    """
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes is not supported over a cache")
    refuse_q_descale(q_descale)
    append = _check_together(k=k, v=v)
    rotary = None
    if _check_together(rotary_cos=rotary_cos, rotary_sin=rotary_sin):
        rotary = _Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    if rotary and not append:
        raise ValueError("rotary_cos is given without k and v; it turns new keys and their queries")
    if append and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k and v: it says where they are written")
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        name = "cache_leftpad" if cache_batch_idx is None else "cache_batch_idx"
        raise ValueError(f"{name} and block_table are both given; a table says where all keys are")
    if q.dim() != 4 or k_cache.dim() != 4:
        name, given = ("q", q) if q.dim() != 4 else ("k_cache", k_cache)
        raise ValueError(f"{name} has shape {tuple(given.shape)}; it must have 4 dimensions")

    for name, tensor in {"q": q, "s_aux": s_aux}.items():  # before anything is written
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"flash_attn_with_kvcache has no gradient, and {name} would need one. Call "
                f"it under torch.no_grad() or torch.inference_mode(), or pass {name}.detach()"
            )

    (batch, length), page = q.shape[:2], k_cache.shape[1]
    steps = torch.arange(max(batch + 1, length, k.shape[1] if append else 0), device=q.device)
    # A contiguous cache is its sequence's one page.
    table = block_table
    if table is None:
        if cache_batch_idx is None and batch > k_cache.shape[0]:
            raise ValueError(f"q has {batch} sequences and k_cache has {k_cache.shape[0]}")
        table = (steps[:batch] if cache_batch_idx is None else cache_batch_idx)[:, None]
    seq_lens = table.shape[1] * page if cache_seqlens is None else cache_seqlens
    if not isinstance(seq_lens, Tensor):
        seq_lens = torch.full((batch,), seq_lens, device=q.device)
    scales = {
        "k_scale": descale("k_descale", k_descale, batch),
        "v_scale": descale("v_descale", v_descale, batch),
    }

    if append:
        start = seq_lens.long()[:, None]
        positions = start + steps[: k.shape[1]]
        if rotary:
            rotary.check(q.shape[-1], table.shape[1] * page)
            moves = causal or (window_size is not None and tuple(window_size) != (-1, -1))
            q = rotary.turn(q, start + steps[:length] if moves else start)
            k = rotary.turn(k, positions)
        slots = _slots(positions, table, page)
        kv_cache_append(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots, **scales)
        seq_lens = seq_lens + k.shape[1]
    if cache_leftpad is not None:
        start = table.long() * page + cache_leftpad.long()[:, None]
        table = start + torch.arange(page, device=q.device)
        k_cache, v_cache = _one_token_pages(k_cache), _one_token_pages(v_cache)
        seq_lens = seq_lens - cache_leftpad
    out, lse = flash_attention_paged(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        table,
        seq_lens,
        cu_seqlens_q=None if length == 1 else steps[: batch + 1] * length,
        max_seqlen_q=length,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        sinks=s_aux,
        return_lse=True,
        **scales,
    )
    out, lse = (x.unflatten(0, (batch, length)) for x in (out, lse))
    return (out, lse.mT) if return_softmax_lse else out
